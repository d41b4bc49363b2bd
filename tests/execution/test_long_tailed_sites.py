"""Sites of long-tailed data, as in Fed-MAS: parts alike and unlike, FLamby's centres, and skin tones."""

from __future__ import annotations

import csv
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from official import write_ham10000
from suture.core.errors import ConfigError
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import load_table
from suture.data.table import SPLITS, Table
from suture.methods import METHODS
from suture_papers.fedmas.hyperkvasir import FOLDS
from suture_papers.fedmas.hyperkvasir import LABELS as HYPERKVASIR
from suture_papers.fedmas.hyperkvasir_sites import HyperKvasirSites
from suture_papers.skin_lesions.flamby import LABELS, SPELLINGS, TRUTH
from suture_papers.skin_lesions.flamby_sites import AttributeSites, FlambySites
from suture_papers.skin_lesions.isic import LABELS as ISIC
from suture_papers.skin_lesions.isic_sites import IsicSites

CENTRES = {0: 192, 1: 160, 2: 128, 4: 16}


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_flamby(root: Path, absent: tuple[int, ...] = (4,), test_images: bool = True) -> Path:
    """FLamby's table and Fed-MAS's lists beside the images of some centres; the eight classes take turns.

    Two images of each lesion; of every four lesions of a class at a centre the last is for testing.
    """
    whole = ["image," + ",".join(SPELLINGS) + ",UNK,target,center,fold,fold2"]
    lesions = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    (root / "images").mkdir(parents=True)
    for centre, n in CENTRES.items():
        own = [",image_name,dx"]
        for i in range(n):
            image, dx, test = f"ISIC_{centre}{i:06d}", i // 2 % 8, i // 16 % 4 == 3
            cells = ",".join("1.0" if k == dx else "0.0" for k in range(8))
            part = "test" if test else "train"
            whole.append(f"{image},{cells},0.0,{dx},{centre},{part},{part}_{centre}")
            lesions.append(f"{image},55.0,torso,L{centre}-{i // 2},male")
            if not test:
                own.append(f"{len(own) - 1},{image},{dx}")
            if centre not in absent and (test_images or not test):
                write_image(root / "images" / f"{image}.jpg", centre * 1000 + i)
        (root / f"train_flamby_isic_fl_{centre}_1.csv").write_text("\n".join(own) + "\n")
    (root / TRUTH).write_text("\n".join(whole) + "\n")
    (root / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(lesions) + "\n")
    return root


def write_hyperkvasir(root: Path, each: int = 10) -> Path:
    """So many images of each class in the official folders and folds, and again as a segmented one."""
    lines = ["file-name;class-name;split-index"]
    for i in range(each * 23):
        name = HYPERKVASIR.names[i % 23]
        lines.append(f"{i:08d}-4bf5.jpg;{name};{i // 23 % 5}")
        folder = root / "labeled-images" / "upper-gi-tract" / "pathological-findings" / name
        write_image(folder / f"{i:08d}-4bf5.jpg", i)
    write_image(root / "segmented-images" / "images" / "00000000-4bf5.jpg", 0)
    (root / FOLDS).write_text("\n".join(lines) + "\n")
    return root


def prepared(simulation: Any, folder: Path, method: str = "fedavg") -> dict[str, SiteConfig]:
    names = simulation.prepare(folder, folder, 1, METHODS[method]())
    return {name: load_site_config(folder / name / "suture.toml") for name in [*names, "server"]}


def tables(configs: dict[str, SiteConfig]) -> dict[str, Table]:
    return {name: load_table(config.data) for name, config in configs.items()}


def parts(table: Table) -> list[int]:
    return [table.split.count(part) for part in SPLITS]


@pytest.fixture
def flamby(tmp_path: Path) -> Path:
    return write_flamby(tmp_path / "flamby")


def test_hyperkvasir_at_eight_sites(tmp_path: Path) -> None:
    root = write_hyperkvasir(tmp_path / "hk", each=20)
    configs = prepared(HyperKvasirSites(root=str(root)), tmp_path / "s")
    assert {(c.data.label_type, c.data.color) for c in configs.values()} == {("multiclass", True)}
    # The server alone is told which classes are common; the sites alone write down how they fare.
    assert configs["server"].data.groups == {"tail": HYPERKVASIR.names}
    assert {name for name, c in configs.items() if not c.data.groups} == configs.keys() - {"server"}
    assert {name for name, c in configs.items() if not c.storage.diagnostics} == {"server"}
    found = tables(configs)
    server = found.pop("server")
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


