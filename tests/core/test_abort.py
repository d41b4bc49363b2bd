"""An aborted job ends at the next batch, in its own thread alone."""

from __future__ import annotations

import threading

import pytest
import torch

from suture.core.errors import Aborted
from suture.core.runtime import abortable, check_abort, moved


def test_what_moves_a_batch_ends_where_the_job_is_aborted() -> None:
    with abortable(lambda: False):
        moved(torch.ones(2), "cpu")
    with abortable(lambda: True), pytest.raises(Aborted, match="the job was aborted"):
        moved(torch.ones(2), "cpu")
    moved(torch.ones(2), "cpu")


def test_the_innermost_signal_counts_and_then_the_one_before() -> None:
    with abortable(lambda: True):
        with abortable(lambda: False):
            check_abort()
        with pytest.raises(Aborted):
            check_abort()


def test_another_thread_goes_on() -> None:
    """FLARE's simulator may run several sites in the threads of one process."""
    ended: list[str] = []

    def work() -> None:
        check_abort()
        ended.append("whole")

    with abortable(lambda: True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ended == ["whole"]
