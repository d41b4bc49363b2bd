"""The contract of a method, and methods of other packages: by entry point, and part of the hash of code."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import suture
import suture.learning
import suture.methods
import suture.testing
from federated import at_site, random_batch
from packages import installed
from suture.cli.common import console
from suture.core.errors import ConfigError
from suture.data.batch import Batch
from suture.methods import METHODS, _load, method_class, outside
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, Share, SharingSpec, hyperparameters
from suture.methods.class_weights import WeightedAveraging
from suture.methods.composed import Composed
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.source import _hash, code_hash, source_of
from suture.methods.surgical import SurgicalAggregation
from suture.models.classifier import Layout
from world import refused
from world import suture as command


def test_what_travels_and_what_labels_mean_follow_the_settings() -> None:
    with refused("Old.labels", by=ConfigError):
        type("Old", (Composed,), {"__module__": __name__, "labels": LabelUse(view="own")})
    own = FedAvg(label_view="own", unknown="masked")
    assert (own.labels.view, own.labels.unknown) == ("own", "masked")
    assert Halves().sharing == SharingSpec()
    settings: dict[str, Any] = {"share": Share(0.25), "keep_local": True, "batch_norm": "frozen"}
    assert replace(Halves(), **settings).sharing == SharingSpec(**settings)
    assert Halves(share=Share()).sharing.part_at_site
    assert PersonalisedFL(batch_norm="local").sharing == SharingSpec("local", "head")


@hyperparameters
class Halves(LocalAveraging):
    """A method with the settings of what travels."""

    about = About("halves", "Halves", "none")
    labels = LabelUse()
    share: Share | None = None
    keep_local: bool = False


ALONE = {"individual", "partial", "pfl", "surgical", "vanilla"}


def test_every_method_says_why_a_site_cannot_protect_each_patient_or_trains_on_each_image_alone() -> None:
    assert {name for name, kind in METHODS.items() if not kind.about.mixes_patients} == ALONE
    silent = About("own", "Own", "nobody").mixes_patients  # a method that says nothing is refused
    assert silent
    assert silent not in {kind.about.mixes_patients for kind in METHODS.values()}


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
@pytest.mark.parametrize("name", sorted(ALONE))
def test_the_gradient_of_two_images_is_the_mean_of_theirs(name: str, label_type: Any) -> None:
    method: Any = METHODS[name](batch_norm="frozen")
    if label_type not in method.labels.types:
        pytest.skip("the method has no such labels")
    # Without class weights its whole use of the data is `fit`.
    assert type(method).train in (LocalAveraging.train, WeightedAveraging.train)
    egress = method.egress(Layout({}, {}))
    assert not (egress.counts)
    assert not (egress.scalars)
    assert not (egress.losses)
    assert not (egress.channels)
    assert egress.weight == (1.0, 1.0)
    site, _ = at_site(method, label_type)
    site.model.eval()
    objective = method.objective_at(site)
    classes = len(site.model.labels)
    both = random_batch(2, classes, label_type)
    if label_type == "multiclass":  # a row without a label is no example
        both = replace(both, y=torch.eye(2, classes, dtype=torch.float64))

    def gradient(rows: slice) -> Tensor:
        image = {"image": both.inputs["image"][rows]}
        found = torch.autograd.grad(
            objective(site.model, Batch(image, both.y[rows], both.known[rows])),
            [p for p in site.model.parameters() if p.requires_grad],
            allow_unused=True,
        )
        return torch.cat([g.flatten() for g in found if g is not None])

    one, other = gradient(slice(0, 1)), gradient(slice(1, 2))
    assert torch.allclose(gradient(slice(0, 2)), (one + other) / 2, atol=1e-12)
    assert not torch.allclose(one, other)


# Of other packages


MODULE = """
from suture.methods.averaging import LocalAveraging
from suture.methods.class_weights import WeightedAveraging
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


