"""Entry points of other packages: what does not fit its group is refused in one sentence."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from suture.cli.common import command_of
from suture.core.entry_points import find_foreign
from suture.core.errors import ConfigError
from suture.data.config import load_site_config
from suture.execution.catalogue import rows
from suture.execution.job import load_job
from suture.methods import method_class
from suture.models.priors import PriorSpec, load_prior

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


def _data(folder: Path) -> object:
    (folder / "suture.toml").write_text('[data]\ndataset = "theirs"\nroot = "."\ntable = "t.csv"\n')
    return load_site_config(folder / "suture.toml")


def _sites(folder: Path) -> object:
    (folder / "job.toml").write_text(
        'rounds = 1\n[method]\nname = "surgical"\n[model]\n[simulation]\nkind = "theirs"\n'
    )
    return load_job(folder)


def _command(_folder: Path) -> object:
    (point,) = entry_points(group="suture.commands", name="theirs")
    return command_of(point)([], standalone_mode=False)


@pytest.mark.parametrize(
    ("use", "what", "needed"),
    [
        (lambda _: method_class("theirs"), "method", "a subclass of suture.Method"),
        (_data, "data set", "a suture.data.readers.DataSet"),
        (lambda _: load_prior(PriorSpec("theirs")), "prior", "a suture.models.priors.Entry"),
        (_sites, "kind of simulated sites", "a dataclass with a method `prepare`"),
        (_command, "command", "a function"),
    ],
)
def test_an_entry_point_of_another_kind_is_refused(
    use: Callable[[Path], object], what: str, needed: str, tmp_path: Path
) -> None:
    said = rf"the {what} 'theirs' of other 1\.0 \(other_things:NUMBER\) must be {needed}, not 3"
    with pytest.raises(ConfigError, match=said) as caught:
        use(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "word", ["other_things", "other_things:NUMBER", "other_things.NUMBER", "{}/other_things.py"]
)
def test_no_word_of_a_job_or_suture_toml_imports_a_module(word: str, tmp_path: Path) -> None:
    name = word.format(tmp_path)
    job = 'rounds = 1\n[method]\nname = "{}"\n[model]\n[simulation]\nkind = "{}"\n'
    for text in (job.format(name, "PhantomSites"), job.format("surgical", name)):
        (tmp_path / "job.toml").write_text(text)
        with pytest.raises(ConfigError, match="unknown"):
            load_job(tmp_path)
    (tmp_path / "suture.toml").write_text(f'[data]\ndataset = "{name}"\nroot = "."\ntable = "t.csv"\n')
    with pytest.raises(ConfigError, match="unknown"):
        load_site_config(tmp_path / "suture.toml")
    with pytest.raises(ConfigError, match="unknown prior"):
        PriorSpec(name)
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
