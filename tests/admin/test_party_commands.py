"""Commands of a party: `suture clean` deletes what is no longer needed; pages of what leaves a site."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints
from uuid import uuid4

import psutil
import pytest
from rich.console import Console
from startup_kits import MakeKit

from small_hospitals import write_hospital
from suture.core.errors import ConfigError
from suture.core.files import hold
from suture.execution.sites import shared_features
from suture.federation.loop import Loop, federate
from suture.federation.state_files import EXPERIMENTS
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.decisions import CELLS
from suture.protocol.messages import KEYS, Reason, Reply, Spent
from suture_admin import cleaning
from suture_admin.doctor import examine
from suture_admin.egress_page import _MEANT, page
from suture_admin.ledger import Statement, _BudgetLine, ledger_tables
from world import refused, suture

DAY = 24 * 3600


def written(folder: Path, *names: str, days: float = 40) -> list[Path]:
    """Files of 1 kB, each a second younger than the one before."""
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (when := time.time() - days * DAY + i, when))
    return [folder / name for name in names]


def aged(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when := time.time() - 40 * DAY, when))


ROUNDS = ("round-000002.safetensors", "best-000001.safetensors", "encoder.safetensors")
TESTED = "answers/test/round-000002.safetensors"
STAY = ("errors.jsonl", "owner.json", "counts.json", "masked.jsonl", "model/model.safetensors", "notes.txt")


def test_a_site_loses_states_of_finished_experiments_and_folders_of_ended_jobs_alone(
    make_kit: MakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_kit("site")
    write_hospital(site / "local", ("Mass",), 5, 1)
    own = site / "local" / "state"
    gone = written(own / EXPERIMENTS / "done", *ROUNDS, "answers/train/round-000002.safetensors", TESTED)
    stay = written(own / EXPERIMENTS / "done", *STAY) + written(own, "ledger.jsonl", "mask.key")
    stay += written(own / EXPERIMENTS / "unfinished", *ROUNDS)
    stay += written(own / EXPERIMENTS / "continued", TESTED, *ROUNDS)
    stay += written(own / EXPERIMENTS / "recent", *ROUNDS, TESTED, days=3)
    stay += written(own / EXPERIMENTS / "in use", *ROUNDS, TESTED)
    ended, running, foreign = (str(uuid4()) for _ in range(3))
    gone += written(site / ended, "app_harbor/config/plan.json", "log.txt")
    stay += written(site / running, "app_harbor/config/plan.json")
    stay += written(site / foreign, "app_harbor/config/config_fed_client.json")
    stay += written(site / "a-b-c-d-e", "app_harbor/config/plan.json")
    for job in (ended, running, foreign):
        aged(site / job)
    process = type("Process", (), {"info": {"cmdline": ["python", "-n", running]}})
    monkeypatch.setattr(psutil, "process_iter", lambda _: [process])
    found = examine(site)
    assert any(one.about == "states" and "5 experiments" in one.text for one in found)
    with hold(own / EXPERIMENTS / "in use" / ".site.lock", 0):
        listed = suture("clean", site)
        assert all(path.exists() for path in (*gone, *stay)), "a list deletes nothing"
        assert "experiment done" in listed
        assert ended in listed
        assert not any(name in listed for name in ("unfinished", "continued", "recent", running, foreign))
        assert "in use: states of experiment in use" in suture("clean", site, "--yes")
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stay)


def test_a_server_loses_states_of_finished_experiments_alone(make_kit: MakeKit) -> None:
    folder = make_kit("server")
    gone, stay = list[Path](), list[Path]()
    states = ("state/round-000001.safetensors", "state/updates/000001/a.safetensors")
    for status in ("finished", "failed", "running"):
        run = folder / "suture" / EXPERIMENTS / status
        (gone if status == "finished" else stay).extend(written(run, *states))
        stay += written(run, "state/ledgers.json", "model/model.safetensors", "history.jsonl")
        (run / "run.json").write_text(json.dumps({"status": status}))
    suture("clean", folder, "--yes")
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stay)


def test_features_that_were_not_used_are_deleted(make_kit: MakeKit) -> None:
    old, other = written(shared_features(), "a.features", "mine.txt")
    (recent,) = written(shared_features(), "b.features", days=29)
    assert "a.features" in suture("clean")
    assert old.exists()
    suture("clean", "--yes")
    assert (old.exists(), other.exists(), recent.exists()) == (False, True, True)
    with refused("site or server", by=ConfigError):
        cleaning.leftovers(make_kit("admin"), 30)


@pytest.mark.complete
def test_a_real_experiment_is_known_to_have_finished_and_cannot_be_continued_without_states(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(SurgicalAggregation(), rounds=1)
    federation.run()
    run = federation.folder / "run"
    folders = [run, *(run / "sites" / site for site in federation.configs)]
    monkeypatch.setattr(cleaning, "experiments", lambda _: folders)
    assert len(list(cleaning._experiments(run))) == len(folders)
    longer = replace(federation, schedule=replace(federation.schedule, rounds=2))
    server, sites = longer.server(), longer.sites()
    with monkeypatch.context() as patch:
        patch.setattr(type(server), "assign_validation", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            federate(server, Loop(sites))
    del server, sites
    assert list(cleaning._experiments(run)) == [], "it goes on"
    longer.run()
    of_server, *of_sites = cleaning._experiments(run)
    assert len(of_sites) == len(folders) - 1
    assert cleaning.remove(of_server)
    with refused("run", by=ConfigError):
        replace(federation, schedule=replace(federation.schedule, rounds=3)).run()
    assert (run / "history.jsonl").read_text()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "egress.md"


@pytest.mark.complete
def test_the_committed_page_is_what_the_code_renders(tmp_path: Path) -> None:
    committed = PAGE.read_text()
    assert committed == suture("egress"), "write it anew: suture egress -o docs/reference/egress.md"
    suture("egress", "-o", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == committed
    assert [word for word in (*get_args(Reason), *KEYS, str(CELLS)) if word not in committed] == []


def answers(kind: Any = Reply) -> Iterator[type[Any]]:
    """Every class that an answer of a site consists of."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        parts: Any = get_type_hints(kind).values()
    else:
        parts = get_args(kind)
    for part in parts:
        yield from answers(part)


