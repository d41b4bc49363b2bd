"""The answers that a site has sent, kept as they were: a task that comes again has the same answer again.

Beside the answer stands its release, with the settings under which it was made, so that a site that is
killed before the ledger has the line writes it afterwards as it would have been.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from suture.core.errors import SutureError
from suture.federation.site.ledger import Release
from suture.federation.store import Rounds, read_state
from suture.protocol.messages import Evaluation, Scores, TaskData, Update
from suture.protocol.packing import Packed, digest, unpack

log = logging.getLogger(__name__)

Answer = Update | Scores | Evaluation

_RELEASE = TypeAdapter(Release)


@dataclass(frozen=True)
class Answers:
    """The kept answers of a site in one experiment: the newest ones, as many rounds as a server can ask for.

    Of training tasks it keeps those of the rounds whose states it keeps (`Rounds`), of evaluations the
    newest of each split.
    """

    folder: Path

    def find(self, task: TaskData, request: str) -> tuple[Answer, Release] | None:
        """Return the answer to a request, and its release; None where there is none that is whole.

        Args:
            request: digest of all that the answer depends on.
        """
        path = self._rounds(task).path(task.round)
        if not path.exists():
            return None
        try:
            kept = read_state(path)
            if kept.header["request"] != request:
                return None
            packed = Packed(kept.tensors, kept.header["reply"])
            reply, release = unpack(packed), _RELEASE.validate_python(kept.header["release"])
            if digest(packed) != release.answer:
                raise SutureError(f"{path} is damaged: it differs from the answer that was released")
        except (SutureError, KeyError, ValidationError) as error:
            log.warning("a stored answer cannot be sent again: %s", error)
            return None
        return (reply, release) if isinstance(reply, Answer) else None

    def keep(self, task: TaskData, request: str, answer: Packed, release: Release) -> None:
        """Write a packed answer to the disk, then delete those that no server asks for any more.

        It is not synchronised: an answer that is lost with the power is made again, as another release.

        Raises:
            OSError: nothing was written.
        """
        header = {"request": request, "release": to_jsonable_python(release), "reply": answer.header}
        committed = task.committed if task.task == "train" else -1
        self._rounds(task).save(task.round, Packed(answer.tensors, header), committed, durable=False)

    def _rounds(self, task: TaskData) -> Rounds:
        return Rounds(self.folder / (task.split if task.task == "evaluate" else task.task))
