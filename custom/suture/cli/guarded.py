"""How every command ends: an expected error is one message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from suture.core.errors import ConfigError, SutureError


def guarded(command: Callable[[], Any]) -> None:
    """Calls a command: exit code 2 for a wrong setting, 1 for another expected error, 130 for Ctrl-C."""
    try:
        command()
    except SutureError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "interrupted; what was committed is kept, continue with --resume", style="yellow"
        )
        sys.exit(130)
