"""Sites that know some of the classes, in turn, as in FedLSM: their tables, the server's, and the truth."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from official import write_ham10000, write_nih
from suture.core.errors import ConfigError, DataError
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import load_table
from suture.data.table import Table
from suture.execution.job import Job
from suture.execution.partition import assigned_classes
from suture.execution.run import run_job
from suture.execution.sites import cache_folder, feature_folder
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.models import ModelSpec
from suture_papers.chest_xrays.chest_sites import NihSites
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.public_data import data_folder, images_in
from suture_papers.skin_lesions.isic import LABELS as ISIC
from suture_papers.skin_lesions.isic import METADATA
from suture_papers.skin_lesions.isic_sites import IsicSites


@pytest.fixture
def ham(tmp_path: Path) -> Path:
    return write_ham10000(tmp_path / "ham")


def prepared(simulation: IsicSites | NihSites, folder: Path, method: str) -> dict[str, SiteConfig]:
    names = simulation.prepare(folder, folder, 1, METHODS[method]())
    return {name: load_site_config(folder / name / "suture.toml") for name in [*names, "server"]}


def tables(configs: dict[str, SiteConfig]) -> dict[str, Table]:
    return {name: load_table(config.data) for name, config in configs.items()}


def truth_of(config: SiteConfig) -> Table:
    return load_table(config.data.model_copy(update={"table": config.data.truth}))


def test_sites_of_all_runs_share_a_cache_where_it_is_named(
    ham: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prepared(IsicSites(root=str(ham)), tmp_path / "one", "fedavg")
    assert own["site-1"].storage.cache == tmp_path / "one" / "site-1" / "cache"
    users = Path.home() / ".cache" / "suture" / "features"
    assert {c.storage.feature_folder for c in own.values()} == {users}
    assert users.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("SUTURE_CACHE", str(tmp_path / "shared"))
    for run in ("one", "two"):
        configs = prepared(IsicSites(root=str(ham)), tmp_path / run, "fedavg")
        assert {c.storage.cache for c in configs.values()} == {tmp_path / "shared"}
        assert {c.storage.feature_folder for c in configs.values()} == {tmp_path / "shared" / "features"}
        assert configs["site-1"].storage.state == tmp_path / run / "site-1" / "state"
    site = tmp_path / "phantoms" / "harbor"
    assert cache_folder(site, site / "images") == site / "cache"
    assert feature_folder(site, site / "images") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUTURE_CACHE", str(tmp_path / "file" / "no folder"))
    assert feature_folder(site, tmp_path / "images") is None, "as without a home"


def test_isic_is_divided_into_multiclass_colour_sites(ham: Path) -> None:
    configs = prepared(IsicSites(root=str(ham)), ham.parent / "s", "fedlsm")
    assert {c.data.label_type for c in configs.values()} == {"multiclass"}
    assert {c.data.color for c in configs.values()} == {True}
    assert {c.privacy.label_view for c in configs.values()} == {"all"}
    found = tables(configs)
    server = found.pop("server")
    assert list(found) == [f"site-{i}" for i in range(1, 6)]
    assert [t.labels for t in found.values()] == list(assigned_classes(ISIC, 5, 3))
    assert server.labels == ISIC
    # 140 images of 70 lesions, 70/10/20 by lesion; 49 lesions for training are 9 for each of 5 sites.
    assert [server.split.count(part) for part in ("validation", "test")] == [14, 28]
    assert {part for t in found.values() for part in t.split} == {"train"}
    assert [len(t) for t in found.values()] == [18] * 5
    assert len({p for t in found.values() for p in t.patients} | set(server.patients)) == 45 + 21


def test_an_image_of_a_diagnosis_that_a_site_does_not_know_is_unlabelled_there(ham: Path) -> None:
    """The truth lies beside the site's table, for the same images."""
    configs = prepared(IsicSites(root=str(ham)), ham.parent / "s", "fedlsm")
    assert configs.pop("server").data.truth is None
    unlabelled = 0
    for name, config in configs.items():
        own, truth = load_table(config.data), truth_of(config)
        assert config.data.truth == ham.parent / "s" / name / "truth.csv"
        assert (truth.images, truth.patients, truth.labels) == (own.images, own.patients, ISIC)
        assert truth.y.sum(axis=1).tolist() == [1] * len(own)
        np.testing.assert_array_equal(own.y, truth.restrict(own.labels).y)
        unlabelled += int((own.y.sum(axis=1) == 0).sum())
    assert 0 < unlabelled < 90


@pytest.mark.parametrize("method", ["surgical", "fedavg", "individual"])
def test_a_method_that_guesses_nothing_has_no_truth(method: str, ham: Path) -> None:
    configs = prepared(IsicSites(root=str(ham)), ham.parent / "s", method)
    assert {config.data.truth for config in configs.values()} == {None}
    assert not list((ham.parent / "s").rglob("truth.csv"))


