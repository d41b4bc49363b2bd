"""A loop in which a test stands between the sites and the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suture.federation import Loop
from suture.messages import Payload, TaskName
from suture.packing import Packed, pack, unpack
from suture.server.inbox import Receive


class Between(Loop):
    """A loop in which a test may change, lose or break what a site answers."""

    def __init__(self, sites: Any, change: Callable[[str, Payload, Packed], Packed | None]) -> None:
        super().__init__(sites)
        self.change = change

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receive) -> dict[str, str]:
        missing = {}
        for name, packed in payloads.items():
            payload = unpack(packed)
            assert isinstance(payload, Payload)
            answer = self.change(name, payload, pack(self._sites[name].answer(payload)))
            if answer is None:
                missing[name] = "lost on the way"
            else:
                receive(name, answer)
        return missing
