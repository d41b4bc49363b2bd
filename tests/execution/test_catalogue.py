"""What `suture list` shows is what there is, and what cannot be used does not hide the rest."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from reference import write_pages
from typer.testing import CliRunner

from suture.cli import app
from suture.cli.app import documented
from suture.core.errors import ConfigError
from suture.execution import catalogue
from suture.execution.catalogue import check_names, from_registries, read_stored, rows
from suture.methods import METHODS
from suture.methods.base import Question
from suture_papers.tables import loading


def test_the_stored_descriptions_are_those_of_the_registries() -> None:
    """In their order, too: the first model of a list is the one to begin with."""
    found, kept = from_registries(), read_stored()
    assert found == kept, "generate it again: python benchmarks/reference.py"
    assert [list(entries) for entries in found.values()] == [list(entries) for entries in kept.values()]


@pytest.mark.complete
def test_the_reference_renews_the_stored_descriptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "catalogue.json"
    old.write_text("{}")
    kept = catalogue.FILE.read_bytes()
    monkeypatch.setattr(catalogue, "FILE", old)
    assert old in write_pages(documented(), tmp_path / "docs")
    assert old.read_bytes() == kept


def test_every_kind_is_listed_with_a_description() -> None:
    found = list(rows())
    kinds = {"method", "model", "prior", "data set", "simulation", "job", "table"}
    assert {kind for kind, _, _ in found} == kinds
    assert all(name and text and "not usable" not in text for _, name, text in found)


def test_a_faulty_file_of_a_job_or_a_table_is_listed_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, table = tmp_path / "job.py", tmp_path / "table.toml"
    job.write_text('"""A job.\n')
    table.write_text("titel = 1")
    monkeypatch.setattr(catalogue, "known_jobs", lambda: {"broken": job})
    monkeypatch.setattr(loading, "known_tables", lambda: {"wrong": table})
    found = {name: text for _, name, text in rows()}
    assert found["broken"].startswith(f"not usable: {job} cannot be read: unterminated")
    assert found["wrong"].startswith(f"not usable: {table}")
    assert "surgical" in found


def test_a_slip_is_named_before_the_job_is_run(tmp_path: Path) -> None:
    """But a name that only the job's own code registers is no slip."""
    job = tmp_path / "job.py"
    job.write_text("raise SystemExit")
    check_names(str(job), ["rounds=1", "method=fedavg"])
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        check_names(str(job), ["method=fedavgg"])
    for text in ("import suture\nsuture.register(Mine)", "from suture import register", "import mine"):
        job.write_text(text)
        check_names(str(job), ["method=mine"])
    with pytest.raises(ConfigError, match="unknown job or study folder 'dmo'; did you mean 'demo'"):
        check_names("dmo", [])


def test_methods_are_listed_by_what_they_answer() -> None:
    found = CliRunner().invoke(app, ["list", "methods"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    heads = [line.strip() for line in found.output.splitlines() if line.strip() in get_args(Question)]
    assert set(heads) == {kind.about.question for kind in METHODS.values()}
    assert heads[-1] == "references"
    for name in METHODS:
        assert any(line.split()[:1] == [name] for line in found.output.splitlines()), name


@pytest.mark.complete
def test_a_kind_is_listed_alone_and_a_slip_is_named() -> None:
    found = CliRunner().invoke(app, ["list", "models"])
    assert "densenet121" in found.output
    assert "surgical" not in found.output
    assert CliRunner().invoke(app, ["list", "datasets"]).output.count("data set") > 1
    slip = CliRunner().invoke(app, ["list", "method"])
    assert "did you mean 'methods'" in str(slip.exception)


def test_the_cost_of_every_federated_method_was_measured() -> None:
    entries = read_stored()["method"]
    unmeasured = {name for name, entry in entries.items() if entry["cost"] is None}
    assert unmeasured == {name for name in entries if METHODS[name].about.local_only}
