"""What an honest run meets when its settings change on the way, or nothing improves any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rounds import configured, reply_of
from suture.core.privacy import PrivacyConfig
from suture.federation.loop import Loop
from suture.federation.server.norms import untrainable
from suture.federation.server.selection import Best, ModelSelection
from suture.federation.site.ledger import Ledger, Release
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.check import check_reply
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=8))


def test_a_run_in_which_nothing_improves_is_stopped_by_patience() -> None:
    """Rounds of equal loss: the later one is kept, and is no improvement."""
    standings = ModelSelection()
    for round_, (loss, auroc) in enumerate([(0.5, 0.7), (0.4, 0.8), (0.4, 0.8), (0.4, 0.8)], 1):
        standings = standings.after_losses(Best(round_, -loss, auroc))
        assert standings.over(round_, 2) is (round_ == 4)
    assert standings.best == Best(4, -0.4, 0.8)
    standings = standings.after_losses(Best(5, -0.4, 0.9))
    assert not standings.over(5, 2)


@pytest.mark.complete
def test_a_tightened_limit_does_not_hold_back_the_open_round(tiny: Any) -> None:
    """The kept answer has six digits, which the site's own filter would refuse again and again."""
    federation = tiny(METHOD, n=300)
    server, sites = federation.server(), federation.sites()
    transport = Loop(sites)
    server.begin(transport.exchange("handshake", server.handshake(transport.sites), server.receiver()))
    task, site = unpack(server.assign()["alpha"]), sites["alpha"]
    assert isinstance(task, TaskData)
    first = reply_of(site, task)
    site.close()
    strict = configured(site, privacy={"min_count": 5, "min_loss": 20})
    again = reply_of(strict, task)
    assert isinstance(again, Update)
    check_reply(again, site.answer(task).allowed)
    assert replace(again, train_loss=None, metrics=None).weight == first.weight  # type: ignore[union-attr]


def asked(site: Site, task: TaskData) -> str:
    return site.releases.digest_request(task, site._allow(task))


def test_more_rounds_are_no_other_question_about_the_same_model(tiny: Any) -> None:
    federation = tiny(METHOD)
    task = TaskData("evaluate", 1, split="test", labels=("Mass", "Nodule"))
    requests = []
    for rounds in (3, 9):
        site = replace(federation, schedule=replace(federation.schedule, rounds=rounds)).sites()["alpha"]
        requests.append((asked(site, task), asked(site, replace(task, task="train"))))
    (evaluated, trained), (later, trained_later) = requests
    assert evaluated == later
    assert trained != trained_later


def test_a_site_that_is_alone_is_never_excluded() -> None:
    assert untrainable({"a": 9.0}, {"a"}) is None


def test_the_ledger_leaves_the_files_of_experiments_alone(tmp_path: Path) -> None:
    """A process of another container writes one: its number means nothing here."""
    writing = tmp_path / "other" / ".round-000002.safetensors.4194000.abcdef01.tmp"
    writing.mkdir(parents=True)
    Ledger(tmp_path / "ledger.jsonl", PrivacyConfig()).record(Release("t", "e", "train", 1))
    assert writing.exists()


def test_a_simulated_site_has_no_budget(tmp_path: Path) -> None:
    """PMFL's published schedule has 4,000 rounds."""
    limits = PrivacyConfig.of_public_data("own")
    assert min(limits.max_answers, limits.max_figures) >= 10**6
    assert (limits.min_count, limits.min_loss) == (0, 0)
