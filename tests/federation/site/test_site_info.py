"""What a site says of itself once, and the lock of the folder that remembers it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parties import METHOD, abstains

from rounds import reply_of
from suture.core.labels import LabelSet
from suture.federation.site import site as module
from suture.federation.site.releases import FIRST_COUNTS, FirstCounts
from suture.federation.site.site import SITE_LOCK, FolderLock, Site
from suture.learning.evaluation import NOTHING
from suture.methods.fedavg import FedAvg
from suture.models import build
from suture.models.classifier import split_state
from suture.protocol.decisions import Decided, DecidedClass, DecidedGroup
from suture.protocol.messages import ClassScore, Evaluation, Metrics, SiteInfo, TaskData
from world import refused


def asked(site: Site) -> SiteInfo:
    info = reply_of(site, TaskData("handshake"))
    assert isinstance(info, SiteInfo)
    return info


def retold(federation: Any, split: str, labels: str) -> None:
    """Give every image of a split other labels in alpha's table."""
    table: Path = federation.configs["alpha"].data.table
    lines = table.read_text().splitlines()
    changed = [line.rsplit(",", 2)[0] + labels if split in line else line for line in lines[1:]]
    assert changed != lines[1:]
    table.write_text("\n".join([lines[0], *changed]) + "\n")


def test_a_site_introduces_itself_with_its_own_labels_only(tiny: Any) -> None:
    site = tiny(METHOD).sites()["alpha"]
    info = asked(site)
    assert (info.labels, info.n) == (("Mass", "Nodule"), {"train": 15, "validation": 5, "test": 5})
    assert info.counts == {}, "the method asks for none"
    assert not (site.folder / FIRST_COUNTS).exists()


def test_a_second_handshake_reveals_nothing_new_of_data_that_changed(tiny: Any) -> None:
    """More patients with a Mass: the numbers of the first answer stand, in this process or another."""
    federation = tiny(FedAvg(local=METHOD.local))
    first = asked(federation.sites()["alpha"])
    retold(federation, "train", ",1,1")
    assert asked(federation.sites()["alpha"]) == first
    assert asked(federation.sites("another_experiment")["alpha"]).counts != first.counts


def test_counts_stand_as_they_were_first_sent(tmp_path: Path) -> None:
    """One that was withheld too: else the round in which a class reaches the limit would say how often it
    occurs. Two that answer for one folder know of one another.
    """
    one, other, mass = FirstCounts(tmp_path), FirstCounts(tmp_path), LabelSet(("Mass",))
    assert other.of(LabelSet(("Edema",)), {"Edema": None}) == {"Edema": None}
    assert one.of(mass, {"Mass": (5, 5)}) == {"Mass": (5, 5)}
    both = other.of(LabelSet(("Edema", "Mass")), {"Edema": (5, 9), "Mass": (6, 5)})
    assert both == {"Edema": None, "Mass": (5, 5)}
    assert json.loads((tmp_path / FIRST_COUNTS).read_text())["counts"] == {"Edema": None, "Mass": [5, 5]}


def test_counts_of_a_split_stand_as_they_were_first_sent(tiny: Any) -> None:
    """More validation patients with a Mass, between two rounds: the second answer has the first counts."""
    federation = tiny(METHOD)
    labels = ("Mass", "Nodule")
    model = build(federation.plan.model, LabelSet(labels), 1, pretrained=False)
    shared, head = split_state(model.state_dict())
    task = TaskData("evaluate", labels=labels, shared=shared, head=head)

    def measured(out: str, round_: int) -> Metrics:
        answer = reply_of(federation.sites(out)["alpha"], replace(task, round=round_))
        assert isinstance(answer, Evaluation)
        return answer.metrics

    first = measured("run", 0)
    retold(federation, "validation", ",1,0")
    again = measured("run", 1)
    assert again.loss != first.loss
    counts = [{n: (s.positives, s.negatives) for n, s in one.classes.items()} for one in (first, again)]
    assert counts[0] == counts[1]
    assert measured("another_experiment", 0).classes["Mass"].positives == 5


def test_a_class_withheld_in_one_round_stays_withheld(tmp_path: Path) -> None:
    few = Metrics(1, "validation", 30, None, {"Mass": NOTHING})
    enough = Metrics(2, "validation", 31, None, {"Mass": ClassScore(0.8, None, None, 5, 26)})
    assert FirstCounts(tmp_path).within(few) == few
    assert FirstCounts(tmp_path).within(enough).classes == {"Mass": NOTHING}
    other_split = replace(enough, split="test")
    assert FirstCounts(tmp_path).within(other_split) == other_split


