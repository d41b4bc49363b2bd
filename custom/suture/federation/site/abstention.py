"""Why a site abstains: expected failures as typed reasons. The text of an error stays at the site."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from suture.core.errors import (
    FULL,
    LOCKED,
    CodeMismatch,
    ConfigError,
    DataError,
    LabelError,
    RescueFactorError,
    SutureError,
)
from suture.core.files import append_line, make_folder, read_records
from suture.core.runtime import now, out_of_memory
from suture.learning.steps import GradientOverflow, NonFiniteLoss
from suture.privacy.masking import MaskingRefused
from suture.protocol.messages import Abstain, Reason, TaskData

log = logging.getLogger(__name__)


class BudgetSpent(SutureError):
    """The site has given all answers and figures, or taken part in all experiments, that it permits."""


class LedgerBroken(ConfigError):
    """The ledger of the site's releases is not whole, so that nobody knows what it has released."""


class LabelViewRefused(SutureError):
    """The method would show this site every class name, which its configuration does not permit."""


class MissingState(SutureError):
    """The site's state is lost; the server has to send the tensors again that it sends only once."""


class ComputationChanged(SutureError):
    """Threads, device or precision differ from those of the rounds before, which gives other sums."""


_REASONS: tuple[tuple[type[BaseException], Reason], ...] = (
    (CodeMismatch, "code_mismatch"),
    (BudgetSpent, "budget"),
    (LedgerBroken, "ledger"),
    (LabelViewRefused, "label_view"),
    (MaskingRefused, "masking"),
    (MissingState, "missing_state"),
    (ComputationChanged, "computation"),
    (NonFiniteLoss, "non_finite_loss"),
    (GradientOverflow, "gradient_overflow"),
    (RescueFactorError, "rescue_factor"),
    (DataError, "data_fault"),
    (LabelError, "labels"),
    (ConfigError, "configuration"),
)

_DISK: dict[int, Reason] = {**dict.fromkeys(FULL, "disk_full"), **dict.fromkeys(LOCKED, "read_only")}


def reason_of(error: BaseException) -> Reason | None:
    """Return the typed reason of an expected failure, None for any other error."""
    if out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in _DISK:
        return _DISK[error.errno]
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)


def record_error(folder: Path, site: str, task: TaskData, error: Exception) -> None:
    """Write the whole error to errors.jsonl in the site's folder.

    The log names only the class of the error: FLARE may send logs to the server, and a text may name a
    patient.
    """
    log.error(
        "%s: %s; details are in errors.jsonl in the site's folder of this experiment", site, kind(error)
    )
    record = {"time": now(), "site": site, "task": task.task, "round": task.round}
    record |= {"error": kind(error), "message": str(error)}
    record |= {"traceback": "".join(traceback.format_exception(error))}
    try:
        make_folder(folder)
        append_line(folder / "errors.jsonl", record, private=True)
    except OSError as full:
        log.error("%s: the error could not be recorded: %s", site, full.strerror)


def first_recorded(paths: Iterable[Path], since: str) -> str | None:
    """Return the earliest error that sites have recorded, with the name of the site; None without any.

    Args:
        paths: files that `record_error` has written, or that are not there.
        since: time before which errors are of an earlier run, in ISO 8601.
    """
    notes: list[dict[str, Any]] = []
    for path in sorted(paths):
        with suppress(DataError):  # a damaged note must not hide the others
            notes += [note for note in read_records(path) if str(note.get("time")) >= since]
    if not notes:
        return None
    first = min(notes, key=lambda note: str(note.get("time")))
    site, text = str(first.get("site")), str(first.get("message"))
    return text if site in text else f"{site}: {text}"


def kind(error: BaseException) -> str:
    """Return the class name of an error: all of it that may leave a site."""
    return type(error).__name__


def abstention(error: Exception) -> Abstain | None:
    """Return the answer to an expected failure, None for any other error."""
    reason = reason_of(error)
    return Abstain(reason, kind(error), getattr(error, "rows", None)) if reason else None