def test_hyperkvasir_in_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUTURE_DATA", raising=False)
    root = write_hyperkvasir(tmp_path / "hk")
    first = tables(prepared(HyperKvasirSites(root=str(root)), tmp_path / "s"))
    other = tables(prepared(HyperKvasirSites(root=str(root), fold=2, clients=2), tmp_path / "t"))
    assert not set(first["server"].of("test").images) & set(other["server"].of("test").images)
    unlike = HyperKvasirSites(root=str(root), partition="dirichlet", alpha=0.3, validation="sites")
    found = tables(prepared(unlike, tmp_path / "u"))
    assert parts(found.pop("server")) == [0, 0, 46]
    counts = np.array([t.of("train").y.sum(axis=0) for t in found.values()])
    assert counts.sum(axis=0).tolist() == [7] * 23
    assert counts.max() > 4
    assert (counts.sum(axis=1) > 0).all()
    assert sum(parts(t)[1] for t in found.values()) == 23
    with pytest.raises(
        ConfigError, match=r"lack 5_fold_split\.csv; name its folder with --set simulation\.list"
    ):
        prepared(HyperKvasirSites(root=str(tmp_path)), tmp_path / "v")
    with pytest.raises(ConfigError, match=r"fold = 5: .* has 5 folds; .*0 to 4"):
        prepared(HyperKvasirSites(root=str(root), fold=5), tmp_path / "v")


def test_a_site_trains_on_the_same_images_whoever_validates(tmp_path: Path) -> None:
    """A model that stays at its site is validated there, and tested on the images of the global ones."""
    root = write_hyperkvasir(tmp_path / "hk")
    simulation = HyperKvasirSites(root=str(root), partition="dirichlet", clients=3)
    shared, own = (tables(prepared(simulation, tmp_path / m, m)) for m in ("fedavg", "individual"))
    assert parts(own["server"]) == [0, 0, 46]
    for name in ("site-1", "site-2", "site-3"):
        assert own[name].of("train").images == shared[name].images
        assert own[name].of("test").images == shared["server"].of("test").images


def test_isic_as_long_tailed_parts(tmp_path: Path) -> None:
    root = write_ham10000(tmp_path / "ham")
    simulation = IsicSites(root=str(root), classes="all", clients=8, partition="dirichlet")
    found = tables(prepared(simulation, tmp_path / "s"))
    server = found.pop("server")
    assert parts(server) == [0, 14, 28]
    assert {t.labels for t in found.values()} == {ISIC}
    assert sum(map(len, found.values())) == 98
    lesions = [set(t.patients) for t in (server, *found.values())]
    assert sum(map(len, lesions)) == len(set().union(*lesions)) == 70
    alike = IsicSites(root=str(root), classes="all", clients=7, partition="iid")
    assert {len(t) for name, t in tables(prepared(alike, tmp_path / "t")).items() if name != "server"} == {14}
    with pytest.raises(ConfigError, match=r"partition=iid .*set simulation\.cla"):
        prepared(IsicSites(root=str(root), partition="iid"), tmp_path / "u")


def test_guesses_are_held_against_the_sites_own_table(tmp_path: Path) -> None:
    root = write_ham10000(tmp_path / "ham")
    simulation = IsicSites(root=str(root), classes="all", clients=2, partition="iid")
    configs = prepared(simulation, tmp_path / "s", "fedlsm")
    assert configs.pop("server").data.truth is None
    assert all(config.data.truth == config.data.table for config in configs.values())