@pytest.mark.parametrize(
    "content",
    [
        *(b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"counts": [1]}', b'{"counts": {"Mass": "17"}}'),
        *(b'{"counts": {"Mass": [1, 1e999]}}', b'{"counts": {"Mass": [1, -2]}}'),
    ],
)
def test_damaged_counts_are_named_and_not_replaced(content: bytes, tmp_path: Path) -> None:
    """New ones would reveal what changed since."""
    (tmp_path / FIRST_COUNTS).write_bytes(content)
    with refused(FIRST_COUNTS):
        FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": (7, 8)})
    assert (tmp_path / FIRST_COUNTS).read_bytes() == content


def test_what_was_first_said_of_a_group_stands(tmp_path: Path) -> None:
    """Two answers that differ by a patient would show in which group, and with what, that patient is."""
    point = Decided(0.5, 0.5)
    one = DecidedClass(None, None, point, (None, None), (None, None))

    def sent(folder: Path, **groups: DecidedGroup) -> dict[str, DecidedGroup]:
        metrics = Metrics(1, "test", 60, None, {}, decided={"Mass": replace(one, groups=groups)})
        return FirstCounts(folder).within(metrics).decided["Mass"].groups

    first = sent(tmp_path / "a", F=DecidedGroup(10, 20, 0.5, 0.5))
    assert first == {"F": DecidedGroup(10, 20, 0.5, 0.5)}
    both = sent(tmp_path / "a", F=DecidedGroup(11, 20, 0.6, 0.5), M=DecidedGroup(9, 9, 1.0, 1.0))
    assert both == {"F": DecidedGroup(10, 20, 0.6, 0.5)}
    assert sent(tmp_path / "a", M=DecidedGroup(9, 9, 1.0, 1.0)) == {}
    assert sent(tmp_path / "b") == {}
    assert sent(tmp_path / "b", M=DecidedGroup(9, 9, 1.0, 1.0)) == {}


# The lock


def other_process(path: Path) -> int:
    """A process that holds the lock until it is killed; returns its number."""
    ready, held = os.pipe()
    child = os.fork()
    if not child:
        lock = FolderLock.take(path, 0)
        os.write(held, b"x")
        time.sleep(60)
        del lock
        os._exit(0)
    os.read(ready, 1)
    return child


@pytest.mark.complete
def test_another_process_is_named_and_when_it_has_ended_the_site_answers(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SITE_TAKEOVER", 0.2)
    site = tiny(METHOD).sites()["alpha"]
    site.folder.mkdir(parents=True)
    other = other_process(site.folder / SITE_LOCK)
    assert abstains(site, TaskData("handshake"), "configuration", f"process {other}").error == "InUse"
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    asked(site)


@pytest.mark.complete
def test_a_new_job_waits_for_the_process_of_the_last_one(tiny: Any) -> None:
    site = tiny(METHOD).sites()["alpha"]
    site.folder.mkdir(parents=True)
    other = other_process(site.folder / SITE_LOCK)
    killer = os.fork()
    if not killer:
        time.sleep(0.5)
        os.kill(other, signal.SIGKILL)
        os._exit(0)
    asked(site)
    for child in (killer, other):
        os.waitpid(child, 0)


@pytest.mark.complete
def test_the_sites_of_one_process_share_it_and_leave_it_when_they_are_closed(tiny: Any) -> None:
    first, second = (tiny(METHOD).sites()["alpha"] for _ in range(2))
    for site in (first, second):
        asked(site)
    first.close()
    assert _taken_elsewhere(second.folder)
    second.close()
    assert not _taken_elsewhere(second.folder)


def _taken_elsewhere(folder: Path) -> bool:
    """Whether another process finds the folder in use."""
    child = os.fork()
    if not child:
        try:
            FolderLock.take(folder / SITE_LOCK, 0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return bool(os.waitpid(child, 0)[1])


@pytest.mark.complete
def test_what_a_killed_process_left_is_swept_and_a_live_ones_is_not(tiny: Any) -> None:
    site = tiny(METHOD).sites()["alpha"]
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    dead, live = (
        site.folder / f".round-000001.safetensors.{pid}.0123abcd.tmp" for pid in (ended, os.getpid())
    )
    for path in (dead, live):
        path.mkdir(parents=True)
        (path / ".tmpAbCdEf").touch()  # the name that safetensors chooses
    own = site.folder / ".hidden.tmp"
    own.touch()
    site.answer(TaskData("handshake"))
    assert [path.exists() for path in (dead, live, own)] == [False, True, True]
