"""A word that stands in a site's patients, files and reports is in nothing that leaves, whatever fails."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from one_site import OneSite

from suture.core.errors import RescueFactorError
from suture.data.batch import Augmentation
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.flare.codec import from_shareable_
from suture.flare.compat.tensors import register
from suture.learning.steps import GradientOverflow, NonFiniteLoss
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import Abstain, TaskData, Update
from suture.protocol.packing import unpack
from world import site_config, write_image, write_table

CANARY = "Kanarienvogel"
METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
MODELS = {"images": ModelSpec("cnn", size=16), "reports": ModelSpec("lstm", longest=8)}


class House:
    """The site, whose patients, files, folder and reports all have the word, and the server of its tasks."""

    def __init__(self, folder: Path, kind: str = "images") -> None:
        register()
        self.folder = folder / CANARY
        self.data = self.folder / "data"
        rows = []
        for i in range(20):
            name, split = f"{CANARY}-{i}.png", ("train", "train", "validation", "test")[i % 4]
            write_image(self.data / "images" / name, i)
            rows.append((name, f"{CANARY}{i}", split, i % 2, i // 2 % 2, f"patient {CANARY} has a fever"))
        write_table(
            self.data / "labels.csv", [("image", "patient", "split", "Mass", "Nodule", "report"), *rows]
        )
        own = {"text_column": "report"} if kind == "reports" else {"root": self.data / "images"}
        table = {"dataset": "hospital", "table": self.data / "labels.csv", "labels": ["Mass", "Nodule"]}
        site_config(self.data, data={**table, **own}, privacy={"min_count": 0, "min_loss": 0})
        plan = Plan(METHOD, MODELS[kind], Augmentation(), 1, "run", code_hash())
        self.site = OneSite(self.folder / "site", plan, self.data / "suture.toml")
        self.config = self.folder / "site" / "local" / "suture.toml"
        schedule = Schedule(name="canary", title="canary", rounds=2)
        self.server = open_server(plan, schedule, None, folder / "server")

    def train(self) -> Shareable:
        return self.site.first_round(self.server)

    def errors(self) -> str:
        """What the site wrote down of errors for itself."""
        return "".join(path.read_text() for path in self.folder.rglob("errors.jsonl"))


def silent(house: House, reply: Shareable, caplog: pytest.LogCaptureFixture) -> Any:
    """The message in which the word is not; nor is it in FLARE's events, or in what goes to error_log.txt."""
    sent = fobs.dumps(reply)
    assert CANARY.encode() not in sent
    assert fobs.loads(sent).keys() == reply.keys(), "what is looked through is the whole answer"
    assert CANARY not in str(house.site.engine.events)
    # FLARE's default streams the log of errors to the server.
    shown = [logging.Formatter().format(r) for r in caplog.records if r.levelno >= logging.ERROR]
    assert not [line for line in shown if CANARY in line]
    server = repr(house.server.collector.lines) + "".join(
        p.read_text() for p in house.server.record.folder.rglob("*.json*")
    )
    assert CANARY not in server
    return unpack(from_shareable_(reply)) if reply.get_return_code() == "OK" else reply.get_return_code()


@pytest.mark.parametrize("kind", MODELS)
def test_what_goes_well(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path, kind)
    assert isinstance(silent(house, house.train(), caplog), Update)
    assert house.errors() == ""


FAILURES: dict[str, BaseException] = {
    "out_of_memory": torch.OutOfMemoryError(f"CUDA ran out at {CANARY}"),
    "non_finite_loss": NonFiniteLoss(f"the loss of {CANARY}-1.png is no number"),
    "gradient_overflow": GradientOverflow(f"{CANARY}: the gradients of round 1 overflow in fp16", 0.5),
    "rescue_factor": RescueFactorError(f"{CANARY}: the rescue factor of round 1 is nan"),
    "disk_full": OSError(errno.ENOSPC, "No space left on device", f"/data/{CANARY}.png"),
    "bug": ZeroDivisionError(f"{CANARY} / 0"),
    "torch": RuntimeError(f"shape mismatch in {CANARY}"),
    "key": KeyError(CANARY),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_in_training(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise FAILURES[kind]

    house = House(tmp_path)
    monkeypatch.setattr("suture.methods.averaging.fit", fail)
    said = silent(house, house.train(), caplog)
    assert CANARY in house.errors(), "the site itself is told everything"
    reason = said.reason if isinstance(said, Abstain) else said
    assert reason == ("EXECUTION_EXCEPTION" if kind in ("bug", "torch", "key") else kind)


def no_image(house: House) -> None:
    for path in (house.data / "images").iterdir():
        path.write_bytes(b"x")


def no_label(house: House) -> None:
    table = house.data / "labels.csv"
    table.write_text(table.read_text().replace("train,1", f"train,{CANARY}"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_image, "data_fault"),
        (no_label, "data_fault"),
        (lambda house: (house.data / "labels.csv").write_text(f"{CANARY}\n"), "data_fault"),
        (lambda house: house.config.write_text(f'[data]\nroot = "{CANARY}"\n'), "configuration"),
        (lambda house: house.config.unlink(), "configuration"),
    ],
)
def test_a_failure_before_training(
    spoil: Callable[[House], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path)
    spoil(house)
    abstained = silent(house, house.site.answer(TaskData("handshake")), caplog)
    assert isinstance(abstained, Abstain)
    assert abstained.reason == reason
    assert CANARY in house.errors()


def test_an_answer_that_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug that names a tensor after a patient."""
    house, train = House(tmp_path), SurgicalAggregation.train

    def leak(*args: Any) -> Any:
        update, keep = train(*args)
        return Update(update.round, update.labels, {CANARY: torch.ones(1)}, {}, update.class_weights), keep

    monkeypatch.setattr(SurgicalAggregation, "train", leak)
    assert silent(house, house.train(), caplog) == "TASK_RESULT_FILTER_ERROR"


def test_an_image_that_cannot_be_read_among_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path)
    house.config.write_text(house.config.read_text() + "max_faults = 0.2\n")
    (house.data / "images" / f"{CANARY}-0.png").write_bytes(b"x")
    assert isinstance(silent(house, house.train(), caplog), Update)
