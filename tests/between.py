"""A loop in which a test stands between the sites and the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suture.federation.loop import Loop
from suture.federation.server.collector import Receiver
from suture.protocol.messages import TaskData, TaskName
from suture.protocol.packing import Packed, unpack


class Between(Loop):
    """A loop in which a test may change, lose or break what a site answers."""

    def __init__(self, sites: Any, change: Callable[[str, TaskData, Packed], Packed | None]) -> None:
        super().__init__(sites)
        self.change = change

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        missing = {}
        for name, packed in payloads.items():
            payload = unpack(packed)
            assert isinstance(payload, TaskData)
            answer = self.change(name, payload, self._sites[name].answer(payload).packed)
            if answer is None:
                missing[name] = "lost on the way"
            else:
                receive(name, answer)
        return missing