def test_a_method_of_another_package_is_found_by_name_and_its_source_and_version_are_hashed(
    install: Install,
) -> None:
    info = install()
    assert "near" in outside()
    kind = method_class("near")
    assert issubclass(kind, LocalAveraging)
    source = source_of(kind)
    assert source is not None
    assert (source.package, source.distribution, source.version) == ("near_method", "near", "1.0")
    assert source.class_path == "near_method.Near"
    with refused("'neer'", "'near'", by=ConfigError):
        method_class("neer")
    before = code_hash(kind)
    assert before != code_hash(SurgicalAggregation) == code_hash()
    (info.parent / "near_method.py").write_text(f"{MODULE}\n# another line\n")
    _hash.cache_clear()
    changed = code_hash(kind)
    assert changed != before
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: near\nVersion: 1.1\n")
    assert code_hash(kind) not in (before, changed)
    # A second package beside it would not travel with the job, and its changes would not change the hash.
    (info / "top_level.txt").write_text("near_helpers\nnear_method\n")
    with refused("near_helpers", "near_method", by=ConfigError):
        source_of(kind)


@pytest.mark.parametrize(
    ("entry", "text", "named"),
    [
        ("near = near_method:Near", "raise RuntimeError('no\\nway')", "near 1.0 (near_method:Near)"),
        ("near = near_method:Near", "raise SystemExit", "SystemExit"),
        ("surgical = near_method:Near", MODULE, "'surgical'"),
    ],
)
def test_one_broken_package_does_not_hide_the_others(
    install: Install, monkeypatch: pytest.MonkeyPatch, entry: str, text: str, named: str
) -> None:
    far = install("far = far_method:Near", dist="far")
    far.with_name("far_method.py").write_text(MODULE.replace('"near"', '"far"'))
    install(entry, text)
    monkeypatch.setattr(console, "width", 300)
    printed = command("list", "methods")
    for one in ("Surgical Aggregation", "Near (nobody, 2026)", named):
        assert one in " ".join(printed.split())
    with pytest.warns(UserWarning, match="left out: ") as warned:
        known = suture.known_methods()
    assert len(warned) == 1
    assert known["surgical"] is SurgicalAggregation
    assert "near" not in known
    assert method_class("far") is known["far"]


@pytest.mark.parametrize(
    ("entry", "text", "named"),
    [
        ("near = near_method:Near", "raise RuntimeError('no')", "near 1.0"),
        ("near = near_method:Gone", MODULE, "near 1.0"),
        ("near = near_method:hyperparameters", MODULE, "suture.Method"),
        ("near = near_method:Near", MODULE.replace("@hyperparameters", ""), "@hyperparameters"),
        ("near = near_method:Near", MODULE.replace("    labels", "    other"), "labels"),
        ("far = near_method:Near", MODULE, "'near'"),
    ],
)
def test_a_broken_registration_names_its_package(install: Install, entry: str, text: str, named: str) -> None:
    install(entry, text)
    with refused(named, by=ConfigError):
        method_class(entry.partition(" ")[0])


def test_two_methods_of_one_name_are_refused(install: Install) -> None:
    install("surgical = near_method:Near")
    with refused("near 1.0", "'surgical'", by=ConfigError):
        outside()
    install()
    install("near = other_method:Near", dist="other")
    with refused("'near'", by=ConfigError):
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


# The example of the documentation


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "suture-fedprox-l1"

SMALL = ("--set", "simulation.images=60", "--set", "simulation.held_out=60", "--set", "method.local.epochs=1")


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    """The example is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    [(name, entry)] = project["entry-points"]["suture.methods"].items()
    code = EXAMPLE / "suture_fedprox_l1.py"
    with installed(tmp_path / "site", project["name"], project["version"], name, entry, code):
        yield


def test_the_example_has_at_most_25_lines_and_keeps_the_contract(example: None) -> None:
    assert len((EXAMPLE / "suture_fedprox_l1.py").read_text().splitlines()) <= 25
    suture.testing.check_method(suture.known_methods()["fedprox_l1"]())


@pytest.mark.complete
def test_it_runs_from_the_command_line(example: None, tmp_path: Path) -> None:
    own = ("--set", "method=fedprox_l1", "--set", "method.mu=10", *SMALL)
    command("run", "demo", "--env", "local", "--rounds", "1", "--out", tmp_path / "r", *own)
    method = json.loads((tmp_path / "r" / "run.json").read_text())["method"]
    assert (method["name"], method["hyperparameters"]["mu"]) == ("fedprox_l1", 10)
    assert "fedprox_l1" in command("list")
