"""suture_papers.partition: sites out of a pooled data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesions import ROWS, table, together
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet, canonical
from suture.data.readers import load_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import classes
from suture.data.table import SPLITS, Table
from suture.execution.sites import TEXT, write_site
from suture_papers.chest_xrays.nih import LABELS
from suture_papers.partition import (
    assigned_classes,
    by_attribute,
    class_lists,
    client_classes,
    dirichlet,
    iid,
    partition_table,
    patient_blocks,
    subset,
)
from suture_papers.skin_lesions.isic import LABELS as ISIC
from world import refused


def pooled(abnormal: int, none: int, labels: LabelSet = LABELS) -> Table:
    """Two images per patient, the second of an abnormal one with every finding; a fifth is for testing."""
    n = 2 * (abnormal + none)
    y = np.zeros((n, len(labels)), dtype=np.float32)
    y[1 : 2 * abnormal : 2] = 1
    parts = ("train", "train", "train", "validation", "test")
    images, patients = (
        tuple(form(i) for i in range(n)) for form in ("{}.png".format, lambda i: f"p{i // 2}")
    )
    return Table(labels, images, patients, y, tuple(parts[i // 2 % 5] for i in range(n)), Path("images.tar"))


def patients_apart(sites: list[Table]) -> set[str]:
    """The patients of all sites, none of whom is at two."""
    everyone = [set(site.patients) for site in sites]
    assert len(set().union(*everyone)) == sum(map(len, everyone))
    return set().union(*everyone)


@given(st.integers(1, 6), st.integers(6, 40), st.integers(6, 40), st.integers(0, 3))
def test_blocks_are_equal_and_apart(k: int, abnormal: int, none: int, seed: int) -> None:
    blocks = patient_blocks(pooled(abnormal, none), k, seed)
    patients_apart(blocks)
    for block in blocks:
        patients = set(block.patients)
        assert len(patients) == abnormal // k + none // k
        assert len({p for p in patients if int(p[1:]) < abnormal}) == abnormal // k
        assert len(block) == 2 * len(patients)


def test_the_published_class_lists() -> None:
    sizes = {k: [len(c) for c in client_classes(k)] for k in (2, 3, 4, 5, 6, 8, 10)}
    assert sizes == {
        2: [11, 7],
        3: [12, 8, 8],
        4: [7, 9, 8, 10],
        5: [8, 7, 7, 7, 6],
        6: [6, 5, 4, 6, 7, 3],
        8: [5, 5, 3, 6, 5, 3, 4, 3],
        10: [5, 5, 3, 6, 5, 3, 3, 3, 3, 3],
    }
    first, second = client_classes(2)
    assert set(first) & set(second) == {"Cardiomegaly", "Emphysema", "Mass", "Pleural Effusion"}
    for shared in (0, 1, 2, 4, 8, 12, 14):
        clients = client_classes(4, shared)
        assert len(clients) == 4
        assert len(set.intersection(*(set(c) for c in clients))) == shared


def test_what_cannot_be_divided_is_refused() -> None:
    three = table([(i, 0) for i in range(3)], ("train",))
    for divide, named, by in (
        (lambda: patient_blocks(pooled(3, 10), 4, seed=0), ["images.tar", 3, "test and train", 4], DataError),
        (lambda: client_classes(7), ["'7'"], ConfigError),
        (lambda: client_classes(4, 3), ["'3'"], ConfigError),
        (lambda: class_lists("published", LABELS, 2, shared=8), ["clients=4"], ConfigError),
        (lambda: class_lists("disjoint", LABELS, 15), [14, 15], ConfigError),
        *(
            (lambda n=n, k=k: assigned_classes(LABELS, n, k), [n, k, 14], ConfigError)
            for n, k in ((4, 3), (1, 13), (2, 15))
        ),
        (lambda: iid(three, 4, seed=0), ["images.tar", 4], DataError),
        (lambda: dirichlet(three, 4, 0.5, seed=0), ["Dir(0.5)", 4], DataError),
        (lambda: by_attribute(three, ["light"] * 3, 2, 0.9, seed=0), ["light"], DataError),
    ):
        with refused(*named, by=by):
            divide()


def test_the_server_may_hold_the_validation_rows_and_each_site_the_test_rows() -> None:
    whole = pooled(40, 60)
    sites = partition_table(whole, assigned_classes(LABELS, 8, 3), seed=0, held_out=("validation", "test"))
    patients_apart(list(sites.values()))
    server = sites.pop("server")
    assert [server.split.count(part) for part in SPLITS] == [0, 40, 40]
    assert server.labels == LABELS
    assert {part for site in sites.values() for part in site.split} == {"train"}
    sites = partition_table(whole, class_lists("single", LABELS, 0), seed=0, test=True)
    assert list(sites)[:2] == ["site-01", "site-02"]
    server = sites.pop("server")
    for site in sites.values():
        assert site.of("test").images == server.images
        assert len(site.labels) == 1


def test_a_written_site_is_an_ordinary_hospital(tmp_path: Path) -> None:
    own = LabelSet(("Nodule", "Mass"))
    whole = pooled(2, 1).rows(np.arange(4))
    whole.y[0, LABELS.index("Mass")] = np.nan
    path = write_site(tmp_path / "alpha", whole, own)
    rows = "0.png,p0,train,0,\n1.png,p0,train,1,1\n2.png,p1,train,0,0\n3.png,p1,train,1,1\n"
    assert path.read_text() == f"image,patient,split,Nodule,Mass\n{rows}"
    read = load_table(HospitalConfig(root=whole.root, table=path))
    assert (read.labels, read.images, read.patients, read.split) == (
        own,
        *(whole.images, whole.patients, whole.split),
    )
    np.testing.assert_array_equal(read.y, whole.restrict(own).y)
    truth = write_site(tmp_path / "alpha", whole, LABELS, name="truth.csv")
    assert (path.name, truth) == ("labels.csv", tmp_path / "alpha" / "truth.csv")
    assert len(truth.read_text().splitlines()[0].split(",")) == 17


def test_documents_are_written_in_a_column_of_their_own(tmp_path: Path) -> None:
    texts, y = ('No mass,\n"clear".', "Edema."), np.array([[0], [np.nan]], np.float32)
    mass = LabelSet(("Mass",))
    whole = Table(mass, ("1", "2"), ("P1", "P2"), y, ("train", "test"), tmp_path, texts)
    path = write_site(tmp_path / "alpha", whole, mass)
    again = load_table(HospitalConfig(table=path, text_column=TEXT))
    assert (again.texts, again.labels.names, again.split) == (texts, ("Mass",), whole.split)


def test_class_lists_of_every_kind() -> None:
    disjoint = class_lists("disjoint", LABELS, 2)
    assert [len(c) for c in disjoint] == [7, 7]
    assert set(disjoint[0]) | set(disjoint[1]) == set(LABELS)
    assert disjoint == class_lists("disjoint", LABELS, 2)
    assert disjoint != class_lists("disjoint", LABELS, 2, seed=1)
    assert [c.names for c in class_lists("single", LABELS, 2)] == [(name,) for name in LABELS]
    assert class_lists("all", LABELS, 3) == (LABELS,) * 3
    assert class_lists("published", LABELS, 4, shared=8) == client_classes(4, 8)


def test_round_robin_classes_are_the_papers() -> None:
    """FedLSM (Deng et al., MICCAI 2023), Tables 5 and 6."""
    assert [set(hand) for hand in assigned_classes(LABELS, 8, 3)] == [
        {"Consolidation", "Edema", "Pneumothorax"},
        {"Pneumonia", "Fibrosis", "Hernia"},
        {"Mass", "Pleural Thickening", "Infiltration"},
        {"Pleural Effusion", "Atelectasis", "Cardiomegaly"},
        {"Emphysema", "Nodule", "Pneumothorax"},
        {"Nodule", "Pleural Thickening", "Fibrosis"},
        {"Cardiomegaly", "Hernia", "Infiltration"},
        {"Consolidation", "Hernia", "Infiltration"},
    ]
    skin = [
        {"NV", "BKL", "VASC"},
        {"NV", "BCC", "DF"},
        {"MEL", "BCC", "DF"},
        {"BCC", "AKIEC", "DF"},
        {"BCC", "AKIEC", "BKL"},
    ]
    hands = assigned_classes(ISIC, 5, 3)
    assert [set(hand) for hand in hands] == [{canonical(name) for name in hand} for hand in skin]
    assert {hand.label_type for hand in hands} == {"multiclass"}
    assert class_lists("round_robin", ISIC, 5, seed=7) == hands  # the seed is that of the patients
    assert class_lists("round_robin", LABELS, 8) == assigned_classes(LABELS, 8, 3)


@given(st.data())
def test_every_class_is_assigned_and_every_list_is_full(data: st.DataObject) -> None:
    deck = LabelSet(tuple("ABCDEFGH"[: data.draw(st.integers(1, 8))]))
    size = data.draw(st.integers(1, len(deck)))
    clients = data.draw(st.integers(-(-len(deck) // size), 8))
    seed = data.draw(st.integers(0, 99))
    hands = assigned_classes(deck, clients, size, seed)
    assert len(hands) == clients
    assert {name for hand in hands for name in hand} == set(deck)
    for hand in hands:
        assert len(hand) == size
        assert list(hand) == sorted(hand)  # in the order of the deck
    assert hands == assigned_classes(deck, clients, size, seed)


@given(st.integers(1, 200), st.integers(0, 5))
def test_a_subset_has_no_more_training_images_than_asked(limit: int, seed: int) -> None:
    whole = pooled(40, 60)
    part = subset(whole, limit, seed)
    assert part.split.count("train") <= limit
    assert part.of("test").images == whole.of("test").images
    kept = set(part.patients)
    assert list(part.patients) == [p for p in whole.patients if p in kept]  # whole patients
    if limit >= whole.split.count("train"):
        assert part is whole


KEYS = [(kind, validation) for kind in range(4) for validation in (False, True)]


@given(ROWS, st.integers(1, 8), st.integers(0, 5))
def test_sites_that_are_alike(rows: list[tuple[int, int]], k: int, seed: int) -> None:
    rows = [(0, 0), *rows]
    whole = table(rows)
    k = min(k, sum(lesion % 3 < 2 for lesion in {lesion for lesion, _ in rows}))
    site = iid(whole, k, seed)
    assert len(site) == len(whole)
    assert set(site[np.array(whole.split) == "train"].tolist()) == set(range(k))
    assert together(whole.patients, site)
    first = {lesion: min(kind % 4 for other, kind in rows if other == lesion) for lesion, _ in rows}
    of = dict(zip(whole.patients, site.tolist(), strict=True))
    for own in (list(first), *([x for x in first if (first[x], x % 3 == 2) == key] for key in KEYS)):
        counts = np.bincount([of[f"L{lesion}"] for lesion in own], minlength=k)
        assert counts.max() - counts.min() <= 1


@given(ROWS, st.integers(1, 4), st.sampled_from([0.3, 0.5, 5.0]), st.integers(0, 5))
def test_sites_that_are_unlike(rows: list[tuple[int, int]], k: int, alpha: float, seed: int) -> None:
    rows = [(0, 0), *rows]
    whole = table(rows)
    k = min(k, 1 + sum(lesion % 3 < 2 for lesion in {lesion for lesion, _ in rows}) // 5)
    site = dirichlet(whole, k, alpha, seed)
    assert len(site) == len(whole)
    assert set(site[np.array(whole.split) == "train"].tolist()) == set(range(k))
    assert together(whole.patients, site)
    np.testing.assert_array_equal(site, dirichlet(whole, k, alpha, seed))


def test_a_larger_alpha_is_more_alike_and_validation_follows_training() -> None:
    whole = table([(i, i % 3) for i in range(3000)], ("train",))
    for alpha, low, high in ((0.1, 0.5, 1.0), (1000.0, 0.0, 0.05)):
        site = dirichlet(whole, 4, alpha, seed=3)
        shares = np.array([np.bincount(site[classes(whole.y) == k], minlength=4) / 1000 for k in range(3)])
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        assert low <= float((shares.max(axis=1) - 0.25).max()) <= high
    whole = table([(i, i % 3) for i in range(3000)], ("train", "validation"))
    site = dirichlet(whole, 4, 0.5, seed=3)
    for kind in range(3):
        of = [site[(classes(whole.y) == kind) & (np.array(whole.split) == part)] for part in SPLITS[:2]]
        train, validation = (np.bincount(rows, minlength=4) for rows in of)
        assert abs(train - validation).max() <= 1


@given(st.integers(40, 80), st.integers(120, 300), st.integers(2, 5), st.integers(0, 3))
def test_the_last_site_is_dominated_by_the_rarer_attribute(few: int, many: int, k: int, seed: int) -> None:
    whole = table([(i, i % 3) for i in range(few + many)], ("train",))
    tone = ["dark"] * few + ["light"] * many
    site = by_attribute(whole, tone, k, 0.9, seed)
    dark = np.array(tone) == "dark"
    last = site == k - 1
    assert dark[last].mean() == pytest.approx(0.9, abs=0.06)
    assert last[dark].mean() == pytest.approx(0.9, abs=0.06)
    for other in range(k - 1):
        assert dark[site == other].mean() < 0.2
        # Each of three classes of two attributes is cut by itself, with at most one too many or too few.
        assert abs(int((site == other).sum()) - int((~last).sum()) / (k - 1)) <= 6


def test_a_lesion_of_two_attributes_counts_for_the_rarer() -> None:
    whole = table([(i // 2, 0) for i in range(100)], ("train",))
    tone = ["dark" if i % 2 and i < 60 else "light" for i in range(100)]
    site = by_attribute(whole, tone, 2, 1.0, seed=0)
    assert together(whole.patients, site)
    assert site.tolist() == [1] * 60 + [0] * 40
