"""Ending a connection of FLARE that is only beginning.

FLARE 2.9.0: `stop` of a cell returns at once where its start has not ended, and leaves the threads that
connect.
Where: nvflare/fuel/f3/cellnet/core_cell.py: stop
Expires with: test_flare_leaves_the_threads_of_a_cell_that_is_only_starting
"""

from __future__ import annotations

from typing import Any


def stop(cell: Any) -> None:
    """Stop a cell, whether its start has ended or not."""
    cell.stop()
    cell.core_cell.communicator.stop()
