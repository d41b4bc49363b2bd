"""Why a site abstains: expected failures as typed reasons. The text of an error stays at the site."""

from __future__ import annotations

import errno
import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path

import torch

from suture.core.errors import ConfigError, DataError, LabelError, RescueFactorError, SutureError
from suture.learning.training import NonFiniteLoss
from suture.protocol.messages import Abstain, Payload, Reason

log = logging.getLogger(__name__)


class CodeMismatch(SutureError):
    """The job was made with other code than the site runs."""


class LabelViewRefused(SutureError):
    """The method would show this site every class name, which its configuration does not permit."""


class MissingState(SutureError):
    """What the site kept is gone; the server has to send it again."""


class ThreadsChanged(SutureError):
    """Another number of torch threads than the run began with gives other sums."""


_REASONS: tuple[tuple[type[BaseException], Reason], ...] = (
    (CodeMismatch, "code_mismatch"),
    (LabelViewRefused, "label_view"),
    (MissingState, "missing_state"),
    (ThreadsChanged, "threads"),
    (NonFiniteLoss, "non_finite_loss"),
    (RescueFactorError, "rescue_factor"),
    (DataError, "data_fault"),
    (LabelError, "labels"),
    (ConfigError, "configuration"),
)

_DISK: dict[int, Reason] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "disk_full"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "read_only"),
}


def out_of_memory(error: BaseException) -> bool:
    """Whether the memory was full: of a GPU, of Python, or of the CPU, which torch tells in words only."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def reason_of(error: BaseException) -> Reason | None:
    """The typed reason of an expected failure, None for any other."""
    if out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in _DISK:
        return _DISK[error.errno]
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)


def note(folder: Path, site: str, task: Payload, error: Exception) -> None:
    """Keeps the whole error at the site, in errors.jsonl of its folder.

    The log has the kind of error alone: FLARE may send logs to the server, and a text may name a patient.
    """
    log.error("%s: %s; errors.jsonl in the site's folder of this experiment says more", site, kind(error))
    record = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "site": site,
        "task": task.task,
        "round": task.round,
        "error": kind(error),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as full:
        log.error("%s: the error could not be kept: %s", site, full.strerror)


def kind(error: BaseException) -> str:
    """The class of an error: all of it that may leave a site."""
    return type(error).__name__


def abstention(error: Exception) -> Abstain | None:
    """What is said of an expected failure, None for any other."""
    reason = reason_of(error)
    return Abstain(reason, kind(error), getattr(error, "rows", None)) if reason else None
