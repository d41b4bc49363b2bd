"""Many sites of which some are missing in every round."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ledger import Found
from poc import digest

from between import Between
from suture.federation.loop import federate
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed

pytestmark = pytest.mark.complete


METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
PAIRS = (("Mass", "Nodule"), ("Nodule", "Hernia"), ("Fibrosis", "Nodule", "Mass"))
SITES = {f"site-{i:02d}": PAIRS[i % 3] for i in range(10)}


@pytest.mark.case("drop-out")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_ten_sites_of_which_some_drop_out(share: float, attempt: int, tiny: Any, note: Any) -> None:
    federation = tiny(METHOD, SITES, n=10, rounds=4, min_sites=4, max_failed_rounds=5)
    lost = 0

    def drop(site: str, task: TaskData, answer: Packed) -> Packed | None:
        nonlocal lost
        # Not the order of asking, but who and when: a second run loses the same answers.
        if task.task == "train" and random.Random(f"{attempt}{site}{task.round}").random() < share:
            lost += 1
            return None
        return answer

    models = []
    for out in ("one", "two"):
        server = federation.server(out)
        federate(server, Between(federation.sites(out), drop))
        history = [json.loads(x) for x in (server.record.folder / "history.jsonl").read_text().splitlines()]
        missing = sum(f["status"] == "missing" for line in history for f in line["sites"].values())
        models.append(digest(server.record.folder))
    assert missing
    assert 2 * missing == lost
    assert models[0] == models[1]
    note(Found(updates_lost=missing, model=models[0]))