def test_the_centres_of_flamby(flamby: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = tables(prepared(FlambySites(root=str(flamby)), tmp_path / "s"))
    assert [m for m in caplog.messages if "the centre is left out" in m] == [
        f"{flamby / 'images'}: no image of centre {k}; the centre is left out" for k in (3, 4, 5)
    ]
    server = found.pop("server")
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


def test_models_that_stay_at_a_centre_are_tested_on_its_own_images(flamby: Path, tmp_path: Path) -> None:
    found = tables(prepared(FlambySites(root=str(flamby), centres=(0, 2)), tmp_path / "s", "individual"))
    server = found.pop("server")
    assert list(found) == ["centre-0", "centre-2"]
    assert sorted(i for t in found.values() for i in t.of("test").images) == sorted(server.images)
    assert all(image.startswith("ISIC_2") for image in found["centre-2"].of("test").images)


@pytest.mark.parametrize("split", ["lesions", "images"])
def test_centres_without_the_official_test_images(tmp_path: Path, split: Any) -> None:
    root = write_flamby(tmp_path / "flamby", test_images=False)
    with pytest.raises(ConfigError, match=r"none of the images that fold 1 tests with; .*split=lesions"):
        prepared(FlambySites(root=str(root)), tmp_path / "s")
    found = tables(prepared(FlambySites(root=str(root), split=split, validation="sites"), tmp_path / "t"))
    server = found.pop("server")
    for name, n in (("centre-0", 144), ("centre-1", 128), ("centre-2", 96)):
        assert len(found[name].of("train")) == pytest.approx(0.7 * n, abs=8)
        # Every class that the centre has is in its training images.
        assert ((found[name].of("train").y.sum(axis=0) > 0) >= (found[name].y.sum(axis=0) > 0)).all()
    if split == "lesions":
        tested = set(server.patients)
        assert not tested & {p for t in found.values() for p in t.patients}


@pytest.mark.complete
def test_five_folds_of_the_centres(flamby: Path, tmp_path: Path) -> None:
    """Each image tests in one fold; each centre has its fifth of each class there, and lesions are whole."""
    tested: list[str] = []
    for fold in range(1, 6):
        simulation = FlambySites(root=str(flamby), split="folds", fold=fold, validation="sites")
        found = tables(prepared(simulation, tmp_path / str(fold)))
        server = found.pop("server")
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


def test_what_flamby_lacks_is_named(flamby: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no image of these centres; correct simulation\.centres or root"):
        prepared(FlambySites(root=str(flamby), centres=(3, 4)), tmp_path / "s")
    with pytest.raises(ConfigError, match=r"has no train_flamby_isic_fl_0_2\.csv; name its folder with"):
        prepared(FlambySites(root=str(flamby), fold=2), tmp_path / "s")
    lists = tmp_path / "data" / "flamby_isic"
    lists.mkdir(parents=True)
    (flamby / TRUTH).rename(lists / TRUTH)
    with pytest.raises(ConfigError, match=f"lack {TRUTH}; name its folder with --set simulation.lists=DIR"):
        prepared(FlambySites(root=str(flamby), lists=str(flamby)), tmp_path / "s")
    monkeypatch.setenv("SUTURE_DATA", str(tmp_path / "data"))
    for path in flamby.glob("train_*.csv"):
        path.rename(lists / path.name)
    assert list(prepared(FlambySites(root=str(flamby)), tmp_path / "s"))[:2] == ["centre-0", "centre-1"]


def write_tones(folder: Path, every: int = 5) -> Path:
    """Every fifth lesion is on dark skin; the images of centre 2 have no tone."""
    lines = ["image,skin_tone"]
    for centre in (0, 1):
        for i in range(CENTRES[centre]):
            lines.append(f"ISIC_{centre}{i:06d},{'light' if i // 2 % every else 'dark'}")
    (folder / "tones.csv").write_text("\n".join(lines) + "\n")
    return folder / "tones.csv"


def attributes(config: SiteConfig) -> list[str]:
    assert config.data.attribute_column == "attribute"
    with config.data.table.open(newline="") as file:
        return [row["attribute"] for row in csv.DictReader(file)]


def test_clients_of_different_skin_tones(flamby: Path, tmp_path: Path) -> None:
    tones = write_tones(tmp_path, every=4)
    simulation = AttributeSites(tones=str(tones), root=str(flamby), split="images", validation="sites")
    configs = prepared(simulation, tmp_path / "s")
    found = tables(configs)
    server = found.pop("server")
    assert list(found) == ["isic-0", "isic-1", "isic-2", "isic-3"]
    assert {t.labels for t in (server, *found.values())} == {LABELS}
    assert sum(map(len, found.values())) + len(server) == 192 + 160
    shares = {name: np.mean([tone == "dark" for tone in attributes(configs[name])]) for name in found}
    assert shares["isic-3"] > 0.8
    assert max(shares[f"isic-{i}"] for i in range(3)) < 0.2
    with tones.open(newline="") as file:
        tone_of = {f"{row['image']}.jpg": row["skin_tone"] for row in csv.DictReader(file)}
    assert attributes(configs["server"]) == [tone_of[image] for image in server.images]
    with pytest.raises(ConfigError, match=r"skin tones with --set simulation"):
        prepared(AttributeSites(root=str(flamby)), tmp_path / "t")


@pytest.mark.complete
@pytest.mark.data
def test_the_real_centres_that_have_images(data_root: Path, tmp_path: Path) -> None:
    found = tables(prepared(FlambySites(split="lesions", validation="sites"), tmp_path / "s"))
    server = found.pop("server")
    assert list(found) == ["centre-1", "centre-2", "centre-3", "centre-5"]
    assert len(server) + sum(map(len, found.values())) == 8012
    seen = {name: int((t.of("train").y.sum(axis=0) > 0).sum()) for name, t in found.items()}
    assert seen == {"centre-1": 6, "centre-2": 8, "centre-3": 8, "centre-5": 6}
    # Two lesions were seen at two centres; what is tested trains at none.
    assert not set(server.patients) & {p for t in found.values() for p in t.patients}
    assert (server.y.sum(axis=0) > 0).all()
    with pytest.raises(ConfigError, match="none of the images that fold 1 tests with"):
        prepared(FlambySites(), tmp_path / "t")
    assert Counter(server.split) == {"test": len(server)}
