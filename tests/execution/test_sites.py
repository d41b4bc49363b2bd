"""Simulated sites: of public data as papers divide them, what they compute on, what a reference is given."""

from __future__ import annotations

import csv
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tailed import CENTRES, write_flamby, write_hyperkvasir, write_tones

from official import write_chexpert, write_ham10000, write_nih
from suture.cli.common import device_of
from suture.core.errors import ConfigError, DataError
from suture.core.labels import union
from suture.data.config import SiteConfig, TrainingConfig, load_server_config, load_site_config
from suture.data.readers import load_table
from suture.data.table import SPLITS, Table
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.execution.sites import cache_folder, compute_on, feature_folder, on_devices, this_machine
from suture.flare.recipe import export_job
from suture.learning.samples import load_samples, pool
from suture.methods import METHODS
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture_papers.chest_xrays.chest_sites import SHARED, ChestSites, NihSites
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.fedmas.hyperkvasir import FOLDS
from suture_papers.fedmas.hyperkvasir import LABELS as HYPERKVASIR
from suture_papers.fedmas.hyperkvasir_sites import HyperKvasirSites
from suture_papers.partition import assigned_classes
from suture_papers.public_data import data_folder, images_in
from suture_papers.skin_lesions.flamby import LABELS, TRUTH
from suture_papers.skin_lesions.flamby_sites import AttributeSites, FlambySites
from suture_papers.skin_lesions.isic import LABELS as ISIC
from suture_papers.skin_lesions.isic import METADATA
from suture_papers.skin_lesions.isic_sites import IsicSites
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused, suture


def prepared(simulation: Any, folder: Path, method: Any = "fedavg") -> dict[str, SiteConfig]:
    made = METHODS[method]() if isinstance(method, str) else method
    names = simulation.prepare(folder, folder, 1, made)
    return {name: load_site_config(folder / name / "suture.toml") for name in [*names, "server"]}


def tables(configs: dict[str, SiteConfig]) -> tuple[Table, dict[str, Table]]:
    """The table of the server, and those of the sites."""
    found = {name: load_table(config.data) for name, config in configs.items()}
    return found.pop("server"), found


def truth_of(config: SiteConfig) -> Table:
    return load_table(config.data.model_copy(update={"table": config.data.truth}))


def parts(table: Table) -> list[int]:
    return [table.split.count(part) for part in SPLITS]


def patients(sites: Iterable[Table]) -> set[str]:
    return {patient for site in sites for patient in site.patients}


@pytest.fixture(scope="module")
def ham(tmp_path_factory: pytest.TempPathFactory) -> str:
    """140 images of 70 lesions."""
    return str(write_ham10000(tmp_path_factory.mktemp("ham") / "ham"))


