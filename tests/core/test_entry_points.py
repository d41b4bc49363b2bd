"""What is installed: one version, extras by name, and entry points of other packages that fit their group."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import suture
from suture.cli.common import command_of
from suture.core.entry_points import find_foreign
from suture.core.errors import ConfigError
from suture.execution.catalogue import rows
from suture.execution.job import load_job
from suture.methods import method_class
from suture.models.encoders import efficientnet_lite0
from suture.models.priors import PriorSpec, load_prior
from suture_results.example_images import example_images
from suture_results.model_export.pictures import explain_files
from world import refused, site_config


def test_the_package_and_its_distribution_agree() -> None:
    assert suture.__version__ == version("suture")


NOWHERE = Path("nowhere")

USES: list[tuple[str, str, Callable[[], object]]] = [
    ("plots", "matplotlib", lambda: explain_files(NOWHERE, [NOWHERE], NOWHERE)),
    ("plots", "matplotlib", lambda: example_images(NOWHERE)),
    ("lite", "efficientnet_lite_pytorch", lambda: efficientnet_lite0(32, None)),
]


@pytest.mark.parametrize(("extra", "package", "use"), USES)
def test_a_missing_package_is_one_error_that_names_the_extra(
    extra: str, package: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with refused(f"suture[{extra}]"):
        use()


GROUPS = ("methods", "datasets", "priors", "simulations", "commands", "catalogue")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point `theirs` in each group, which names a number."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    points = "".join(f"[suture.{group}]\ntheirs = other_things:NUMBER\n" for group in GROUPS)
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "other_things.py").write_text("NUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_things", raising=False)


def _data(folder: Path, name: str = "theirs") -> object:
    return site_config(folder, data={"dataset": name, "root": ".", "table": "t.csv"})


def _sites(folder: Path, kind: str = "theirs", method: str = "surgical") -> object:
    job = f'rounds = 1\n[method]\nname = "{method}"\n[model]\n[simulation]\nkind = "{kind}"\n'
    (folder / "job.toml").write_text(job)
    return load_job(folder)


def _command(_folder: Path) -> object:
    (point,) = entry_points(group="suture.commands", name="theirs")
    return command_of(point)([], standalone_mode=False)


def test_an_entry_point_of_another_kind_is_refused(tmp_path: Path) -> None:
    for use, needed in (
        (lambda _: method_class("theirs"), "suture.Method"),
        (_data, "suture.data.readers.DataSet"),
        (lambda _: load_prior(PriorSpec("theirs")), "suture.models.priors.Entry"),
        (_sites, "`prepare`"),
        (_command, "function"),
    ):
        with refused("'theirs'", "other 1.0", "other_things:NUMBER", needed, by=ConfigError):
            use(tmp_path)


@pytest.mark.parametrize(
    "word", ["other_things", "other_things:NUMBER", "other_things.NUMBER", "{}/other_things.py"]
)
def test_no_word_of_a_job_or_suture_toml_imports_a_module(word: str, tmp_path: Path) -> None:
    name = word.format(tmp_path)
    uses: list[Callable[[], object]] = [
        lambda: _sites(tmp_path, "PhantomSites", name),
        lambda: _sites(tmp_path, name),
        lambda: _data(tmp_path, name),
        lambda: PriorSpec(name),
    ]
    for use in uses:
        with refused(name, by=ConfigError):
            use()
    assert "other_things" not in sys.modules


def test_a_catalogue_of_another_kind_is_a_line_of_the_list() -> None:
    (reason,) = (text for kind, name, text in rows() if (kind, name) == ("theirs", "other 1.0"))
    assert "the catalogue 'theirs' of other 1.0 (other_things:NUMBER) must be a function" in reason


def test_a_package_is_known_once_it_is_installed_and_no_longer_once_it_is_removed(tmp_path: Path) -> None:
    """As in a notebook: the process that has looked before goes on."""
    assert "later" not in find_foreign("suture.methods")
    info = tmp_path / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[suture.methods]\nlater = other_things:NUMBER\n")
    assert "later" in find_foreign("suture.methods")
    shutil.rmtree(info)
    assert "later" not in find_foreign("suture.methods")


def test_a_folder_that_is_not_there_or_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.syspath_prepend(tmp_path / "nowhere")
    monkeypatch.syspath_prepend(tmp_path / "file" / "below")
    assert "theirs" in find_foreign("suture.methods")
