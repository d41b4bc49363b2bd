"""Methods of other packages: found by entry point, and part of the hash of code that the parties compare."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import suture
from suture.cli.app import list_
from suture.core.errors import ConfigError
from suture.methods import METHODS, _load, method_class, outside
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About
from suture.methods.source import _hash, code_hash, source_of
from suture.methods.surgical import SurgicalAggregation

MODULE = """
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, hyperparameters

@hyperparameters
class Near(LocalAveraging):
    about = About("near", "Near", "nobody, 2026")
    labels = LabelUse(view="own")
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution of one module, as pip leaves it, in a folder of the path."""
    _load.cache_clear()
    _hash.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(
        entry: str = "near = near_method:Near",
        text: str = MODULE,
        *,
        dist: str = "near",
        version: str = "1.0",
    ) -> Path:
        (tmp_path / "near_method.py").write_text(text)
        info = tmp_path / f"{dist}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[suture.methods]\n{entry}\n")
        importlib.invalidate_caches()
        return info

    yield make
    for module in ("near_method", "far_method"):
        sys.modules.pop(module, None)
    _load.cache_clear()
    _hash.cache_clear()


def test_a_method_of_another_package_is_found_by_name(install: Install) -> None:
    install()
    assert "near" in outside()
    kind = method_class("near")
    assert issubclass(kind, LocalAveraging)
    source = source_of(kind)
    assert source is not None
    assert (source.package, source.distribution, source.version) == ("near_method", "near", "1.0")
    assert source.class_path == "near_method.Near"
    with pytest.raises(ConfigError, match="unknown method 'neer'; did you mean 'near'"):
        method_class("neer")


def test_its_source_and_version_are_part_of_the_hash(install: Install) -> None:
    info = install()
    kind = method_class("near")
    before = code_hash(kind)
    assert before != code_hash(SurgicalAggregation) == code_hash()
    (info.parent / "near_method.py").write_text(f"{MODULE}\n# another line\n")
    _hash.cache_clear()
    changed = code_hash(kind)
    assert changed != before
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: near\nVersion: 1.1\n")
    assert code_hash(kind) not in (before, changed)


def test_a_second_package_beside_it_is_refused(install: Install) -> None:
    """It would not travel with the job, and its changes would not change the hash."""
    info = install()
    (info / "top_level.txt").write_text("near_helpers\nnear_method\n")
    with pytest.raises(ConfigError, match="near installs near_method and near_helpers; only near_method"):
        source_of(method_class("near"))


@pytest.mark.parametrize(
    ("entry", "text", "says"),
    [
        (
            "near = near_method:Near",
            "raise RuntimeError('no\\nway')",
            "near 1.0 (near_method:Near) cannot be",
        ),
        ("near = near_method:Near", "raise SystemExit", "cannot be imported: SystemExit"),
        ("surgical = near_method:Near", MODULE, "register a method 'surgical'"),
    ],
)
def test_one_broken_package_does_not_hide_the_others(
    install: Install,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    text: str,
    says: str,
) -> None:
    install("far = far_method:Near", dist="far").with_name("far_method.py").write_text(
        MODULE.replace('"near"', '"far"')
    )
    install(entry, text)
    monkeypatch.setenv("COLUMNS", "300")
    list_()
    printed = " ".join(capsys.readouterr().out.split())
    assert "method surgical Surgical Aggregation" in printed
    assert "method far Near (nobody, 2026)" in printed
    assert "not usable: " in printed
    assert says in printed
    with pytest.warns(UserWarning, match="left out: ") as warned:
        assert {"surgical", "far"} <= set(known := suture.known_methods())
    assert len(warned) == 1
    assert known["surgical"] is SurgicalAggregation
    assert "near" not in known
    assert method_class("far") is known["far"]


@pytest.mark.parametrize(
    ("entry", "text", "says"),
    [
        (
            "near = near_method:Near",
            "raise RuntimeError('no')",
            "near 1.0 .* cannot be imported: Runtime",
        ),
        ("near = near_method:Gone", MODULE, "near 1.0 .* cannot be imported: AttributeError"),
        ("near = near_method:hyperparameters", MODULE, "must be a subclass of suture.Method"),
        ("near = near_method:Near", MODULE.replace("@hyperparameters", ""), "@hyperparameters above"),
        ("near = near_method:Near", MODULE.replace("    labels", "    other"), "lacks labels"),
        ("far = near_method:Near", MODULE, "'near'; give the entry point"),
    ],
)
def test_a_broken_registration_names_its_package(install: Install, entry: str, text: str, says: str) -> None:
    install(entry, text)
    with pytest.raises(ConfigError, match=says):
        method_class(entry.partition(" ")[0])


def test_two_methods_of_one_name_are_refused(install: Install) -> None:
    install("surgical = near_method:Near")
    with pytest.raises(ConfigError, match=r"near 1\.0.* method 'surgical'"):
        outside()


def test_two_packages_of_one_method_are_refused(install: Install) -> None:
    install()
    install("near = other_method:Near", dist="other")
    with pytest.raises(ConfigError, match=r".*method 'near'"):
        outside()


def test_a_method_that_is_not_installed_has_no_source_and_still_a_hash() -> None:
    class Mine(SurgicalAggregation):
        about = About("mine", "Mine", "")

    with pytest.raises(ConfigError, match=r"in no installed package under the entry point 'suture\.methods'"):
        source_of(Mine)
    assert code_hash(Mine) != code_hash()
    assert all(source_of(kind) is None for kind in METHODS.values())


@pytest.mark.parametrize(
    "changed",
    ["suture/methods/fedavg.py", "suture/data/clinical_words.txt", "suture_papers/drift/fedprox.py"],
)
def test_a_change_of_source_or_of_the_vocabulary_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr("suture.methods.source._ROOT", tmp_path)
    for name in ("suture/plan.py", "suture/methods/fedavg.py", "suture/data/clinical_words.txt", changed):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    before = _hash.__wrapped__(None)
    (tmp_path / "suture/report.html").write_text("whatever is made of the data is no part of it")
    assert _hash.__wrapped__(None) == before
    (tmp_path / changed).write_text("another")
    assert _hash.__wrapped__(None) != before
