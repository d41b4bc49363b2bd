"""A word that stands in a site's patients, files and reports is in nothing that leaves, whatever fails."""

from __future__ import annotations

import csv
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from one_site import OneSite
from PIL import Image

from suture.core.errors import RescueFactorError
from suture.data.batch import Augmentation
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import open_server
from suture.flare.codec import from_shareable_
from suture.flare.compat.tensors import register
from suture.learning.training import GradientOverflow, LocalTraining, NonFiniteLoss
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import Abstain, TaskData, Update
from suture.protocol.packing import unpack

CANARY = "Kanarienvogel"
LABELS = ("Mass", "Nodule")
METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
MODELS = {"images": ModelSpec("cnn", size=16), "reports": ModelSpec("lstm", longest=8)}


def write(folder: Path, kind: str) -> Path:
    """A hospital whose patients, files, folder and reports all have the word."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    rows = []
    for i in range(20):
        name = f"{CANARY}-{i}.png"
        Image.fromarray(rng.integers(0, 255, (16, 16)).astype(np.uint8)).save(folder / "images" / name)
        split = ("train", "train", "validation", "test")[i % 4]
        rows.append([name, f"{CANARY}{i}", split, i % 2, (i // 2) % 2, f"patient {CANARY} has a fever"])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "patient", "split", *LABELS, "report"], *rows])
    own = 'text_column = "report"\n' if kind == "reports" else f'root = "{folder}/images"\n'
    config = folder / "suture.toml"
    config.write_text(
        f'[data]\ndataset = "hospital"\ntable = "{folder}/labels.csv"\n'
        f'{own}labels = ["Mass", "Nodule"]\n[privacy]\nmin_count = 0\nmin_loss = 0\n'
    )
    return config


class House:
    """The site, and the server's tasks for it."""

    def __init__(self, folder: Path, kind: str) -> None:
        register()
        self.folder = folder / CANARY
        self.config = write(self.folder / "data", kind)
        self.plan = Plan(METHOD, MODELS[kind], Augmentation(), 1, "run", code_hash())
        self.site = OneSite(self.folder / "site", self.plan, self.config)
        self.server = open_server(
            self.plan, Schedule(name="canary", title="canary", rounds=2), None, folder / "server"
        )

    def train(self) -> Shareable:
        """SiteInfo, and the answer to the first round."""
        info = unpack(self.server.handshake(["alpha"])["alpha"])
        assert isinstance(info, TaskData)
        self.server.collector.receive("alpha", from_shareable_(self.site.answer(info)))
        self.server.begin({})
        task = unpack(self.server.assign()["alpha"])
        assert isinstance(task, TaskData)
        return self.site.answer(task)

    def errors(self) -> str:
        """What the site wrote down of errors for itself."""
        return "".join(path.read_text() for path in self.folder.rglob("errors.jsonl"))


@pytest.fixture(params=["images", "reports"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    return House(tmp_path, request.param)


def silent(house: House, reply: Shareable, caplog: pytest.LogCaptureFixture) -> None:
    """The word is not in the answer, in the events that FLARE hands on, or in what goes to error_log.txt."""
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


def test_what_goes_well(house: House, caplog: pytest.LogCaptureFixture) -> None:
    reply = house.train()
    assert isinstance(unpack(from_shareable_(reply)), Update)
    silent(house, reply, caplog)
    assert house.errors() == ""


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


FAILURES = {
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
    house = House(tmp_path, "images")
    monkeypatch.setattr("suture.methods.averaging.fit", raising(FAILURES[kind]))
    reply = house.train()
    silent(house, reply, caplog)
    assert CANARY in house.errors(), "the site itself is told everything"
    if kind in ("bug", "torch", "key"):
        assert reply.get_return_code() == "EXECUTION_EXCEPTION"
    else:
        abstained = unpack(from_shareable_(reply))
        assert isinstance(abstained, Abstain)
        assert abstained.reason == kind


def no_image(house: House) -> None:
    for path in (house.folder / "data" / "images").iterdir():
        path.write_bytes(b"x")


def no_table(house: House) -> None:
    (house.folder / "data" / "labels.csv").write_text(f"{CANARY}\n")


def no_label(house: House) -> None:
    table = house.folder / "data" / "labels.csv"
    table.write_text(table.read_text().replace("train,1", f"train,{CANARY}"))


def no_config(house: House) -> None:
    (house.folder / "site" / "local" / "suture.toml").write_text(f'[data]\nroot = "{CANARY}"\n')


def no_file(house: House) -> None:
    (house.folder / "site" / "local" / "suture.toml").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_image, "data_fault"),
        (no_table, "data_fault"),
        (no_label, "data_fault"),
        (no_config, "configuration"),
        (no_file, "configuration"),
    ],
)
def test_a_failure_before_training(
    spoil: Callable[[House], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, "images")
    spoil(house)
    reply = house.site.answer(TaskData("handshake"))
    silent(house, reply, caplog)
    abstained = unpack(from_shareable_(reply))
    assert isinstance(abstained, Abstain)
    assert abstained.reason == reason
    assert CANARY in house.errors()


def test_an_answer_that_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug that names a tensor after a patient."""
    house = House(tmp_path, "images")
    train = SurgicalAggregation.train

    def leak(*args: Any) -> Any:
        update, keep = train(*args)
        return Update(update.round, update.labels, {CANARY: torch.ones(1)}, {}, update.class_weights), keep

    monkeypatch.setattr(SurgicalAggregation, "train", leak)
    reply = house.train()
    assert reply.get_return_code() == "TASK_RESULT_FILTER_ERROR"
    silent(house, reply, caplog)


def test_an_image_that_cannot_be_read_among_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path, "images")
    table, config = house.folder / "data" / "labels.csv", house.folder / "site" / "local" / "suture.toml"
    config.write_text(config.read_text() + "max_faults = 0.2\n")
    (house.folder / "data" / "images" / f"{CANARY}-0.png").write_bytes(b"x")
    assert CANARY in table.read_text()
    reply = house.train()
    assert isinstance(unpack(from_shareable_(reply)), Update)
    silent(house, reply, caplog)
