"""Whose an experiment is: its first job's submitter's, who may share it with others by name.

A party keeps the states of an experiment under its identifier, which is no secret. Without an owner, whoever
submits a job of the same identifier would be given the model.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from suture.core.errors import ConfigError
from suture.core.files import parse_json, read_bounded, write_json

OWNER = "owner.json"
"""File of the owner in the folder of an experiment, at the server and at each site."""

DEFAULT_STUDY = "default"
"""FLARE's study of a job that was submitted in none."""


@dataclass(frozen=True)
class Submitter:
    """Who submitted a job, as the transport has authenticated them.

    Attributes:
        name: of the user.
        org: their organisation.
        study: of FLARE, in which they submitted it: who may act in one study need not see another's model.
    """

    name: str
    org: str
    study: str = DEFAULT_STUDY


class NotOwner(ConfigError):
    """A job of an experiment that is not its submitter's."""


def claim(folder: Path, submitter: Submitter | None, shared_with: Sequence[str] | None) -> None:
    """Check that a job may use an experiment; the first job makes its submitter the owner.

    States without an owner are refused too: who began them is not known.

    Args:
        folder: of the experiment.
        submitter: of the job; None where the transport has no users (a loop, a simulation).
        shared_with: names of the users who may continue the experiment too. Only the owner's count, and
            replace the ones before; None changes nothing.

    Raises:
        NotOwner: the experiment is another's, who does not share it, or has states without an owner.
        ConfigError: the owner's file is broken.
    """
    path = folder / OWNER
    if not path.exists():
        if submitter is None:
            return
        if any(not entry.name.startswith(".") for entry in folder.glob("*")):
            raise _refusal(folder.name)
        _write_first(path, submitter, shared_with or ())
    owner, shared = _read(path)
    if submitter == owner:
        if shared_with is not None and sorted(shared_with) != shared:
            write_json(path, _content(owner, shared_with))
    elif submitter is None or submitter.study != owner.study or submitter.name not in shared:
        raise _refusal(folder.name)


def may_use(folder: Path, user: str, study: str = DEFAULT_STUDY) -> bool:
    """Whether the owner's file, if there is one, permits a user of that name to use it in a study.

    Raises:
        ConfigError: the owner's file is broken.
    """
    if not (folder / OWNER).exists():
        return True
    owner, shared = _read(folder / OWNER)
    return study == owner.study and user in (owner.name, *shared)


def _write_first(path: Path, owner: Submitter, shared_with: Sequence[str]) -> None:
    """Write the owner's file, complete, unless another job has just done so."""
    temporary = path.with_name(f".{OWNER}.{secrets.token_hex(4)}.tmp")
    try:
        write_json(temporary, _content(owner, shared_with))
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)


def _content(owner: Submitter, shared_with: Sequence[str]) -> dict[str, object]:
    return {**asdict(owner), "shared_with": sorted(shared_with)}


def _read(path: Path) -> tuple[Submitter, list[str]]:
    try:
        content = parse_json(read_bounded(path))
        owner = Submitter(str(content["name"]), str(content["org"]), str(content.get("study", DEFAULT_STUDY)))
        return owner, [str(user) for user in content["shared_with"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is broken ({error}); it needs the owner's name and org, and a list shared_with"
        ) from error


def _refusal(experiment: str) -> NotOwner:
    """Return the same words in every case: whose the experiment is, and how far it came, is not told."""
    return NotOwner(
        f"the experiment {experiment!r} is not this submitter's; begin another one (`suture run` without "
        "--resume, `suture export --experiment NAME`), name its --study, or ask to be named in shared_with. "
        f"An administrator finds the owner in {OWNER} of its folder"
    )