def test_every_field_of_an_answer_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that its docstring does not name would leave a site unnoticed."""
    whole = page()
    for kind in set(answers()):
        (section,) = [part for part in whole.split("\n## ") if part.startswith(f"{_MEANT[kind]}\n")]
        named = {line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[4:]}
        assert named == {field.name for field in dataclasses.fields(kind)}

    @dataclasses.dataclass(frozen=True)
    class Age:
        """Of whom.

        Attributes:
            mean: of the patients.
        """

        mean: float
        oldest: float

    monkeypatch.setitem(_MEANT, Age, "Age")
    with pytest.raises(KeyError, match="oldest"):
        page()


LONG = "surgical_nih-20261126-081530-a1b2c3d4"


def test_the_ledgers_tables_fit_80_columns_with_every_number_whole() -> None:
    figures = {"Pleural_Thickening": 123456}
    of = {"experiment": LONG, "clip": 0.125, "noise": 0.0, "delta": 1e-5, "answers": 1234, "updates": 1200}
    rest = {"epsilon": 3.97, "steps": "1200 steps, σ 1.51, q 0.13", "figures": figures, "numbers": 7654321}
    line = _BudgetLine(**of, **rest, last="2026-11-26T08:15:30", jobs={})
    one = {"Pleural_Thickening": 9000}
    spent = Spent(3.97, 1200, 0, 1, 123456, 7654321)
    found = Statement([line], spent, 1e-5, figures, {LONG: 766}, {LONG: 3}, one, 1, 50, 10.0, [], [], None)
    console = Console(width=80, record=True)
    for table in ledger_tables(found):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for number in ("1234", "766", "3", "123456", "7654321", "2026-11-26", "0.125", "1200", "3.97", "9000"):
        assert number in words, number
    assert LONG in "".join(w for w in words if w in LONG and not w.isdigit())  # folded, not cut off
