"""Whose an experiment is, and who may continue it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from suture.core.errors import ConfigError
from suture.federation.ownership import OWNER, NotOwner, Submitter, claim, may_use
from world import refused

LEAD = Submitter("lead@a.org", "a")


OTHER = Submitter("lead@b.org", "b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trial"


def test_the_first_submitter_owns_an_experiment_and_others_are_refused(folder: Path) -> None:
    claim(folder, LEAD, ())
    claim(folder, LEAD, ())
    for other in (OTHER, Submitter(LEAD.name, "b"), Submitter(OTHER.name, "a"), None):
        with refused("'trial'", by=NotOwner):
            claim(folder, other, (OTHER.name,))
    owner = {"name": "lead@a.org", "org": "a", "study": "default", "shared_with": []}
    assert json.loads((folder / OWNER).read_text()) == owner


def test_a_study_of_flare_is_a_part_of_the_owner(folder: Path) -> None:
    """Who may act in one study is not thereby given a model of another, the same user neither."""
    lung = replace(LEAD, study="lung")
    claim(folder, lung, (OTHER.name,))
    claim(folder, lung, None)
    claim(folder, replace(OTHER, study="lung"), None)
    for other in (LEAD, OTHER, replace(LEAD, study="heart"), replace(OTHER, study="heart")):
        with refused("--study", by=NotOwner):
            claim(folder, other, None)
    assert may_use(folder, LEAD.name, "lung")
    assert not may_use(folder, LEAD.name)
    assert not may_use(folder, OTHER.name, "heart")


def test_the_owner_shares_by_name_and_takes_it_back(folder: Path) -> None:
    assert may_use(folder, OTHER.name)
    claim(folder, LEAD, (OTHER.name,))
    assert may_use(folder, OTHER.name)
    claim(folder, OTHER, ("third@c.org",))
    with refused(by=NotOwner):
        claim(folder, Submitter("third@c.org", "c"), None)  # only the owner's list counts
    claim(folder, LEAD, None)  # a copy of a job says nothing about sharing
    claim(folder, OTHER, None)
    claim(folder, LEAD, ())
    with refused(by=NotOwner):
        claim(folder, OTHER, None)
    assert [may_use(folder, name) for name in (LEAD.name, OTHER.name)] == [True, False]


def test_states_without_an_owner_are_nobodys(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    claim(folder, None, None)  # a loop or a simulation has no users
    assert not (folder / OWNER).exists()
    with refused(by=NotOwner):
        claim(folder, LEAD, ())


def test_a_refusal_tells_nothing_of_the_owner_or_the_progress(tmp_path: Path) -> None:
    said = set()
    for case in ("owned", "shared", "no owner"):
        folder = tmp_path / case / "trial"
        if case == "no owner":
            (folder / "state").mkdir(parents=True)
        else:
            claim(folder, LEAD, ("x@a.org",) if case == "shared" else ())
        with pytest.raises(NotOwner) as refusal:
            claim(folder, OTHER, ())
        said.add(str(refusal.value))
    (text,) = said
    assert LEAD.name not in text
    assert "x@a.org" not in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "a", "org": "b", "shared_with": 3}'])
def test_a_broken_file_is_an_error_and_no_way_in(content: str, folder: Path) -> None:
    folder.mkdir()
    (folder / OWNER).write_text(content)
    with refused("owner.json", by=ConfigError):
        claim(folder, OTHER, ())
    assert (folder / OWNER).read_text() == content


def test_of_two_first_jobs_one_is_the_owner(folder: Path) -> None:
    refused: list[str] = []
    start = threading.Barrier(8)

    def job(number: int) -> None:
        start.wait()
        try:
            claim(folder, Submitter(f"user-{number}", "a"), ())
        except NotOwner:
            refused.append(f"user-{number}")

    jobs = [threading.Thread(target=job, args=(i,)) for i in range(8)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    owner = json.loads((folder / OWNER).read_text())["name"]
    assert sorted([*refused, owner]) == [f"user-{i}" for i in range(8)]
    assert [path.name for path in folder.iterdir()] == [OWNER]
