"""Names of sites, experiments and classes: what is let in, and where each is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from suture.core.errors import ConfigError, LabelError, RejectedUpdate, SutureError
from suture.core.labels import canonical, check_experiment, check_label, check_sites
from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.execution.job import load_job
from suture.execution.run import run_job
from suture.federation.plan import Plan
from suture.flare.recipe import export_job
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import SiteInfo
from suture.protocol.packing import Packed, pack, unpack

BAD = [
    "",
    "x\n",
    "x" * 300,
    "../x",
    "a/b",
    "a\\b",
    ".hidden",
    "..",
    "a b",
    "a\x00b",
    "naïve",
    "$(x)",
    "a\u202eb",
]
BAD_LABELS = ["", "x\n", "x" * 201, "a\\b", "..", "a\x00b", "a\u202eb", "\u200b", "a\tb"]


def only(name: str) -> None:
    check_sites([name])


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [only, check_experiment])
def test_a_name_that_could_be_a_path_or_a_second_line_is_refused(
    check: Callable[[str], object], name: str
) -> None:
    with pytest.raises(ConfigError, match=r"site name|name of an experiment") as caught:
        check(name)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_no_site_is_called_like_all_sites_together() -> None:
    with pytest.raises(ConfigError, match="'all' is reserved"):
        check_sites(["a", "all"])


def test_plain_names_pass() -> None:
    check_sites(["site-1", "St_Mary.2", "x" * 64])
    assert check_experiment("surgical_nih-20250101-120000") == "surgical_nih-20250101-120000"
    assert check_label("Pleural Effusion") == "Pleural Effusion"
    assert check_label("肺炎") == "肺炎"


@pytest.mark.parametrize("name", BAD_LABELS)
def test_a_label_that_is_none_is_refused_where_it_is_made_and_where_it_crosses(name: str) -> None:
    with pytest.raises(LabelError, match="is not a label name") as caught:
        check_label(name)
    assert str(caught.value).isprintable()
    info = pack(SiteInfo(("Mass",), {"train": 3}, 1, "code"))
    with pytest.raises(RejectedUpdate, match="labels"):
        unpack(Packed({}, {**info.header, "labels": [name]}))
    with pytest.raises(RejectedUpdate, match="counts"):
        unpack(Packed({}, {**info.header, "counts": {name: None}}))


def test_a_slash_between_two_words_of_a_label_is_an_or() -> None:
    assert canonical("Obstetrics / Gynecology") == canonical("obstetrics or gynecology")
    assert "/" not in canonical("Mass/Nodule")


@pytest.mark.parametrize(
    "line", ['labels = ["Mass", "a\\u0007b"]', 'target = ""', '[data.synonyms]\n"x" = "\\u202e"'], ids=str
)
def test_labels_of_a_sites_file(line: str, tmp_path: Path) -> None:
    path = tmp_path / "suture.toml"
    path.write_text(f'[data]\ndataset = "hospital"\nroot = "i"\ntable = "t.csv"\n{line}\n')
    with pytest.raises(ConfigError, match="is not a label name") as caught:
        load_site_config(path)
    assert str(path) in str(caught.value)


def test_a_label_with_other_signs_needs_a_synonym(tmp_path: Path) -> None:
    path = tmp_path / "suture.toml"
    file = '[data]\ndataset = "hospital"\nroot = "i"\ntable = "t.csv"\nlabels = ["Hernia", "Mass?"]\n'
    path.write_text(file)
    with pytest.raises(ConfigError, match=r"labels: 'Mass\?' is not a label name: it has the character '\?'"):
        load_site_config(path)
    path.write_text(file + '[data.synonyms]\n"mass?" = "Mass"\n')
    assert load_site_config(path).data.labels == ("Hernia", "Mass?")


@pytest.mark.parametrize("name", BAD)
def test_an_experiment_of_a_plan_names_no_path(name: str) -> None:
    plan = Plan(SurgicalAggregation(), ModelSpec("cnn", size=32), Augmentation(), 1, "fine", "code")
    with pytest.raises(ConfigError, match="name of an experiment"):
        replace(plan, experiment=name)
    with pytest.raises(ConfigError, match="name of an experiment"):
        Plan.from_dict({**plan.to_dict(), "experiment": name})


def test_names_on_the_command_line(tmp_path: Path) -> None:
    job = load_job("demo")
    with pytest.raises(ConfigError, match="--out"):
        run_job(job, "local", tmp_path / "a b", resume=False, overwrite=False, workers=None)
    with pytest.raises(ConfigError, match="--experiment"):
        export_job(job, tmp_path, "../elsewhere", ("a",))
    with pytest.raises(ConfigError, match="site name"):
        export_job(job, tmp_path, "fine", ("a", "b\n"))
    assert not list(tmp_path.iterdir())


def test_a_server_asks_no_site_of_such_a_name(tiny: Callable[..., object]) -> None:
    server = tiny(SurgicalAggregation()).server()  # type: ignore[attr-defined]
    with pytest.raises(SutureError, match="site name"):
        server.handshake(["alpha", "../beta"])
    assert server.collector.lines == {}