@pytest.fixture(scope="module")
def nih(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 patients of one image each in the official format; every second one has findings."""
    return write_nih(tmp_path_factory.mktemp("nih") / "nih")


@pytest.fixture(scope="module")
def flamby(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flamby(tmp_path_factory.mktemp("flamby") / "flamby")


@pytest.fixture(scope="module")
def kvasir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hyperkvasir(tmp_path_factory.mktemp("hk") / "hk"))


def test_isic_is_divided_into_multiclass_colour_sites_with_the_truth_beside(ham: str, tmp_path: Path) -> None:
    configs = prepared(IsicSites(root=ham), tmp_path / "s", "fedlsm")
    for config in configs.values():
        assert (config.data.label_type, config.data.color) == ("multiclass", True)
        assert config.privacy.label_view == "all"
    server, found = tables(configs)
    assert list(found) == [f"site-{i}" for i in range(1, 6)]
    assert [t.labels for t in found.values()] == list(assigned_classes(ISIC, 5, 3))
    assert server.labels == ISIC
    # 70/10/20 by lesion; 49 lesions for training are 9 for each of 5 sites.
    assert parts(server) == [0, 14, 28]
    assert [parts(t) for t in found.values()] == [[18, 0, 0]] * 5
    assert len(patients([server, *found.values()])) == 45 + 21
    assert configs.pop("server").data.truth is None
    unlabelled = 0
    for name, config in configs.items():
        own, truth = found[name], truth_of(config)
        assert config.data.truth == tmp_path / "s" / name / "truth.csv"
        assert (truth.images, truth.patients, truth.labels) == (own.images, own.patients, ISIC)
        assert truth.y.sum(axis=1).tolist() == [1] * len(own)
        np.testing.assert_array_equal(own.y, truth.restrict(own.labels).y)
        unlabelled += int((own.y.sum(axis=1) == 0).sum())
    assert 0 < unlabelled < 90, "an image of a diagnosis that a site does not know"
    for method in ("surgical", "individual"):  # which guess nothing
        configs = prepared(IsicSites(root=ham), tmp_path / method, method)
        assert {config.data.truth for config in configs.values()} == {None}
        assert not list((tmp_path / method).rglob("truth.csv"))


def test_isic_in_other_ways(ham: str, tmp_path: Path) -> None:
    simulation = IsicSites(root=ham, clients=2, classes="all", split="images", validation="sites")
    server, found = tables(prepared(simulation, tmp_path / "s", "surgical"))
    assert [t.labels for t in (server, *found.values())] == [ISIC] * 3
    assert (set(server.split), set(found["site-1"].split)) == ({"test"}, {"train", "validation"})
    assert len(prepared(IsicSites(root=ham, classes="single"), tmp_path / "t", "pfl")) == 7 + 1
    unlike = IsicSites(root=ham, classes="all", clients=8, partition="dirichlet")
    server, found = tables(prepared(unlike, tmp_path / "u"))
    assert parts(server) == [0, 14, 28]
    assert {t.labels for t in found.values()} == {ISIC}
    assert sum(map(len, found.values())) == 98
    lesions = [set(t.patients) for t in (server, *found.values())]
    assert sum(map(len, lesions)) == len(set().union(*lesions)) == 70
    alike = prepared(IsicSites(root=ham, classes="all", clients=7, partition="iid"), tmp_path / "v", "fedlsm")
    assert {len(t) for t in tables(alike)[1].values()} == {14}
    assert alike.pop("server").data.truth is None
    assert all(config.data.truth == config.data.table for config in alike.values())


@pytest.mark.parametrize("partition", ["patients", "dirichlet"])
def test_each_lesion_is_tested_in_one_of_five_folds(ham: str, tmp_path: Path, partition: str) -> None:
    tested = []
    for fold in range(1, 6):
        simulation = IsicSites(root=ham, classes="all", clients=2, partition=partition, fold=fold)  # type: ignore[arg-type]
        server, found = tables(prepared(simulation, tmp_path / str(fold), "surgical"))
        own = {p for p, part in zip(server.patients, server.split, strict=True) if part == "test"}
        assert not own & set().union(*(table.patients for table in found.values()))
        tested.append(own)
    assert sum(map(len, tested)) == len(set().union(*tested)) == 70


def test_nih_is_divided_with_validation_at_the_server(nih: Path, tmp_path: Path) -> None:
    simulation = NihSites(clients=8, classes="round_robin", validation="server", root=str(nih))
    configs = prepared(simulation, tmp_path / "s", "fedlsm")
    server, found = tables(configs)
    assert [t.labels for t in found.values()] == list(assigned_classes(NIH, 8, 3))
    assert server.labels == NIH
    # 70/10/20; of 42 with and 42 without findings 5 each for each of 8 sites.
    assert parts(server) == [0, 12, 24]
    assert [parts(t) for t in found.values()] == [[10, 0, 0]] * 8
    assert not patients([server]) & patients(found.values())
    assert {c.data.label_type for c in configs.values()} == {"multilabel"}
    truth = truth_of(configs["site-3"])
    assert (truth.labels, truth.images) == (NIH, found["site-3"].images)
    np.testing.assert_array_equal(truth.restrict(found["site-3"].labels).y, found["site-3"].y)
    own = prepared(NihSites(classes="round_robin", per_client=7, root=str(nih)), tmp_path / "t", "fedlsm")
    assert set(load_table(own["server"].data).split) == {"test"}
    assert set(truth_of(own["site-1"]).split) == {"train", "validation"}


def test_nih_is_divided_by_its_official_lists(nih: Path, tmp_path: Path) -> None:
    """Every third patient is on the test list, and an eighth of the other 80 validates."""
    lists = {"classes": "round_robin", "validation": "server", "split": "official"}
    simulation = NihSites(clients=7, root=str(nih), **lists)  # type: ignore[arg-type]
    with refused("train_val_list.txt", by=DataError):
        prepared(simulation, tmp_path / "none", "fedlsm")
    with (nih / "Data_Entry_2017.csv").open(newline="") as file:
        images = [row["Image Index"] for row in csv.DictReader(file)]
    test = set(images[::3])
    for name, listed in (("train_val_list", set(images) - test), ("test_list", test)):
        (nih / f"{name}.txt").write_text("\n".join(sorted(listed)))
    server, found = tables(prepared(simulation, tmp_path / "s", "fedlsm"))
    assert set(server.of("test").images) == test
    assert len(server.of("validation")) == 10
    trained = {image for table in found.values() for image in table.images}
    assert trained
    assert not trained & set(server.images)


def test_one_class_a_site_complete_labels_for_their_reference_and_rates_of_a_sites_own(
    nih: Path, tmp_path: Path
) -> None:
    single = prepared(NihSites(root=str(nih), classes="single"), tmp_path / "s", "surgical")
    assert list(single)[:-1] == sorted(list(single)[:-1]), "as their numbers do"
    assert [t.labels.names for t in tables(single)[1].values()] == [(name,) for name in NIH]
    for method, columns in (("central", 7), ("central_full", 14)):
        config = prepared(NihSites(root=str(nih), classes="disjoint"), tmp_path / method, method)["site-1"]
        assert len(config.data.table.read_text().splitlines()[0].split(",")) - 3 == columns
        assert len(load_table(config.data).labels) == 7
    rates = prepared(NihSites(root=str(nih), learning_rates={"site-2": 1e-5}), tmp_path / "r", "surgical")
    assert [rates[site].training.lr for site in ("site-1", "site-2")] == [None, 1e-5]


def test_two_data_sets_are_two_sites(nih: Path, tmp_path: Path) -> None:
    assert set(SHARED) == set(NIH) & set(CHEXPERT)
    both = ChestSites(nih=str(nih), chexpert=str(write_chexpert(tmp_path / "chexpert")))
    for name, simulation in (("all", both), ("shared", replace(both, classes="shared"))):
        names = simulation.prepare(tmp_path / name, tmp_path, 1, METHODS["surgical"]())
        found = {site: load_table(load_site_config(tmp_path / name / site).data).labels for site in names}
        assert list(found) == ["chexpert", "nih"]
        assert [len(labels) for labels in found.values()] == ([13, 14] if name == "all" else [7, 7])
        assert name == "all" or {*found["nih"]} == {*SHARED}


def test_hyperkvasir_at_eight_sites(tmp_path: Path) -> None:
    root = write_hyperkvasir(tmp_path / "hk", each=20)
    configs = prepared(HyperKvasirSites(root=str(root)), tmp_path / "s")
    assert {(c.data.label_type, c.data.color) for c in configs.values()} == {("multiclass", True)}
    # The server alone is told which classes are common; the sites alone write down how they fare.
    assert configs["server"].data.groups == {"tail": HYPERKVASIR.names}
    assert {name for name, c in configs.items() if not c.data.groups} == configs.keys() - {"server"}
    assert {name for name, c in configs.items() if not c.storage.diagnostics} == {"server"}
    server, found = tables(configs)
    # Of twenty images of a class four test, and of the other sixteen two are for validation.
    assert parts(server) == [0, 46, 92]
    assert list(found) == [f"site-{i}" for i in range(1, 9)]
    assert {t.labels for t in found.values()} == {HYPERKVASIR}
    assert [parts(t)[1:] for t in found.values()] == [[0, 0]] * 8
    assert sum(map(len, found.values())) == 23 * 14
    counts = np.array([t.y.sum(axis=0) for t in found.values()])
    assert set(counts.ravel().tolist()) <= {1, 2}  # of fourteen
    names = [image for t in (server, *found.values()) for image in t.images]
    assert len(set(names)) == len(names) == 460


def test_hyperkvasir_in_other_ways(kvasir: str, tmp_path: Path) -> None:
    server, _ = tables(prepared(HyperKvasirSites(root=kvasir), tmp_path / "s"))
    other, _ = tables(prepared(HyperKvasirSites(root=kvasir, fold=2, clients=2), tmp_path / "t"))
    assert not set(server.of("test").images) & set(other.of("test").images)
    unlike = HyperKvasirSites(root=kvasir, partition="dirichlet", alpha=0.3, validation="sites")
    server, found = tables(prepared(unlike, tmp_path / "u"))
    assert parts(server) == [0, 0, 46]
    counts = np.array([t.of("train").y.sum(axis=0) for t in found.values()])
    assert counts.sum(axis=0).tolist() == [7] * 23
    assert counts.max() > 4
    assert (counts.sum(axis=1) > 0).all()
    assert sum(parts(t)[1] for t in found.values()) == 23


def test_a_site_trains_on_the_same_images_whoever_validates_and_keeps_the_model(
    kvasir: str, tmp_path: Path
) -> None:
    """A model that stays at its site is validated there, and tested on the images of the global ones."""
    simulation = HyperKvasirSites(root=kvasir, partition="dirichlet", clients=2)
    server, shared = tables(prepared(simulation, tmp_path / "fedavg"))
    alone, own = tables(prepared(simulation, tmp_path / "individual", "individual"))
    both, kept = tables(prepared(simulation, tmp_path / "keep", FedAvg(keep_local=True)))
    assert parts(alone) == [0, 0, 46]
    assert parts(both) == parts(server), "the server keeps its own, for the global model"
    for name, table in shared.items():
        for found in (own[name], kept[name]):
            assert found.of("train").images == table.images
            assert found.of("test").images == server.of("test").images


def test_the_centres_of_flamby(flamby: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        server, found = tables(prepared(FlambySites(root=str(flamby)), tmp_path / "s"))
    assert [sum(f"centre {k};" in text for text in caplog.messages) for k in range(6)] == [0, 0, 0, 1, 1, 1]
    assert list(found) == ["centre-0", "centre-1", "centre-2"]
    assert {t.labels for t in (server, *found.values())} == {LABELS}
    for name, table in found.items():
        with (flamby / f"train_flamby_isic_fl_{name[-1]}_1.csv").open(newline="") as file:
            listed = {f"{row['image_name']}.jpg" for row in csv.DictReader(file)}
        assert set(table.images) < listed
        assert not listed & set(server.of("test").images)
        assert listed - set(table.images) <= set(server.of("validation").images)
        assert set(table.split) == {"train"}
    # Of each class 18, 16 and 12 images are listed: two, two and one of them are held out.
    assert parts(server) == [0, 8 * 5, 48 + 32 + 32]
    own = prepared(FlambySites(root=str(flamby), centres=(0, 2)), tmp_path / "t", "individual")
    server, found = tables(own)
    assert list(found) == ["centre-0", "centre-2"]
    assert sorted(i for t in found.values() for i in t.of("test").images) == sorted(server.images)
    assert all(image.startswith("ISIC_2") for image in found["centre-2"].of("test").images)


@pytest.mark.parametrize("split", ["lesions", "images"])
def test_centres_without_the_official_test_images(tmp_path: Path, split: Any) -> None:
    root = str(write_flamby(tmp_path / "flamby", test_images=False))
    with refused("fold 1", "split=lesions", by=ConfigError):
        prepared(FlambySites(root=root), tmp_path / "s")
    server, found = tables(prepared(FlambySites(root=root, split=split, validation="sites"), tmp_path / "t"))
    for name, n in (("centre-0", 144), ("centre-1", 128), ("centre-2", 96)):
        assert len(found[name].of("train")) == pytest.approx(0.7 * n, abs=8)
        # Every class that the centre has is in its training images.
        assert ((found[name].of("train").y.sum(axis=0) > 0) >= (found[name].y.sum(axis=0) > 0)).all()
    if split == "lesions":
        assert not patients([server]) & patients(found.values())


@pytest.mark.complete
def test_five_folds_of_the_centres(flamby: Path, tmp_path: Path) -> None:
    """Each image tests in one fold; each centre has its fifth of each class there, and lesions are whole."""
    tested: list[str] = []
    for fold in range(1, 6):
        simulation = FlambySites(root=str(flamby), split="folds", fold=fold, validation="sites")
        server, found = tables(prepared(simulation, tmp_path / str(fold)))
        assert set(server.split) == {"test"}
        lesions = [{*server.patients}]
        for name, whole in (("centre-0", 96), ("centre-1", 80), ("centre-2", 64)):
            for part in ("train", "validation"):
                lesions.append({*found[name].of(part).patients})
            here = [lesion for lesion in lesions[0] if lesion.startswith(f"L{name[-1]}")]
            # Of 12, 10 or 8 lesions of a class; two images each.
            kinds = Counter(int(lesion.partition("-")[2]) % 8 for lesion in here)
            assert len(kinds) == 8
            assert {*kinds.values()} <= {whole // 40, -(-whole // 40)}
            assert len(lesions[-1]) == pytest.approx((whole - len(here)) / 10, abs=8)
        assert len(set().union(*lesions)) == sum(map(len, lesions)) == 240
        tested += server.images
    assert len(tested) == len(set(tested)) == 480


def test_clients_of_different_skin_tones(flamby: Path, tmp_path: Path) -> None:
    tones = write_tones(tmp_path, every=4)
    own = {"root": str(flamby), "split": "images", "validation": "sites"}
    configs = prepared(AttributeSites(tones=str(tones), **own), tmp_path / "s")  # type: ignore[arg-type]
    server, found = tables(configs)

    def attributes(name: str) -> list[str]:
        assert configs[name].data.attribute_column == "attribute"
        with configs[name].data.table.open(newline="") as file:
            return [row["attribute"] for row in csv.DictReader(file)]

    assert list(found) == ["isic-0", "isic-1", "isic-2", "isic-3"]
    assert {t.labels for t in (server, *found.values())} == {LABELS}
    assert sum(map(len, found.values())) + len(server) == CENTRES[0] + CENTRES[1]
    *others, last = (np.mean([tone == "dark" for tone in attributes(name)]) for name in found)
    assert last > 0.8
    assert max(others) < 0.2
    with tones.open(newline="") as file:
        tone_of = {f"{row['image']}.jpg": row["skin_tone"] for row in csv.DictReader(file)}
    assert attributes("server") == [tone_of[image] for image in server.images]


def test_what_a_data_set_lacks_is_named_with_its_setting(
    flamby: Path, kvasir: str, ham: str, nih: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_DATA", raising=False)
    flamby = shutil.copytree(flamby, tmp_path / "flamby")
    own = {"root": str(flamby)}
    lists = tmp_path / "data" / "flamby_isic"
    for sites, method, named in (
        (HyperKvasirSites(root=str(tmp_path)), "fedavg", [FOLDS, "simulation.list"]),
        (HyperKvasirSites(root=kvasir, fold=5), "fedavg", ["fold = 5", "0 to 4"]),
        (IsicSites(root=ham, partition="iid"), "fedavg", ["partition=iid", "simulation.classes"]),
        (IsicSites(root=ham, clients=2), "fedavg", ["2 sites of 3 classes", 7]),
        (IsicSites(root=str(tmp_path)), "fedavg", [METADATA, "ISIC2018"]),
        (IsicSites(), "fedlsm", ["ISIC", "SUTURE_DATA", "simulation.root=DIR"]),
        (FlambySites(centres=(3, 4), **own), "fedavg", ["simulation.centres"]),
        (FlambySites(fold=2, **own), "fedavg", ["train_flamby_isic_fl_0_2.csv", "simulation.lists"]),
        (AttributeSites(**own), "fedavg", ["skin tones", "simulation"]),
        (NihSites(root=str(nih), learning_rates={"site-3": 1e-5}), "pfl", ["'site-3'", "'site-"]),
        (ChestSites(nih=str(nih), chexpert=str(nih)), "central_full", ["NIH and CheXpert"]),
        (ChestSites(nih=str(nih)), "surgical", ["simulation.chexpert=DIR"]),
    ):
        with refused(*named, by=ConfigError):
            prepared(sites, tmp_path / "s", method)
    lists.mkdir(parents=True)
    (flamby / TRUTH).rename(lists / TRUTH)
    with refused(TRUTH, "simulation.lists=DIR", by=ConfigError):
        prepared(FlambySites(lists=str(flamby), **own), tmp_path / "s")
    monkeypatch.setenv("SUTURE_DATA", str(tmp_path / "data"))
    for path in flamby.glob("train_*.csv"):
        path.rename(lists / path.name)
    assert list(prepared(FlambySites(**own), tmp_path / "t"))[:2] == ["centre-0", "centre-1"]


def test_data_are_named_or_in_the_shared_folder_and_images_in_an_archive_a_folder_or_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUTURE_DATA", str(tmp_path))
    assert data_folder(None, "ham", "ISIC") == tmp_path.resolve() / "ham"
    assert data_folder(str(tmp_path / "x"), "ham", "ISIC") == tmp_path.resolve() / "x"
    assert images_in(tmp_path) == tmp_path
    for name in ("ISIC2018_Task3_Training_Input", "images"):
        (tmp_path / name).mkdir()
        assert images_in(tmp_path) == tmp_path / name
    (tmp_path / "images.tar").touch()
    assert images_in(tmp_path) == tmp_path / "images.tar"


SMALL = ("--set", "simulation.images=20", "--set", "simulation.held_out=30")


def test_options_change_what_they_name_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_machine() == TrainingConfig() == TrainingConfig(device="cpu", threads=1, amp=False)
    with refused("'cuda:99'", by=ConfigError):
        compute_on("cpu,cuda:99")
    assert this_machine().device == "cpu"
    monkeypatch.setenv("SUTURE_THREADS", "3")
    compute_on("cpu:0", amp=True)
    assert this_machine() == TrainingConfig(device="cpu:0", threads=3, amp=True)
    with refused("'gpu'", by=ConfigError):
        compute_on("gpu")
    assert os.environ["SUTURE_DEVICE"] == "cpu:0"
    monkeypatch.setenv("SUTURE_THREADS", "many")
    with refused("SUTURE_THREADS", "threads", "'many'", by=ConfigError):
        this_machine()


def test_every_party_of_a_simulation_has_it_in_its_file_and_sites_take_turns(tmp_path: Path) -> None:
    suture("data", "simulate", "demo", "--out", tmp_path, *SMALL, "--device", "cpu,cpu:0")
    server = load_server_config(tmp_path / "server" / "suture.toml").held_out
    assert server is not None
    assert server.training.device == "cpu"
    sites = [path for path in tmp_path.glob("*/suture.toml") if path.parent.name != "server"]
    assert sorted(load_site_config(path).training.device for path in sites) == ["cpu", "cpu", "cpu:0"]
    assert [one.device for one in on_devices(tuple("abcd")).values()] == ["cpu", "cpu:0"] * 2
    with refused("cpu,cpu:0", by=ConfigError):
        device_of("cpu,cpu:0")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run demo --env local --out {} --device nonsense", "'nonsense'"),
        ("table nih_overlap --work {} --device nonsense", "'nonsense'"),
        ("run demo --env poc --out {} --device cpu", "[training] device"),  # which a real site says itself
    ],
)
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_written(
    command: str, named: str, tmp_path: Path
) -> None:
    with refused(named, by=ConfigError):
        suture(*command.format(tmp_path / "out").split())
    assert not list(tmp_path.iterdir())


def test_sites_of_all_runs_share_a_cache_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = IsicSites(root=str(write_ham10000(tmp_path / "ham")))

    def storage(run: str) -> dict[str, object]:
        names = sites.prepare(tmp_path / run, tmp_path, 1, METHODS["fedavg"]())
        return {name: load_site_config(tmp_path / run / name / "suture.toml").storage for name in names}

    users = Path.home() / ".cache" / "suture" / "features"
    for name, own in storage("one").items():
        assert (own.cache, own.feature_folder) == (tmp_path / "one" / name / "cache", users)
    assert users.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("SUTURE_CACHE", str(shared := tmp_path / "shared"))
    for run in ("one", "two"):
        for name, own in storage(run).items():
            assert (own.cache, own.feature_folder) == (shared, shared / "features")
            assert own.state == tmp_path / run / name / "state"
    site = tmp_path / "phantoms" / "harbor"
    assert cache_folder(site, site / "images") == site / "cache"
    assert feature_folder(site, site / "images") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUTURE_CACHE", str(tmp_path / "file" / "no folder"))
    assert feature_folder(site, tmp_path / "images") is None, "as without a home"


def test_pooled_patients_and_labels_stay_apart(tmp_path: Path) -> None:
    PhantomSites(images=30, held_out=30).prepare(tmp_path, tmp_path, 1, METHODS["central"]())
    names, spec = ("harbor", "lakeside", "northfield"), ModelSpec("cnn", size=16)
    parts = {n: load_samples(load_site_config(tmp_path / n / "suture.toml"), spec, n) for n in names}
    labels, samples = pool(parts)
    assert labels.names == tuple(sorted(union(own for own, _ in parts.values()).names))
    train = samples["train"]
    assert len(train) == sum(len(own["train"]) for _, own in parts.values())
    first = parts["harbor"][1]["train"]
    assert train.patients[0] == f"harbor/{first.patients[0]}"
    known = {labels.names[i] for i in np.flatnonzero(~np.isnan(train.y[0].numpy()))}
    assert known == set(parts["harbor"][0])


@pytest.mark.parametrize("method", ["central", "individual"])
def test_references_do_not_run_in_a_federation(method: str, tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), [f"method={method}"])
    with refused("--env local", by=ConfigError):
        run_job(job, "sim", tmp_path / "r")
    with refused("--env local", by=ConfigError):
        export_job(job, tmp_path)