def test_isic_in_other_ways(ham: Path) -> None:
    simulation = IsicSites(root=str(ham), clients=2, classes="all", split="images", validation="sites")
    found = tables(prepared(simulation, ham.parent / "s", "surgical"))
    assert [t.labels for t in found.values()] == [ISIC] * 3
    assert set(found["server"].split) == {"test"}
    assert set(found["site-1"].split) == {"train", "validation"}
    single = IsicSites(root=str(ham), classes="single").prepare(
        ham.parent / "t", ham.parent, 1, METHODS["pfl"]()
    )
    assert len(single) == 7
    with pytest.raises(ConfigError, match="2 sites of 3 classes each cannot hold 7 classes"):
        IsicSites(root=str(ham), clients=2).prepare(ham.parent / "u", ham.parent, 1, METHODS["fedavg"]())
    with pytest.raises(ConfigError, match=f"has no {METADATA} and no ISIC2018"):
        IsicSites(root=str(ham.parent)).prepare(ham.parent / "u", ham.parent, 1, METHODS["fedavg"]())


def test_nih_is_divided_with_validation_at_the_server(tmp_path: Path) -> None:
    root = write_nih(tmp_path / "nih")
    simulation = NihSites(clients=8, classes="round_robin", validation="server", root=str(root))
    configs = prepared(simulation, tmp_path / "s", "fedlsm")
    found = tables(configs)
    server = found.pop("server")
    assert [t.labels for t in found.values()] == list(assigned_classes(NIH, 8, 3))
    assert server.labels == NIH
    # 120 patients of one image, 70/10/20; of 42 with and 42 without findings 5 each for each of 8 sites.
    assert [server.split.count(part) for part in ("train", "validation", "test")] == [0, 12, 24]
    assert [t.split for t in found.values()] == [("train",) * 10] * 8
    assert not set(server.patients) & {p for t in found.values() for p in t.patients}
    assert {c.data.label_type for c in configs.values()} == {"multilabel"}
    truth = truth_of(configs["site-3"])
    assert (truth.labels, truth.images) == (NIH, found["site-3"].images)
    np.testing.assert_array_equal(truth.restrict(found["site-3"].labels).y, found["site-3"].y)
    own = prepared(NihSites(classes="round_robin", per_client=7, root=str(root)), tmp_path / "t", "fedlsm")
    assert set(load_table(own["server"].data).split) == {"test"}
    assert set(truth_of(own["site-1"]).split) == {"train", "validation"}


def test_nih_is_divided_by_its_official_lists(tmp_path: Path) -> None:
    """Every third patient is on the test list, and an eighth of the other 80 validates."""
    root = write_nih(tmp_path / "nih")
    simulation = NihSites(
        clients=7, classes="round_robin", validation="server", split="official", root=str(root)
    )
    with pytest.raises(DataError, match=r"train_val_list\.txt is missing"):
        prepared(simulation, tmp_path / "none", "fedlsm")
    with (root / "Data_Entry_2017.csv").open(newline="") as file:
        images = [row["Image Index"] for row in csv.DictReader(file)]
    test = set(images[::3])
    for name, listed in (("train_val_list", set(images) - test), ("test_list", test)):
        (root / f"{name}.txt").write_text("\n".join(sorted(listed)))
    found = tables(prepared(simulation, tmp_path / "s", "fedlsm"))
    server = found.pop("server")
    assert set(server.of("test").images) == test
    assert len(server.of("validation")) == 10
    trained = {image for table in found.values() for image in table.images}
    assert trained
    assert not trained & set(server.images)


@pytest.mark.complete
def test_isic_runs_and_is_selected_by_the_server(ham: Path) -> None:
    """All the way: the server alone has what to select and test with."""
    made = Job(
        name="small",
        title="round robin skin",
        method=FedLSM(local=LocalTraining(lr=1e-3, iterations=2, batch_size=8)),
        model=ModelSpec("cnn", size=16, color=True),
        rounds=2,
        selection="server_metric",
        simulation=IsicSites(root=str(ham)),
    )
    run_job(made, "local", ham.parent / "r", resume=False, overwrite=False, workers=None)
    metrics = json.loads((ham.parent / "r" / "metrics.json").read_text())
    assert (metrics["n"], metrics["source"]) == (28, "server test set")
    assert metrics["overall"]["accuracy"] is not None
    assert json.loads((ham.parent / "r" / "run.json").read_text())["label_type"] == "multiclass"


def test_the_data_of_a_simulation_are_named_or_in_the_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"ISIC.* SUTURE_DATA to the folder that contains ham"):
        data_folder(None, "ham", "ISIC")
    with pytest.raises(ConfigError, match=r"simulation\.root=DIR"):
        IsicSites().prepare(tmp_path / "s", tmp_path, 1, METHODS["fedlsm"]())
    monkeypatch.setenv("SUTURE_DATA", str(tmp_path))
    assert data_folder(None, "ham", "ISIC") == tmp_path.resolve() / "ham"
    assert data_folder(str(tmp_path / "x"), "ham", "ISIC") == tmp_path.resolve() / "x"


def test_images_are_in_an_archive_a_folder_or_beside_the_table(tmp_path: Path) -> None:
    assert images_in(tmp_path) == tmp_path
    for name in ("ISIC2018_Task3_Training_Input", "images"):
        (tmp_path / name).mkdir()
        assert images_in(tmp_path) == tmp_path / name
    (tmp_path / "images.tar").touch()
    assert images_in(tmp_path) == tmp_path / "images.tar"
