"""suture.execution.partition: sites out of a pooled data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet, canonical, union
from suture.data.readers import load_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.table import Table
from suture.execution.partition import (
    assigned_classes,
    class_lists,
    client_classes,
    partition_table,
    patient_blocks,
    subset,
)
from suture.execution.sites import TEXT, write_site
from suture_papers.chest_xrays.nih import LABELS, NihConfig
from suture_papers.skin_lesions.isic import LABELS as ISIC


def pooled(abnormal: int, none: int, labels: LabelSet = LABELS) -> Table:
    """Two images per patient, the second of an abnormal one with every finding; a fifth is for testing."""
    n = abnormal + none
    y = np.zeros((2 * n, len(labels)), dtype=np.float32)
    y[1 : 2 * abnormal : 2] = 1
    patients = tuple(f"p{i // 2}" for i in range(2 * n))
    images = tuple(f"{i}.png" for i in range(2 * n))
    parts = ("train", "train", "train", "validation", "test")
    return Table(
        labels, images, patients, y, tuple(parts[i // 2 % 5] for i in range(2 * n)), Path("images.tar")
    )


@given(st.integers(1, 6), st.integers(6, 40), st.integers(6, 40), st.integers(0, 3))
def test_blocks_are_equal_and_apart(k: int, abnormal: int, none: int, seed: int) -> None:
    blocks = patient_blocks(pooled(abnormal, none), k, seed)
    everyone = [set(block.patients) for block in blocks]
    assert len(set().union(*everyone)) == sum(map(len, everyone))
    for block, patients in zip(blocks, everyone, strict=True):
        assert len(patients) == abnormal // k + none // k
        assert len({p for p in patients if int(p[1:]) < abnormal}) == abnormal // k
        assert len(block) == 2 * len(patients)


def test_too_few_patients_are_told() -> None:
    with pytest.raises(
        DataError,
        match=r"images.tar: only 3 patients of the split test and train.* 4 sites .* at most 3",
    ):
        patient_blocks(pooled(3, 10), 4, seed=0)


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


@pytest.mark.parametrize("shared", [0, 1, 2, 4, 8, 12, 14])
def test_four_clients_share_as_many_classes_as_told(shared: int) -> None:
    clients = client_classes(4, shared)
    assert len(clients) == 4
    assert len(set.intersection(*(set(c) for c in clients))) == shared


def test_only_published_experiments_have_lists() -> None:
    with pytest.raises(ConfigError, match="unknown number of clients '7'"):
        client_classes(7)
    with pytest.raises(ConfigError, match="unknown number of shared classes '3'"):
        client_classes(4, 3)


def test_nih_becomes_two_sites_and_a_server() -> None:
    table = pooled(40, 60)
    sites = partition_table(table, client_classes(2), seed=0)
    assert list(sites) == ["site-1", "site-2", "server"]
    assert [len(t.labels) for t in sites.values()] == [11, 7, 14]
    assert set(union(t.labels for t in (sites["site-1"], sites["site-2"]))) == set(LABELS)
    assert set(sites["server"].split) == {"test"}
    assert set(sites["site-1"].split) == set(sites["site-2"].split) == {"train", "validation"}
    everyone = [set(t.patients) for t in sites.values()]
    assert len(set().union(*everyone)) == sum(map(len, everyone)) == 100
    assert not np.isnan(sites["site-1"].y).any()


def test_a_written_site_is_an_ordinary_hospital(tmp_path: Path) -> None:
    own = LabelSet(("Nodule", "Mass"))
    table = pooled(2, 1).rows(np.arange(4))
    table.y[0, LABELS.index("Mass")] = np.nan
    path = write_site(tmp_path / "alpha", table, own)
    assert path.read_text() == (
        "image,patient,split,Nodule,Mass\n"
        "0.png,p0,train,0,\n"
        "1.png,p0,train,1,1\n"
        "2.png,p1,train,0,0\n"
        "3.png,p1,train,1,1\n"
    )
    read = load_table(HospitalConfig(root=table.root, table=path))
    assert (read.labels, read.images, read.patients, read.split) == (
        own,
        *(table.images, table.patients, table.split),
    )
    np.testing.assert_array_equal(read.y, table.restrict(own).y)


@pytest.mark.data
def test_real_nih_becomes_ten_sites(data_root: Path) -> None:
    folder = data_root / "nih_cxr14_64px"
    table = load_table(
        NihConfig(
            split="patients",
            root=folder / "images.tar",
            table=folder / "Data_Entry_2017_v2020.csv",
        )
    )
    sites = partition_table(table, client_classes(10))
    assert len(sites) == 11
    patients = {len(set(t.patients)) for name, t in sites.items() if name != "server"}
    assert len(patients) == 1


def test_class_lists_of_every_kind() -> None:
    disjoint = class_lists("disjoint", LABELS, 2)
    assert [len(c) for c in disjoint] == [7, 7]
    assert not set(disjoint[0]) & set(disjoint[1])
    assert set(disjoint[0]) | set(disjoint[1]) == set(LABELS)
    assert disjoint == class_lists("disjoint", LABELS, 2)
    assert disjoint != class_lists("disjoint", LABELS, 2, seed=1)
    assert [c.names for c in class_lists("single", LABELS, 2)] == [(name,) for name in LABELS]
    assert class_lists("all", LABELS, 3) == (LABELS,) * 3
    assert class_lists("published", LABELS, 4, shared=8) == client_classes(4, 8)
    with pytest.raises(ConfigError, match="set clients=4"):
        class_lists("published", LABELS, 2, shared=8)
    with pytest.raises(ConfigError, match="14 classes cannot be divided among 15 sites"):
        class_lists("disjoint", LABELS, 15)


def test_test_rows_at_every_site_are_the_servers() -> None:
    sites = partition_table(pooled(40, 60), class_lists("single", LABELS, 0), seed=0, test=True)
    assert list(sites)[:2] == ["site-01", "site-02"]
    held_out = sites.pop("server")
    for table in sites.values():
        assert table.of("test").images == held_out.images
        assert len(table.labels) == 1


@given(st.integers(1, 200), st.integers(0, 5))
def test_a_subset_has_no_more_training_images_than_asked(limit: int, seed: int) -> None:
    table = pooled(40, 60)
    part = subset(table, limit, seed)
    assert part.split.count("train") <= limit
    assert part.of("test").images == table.of("test").images
    kept = set(part.patients)
    expected = [p for p in table.patients if p in kept]
    assert list(part.patients) == expected  # whole patients
    if limit >= table.split.count("train"):
        assert part is table


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


@pytest.mark.parametrize(("clients", "size"), [(4, 3), (1, 13), (2, 15)])
def test_hands_that_cannot_hold_the_deck_are_refused(clients: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{clients} sites of {size} classes each cannot hold 14 classes"):
        assigned_classes(LABELS, clients, size)


def test_the_server_may_hold_the_validation_rows() -> None:
    table = pooled(40, 60)
    sites = partition_table(table, assigned_classes(LABELS, 8, 3), seed=0, held_out=("validation", "test"))
    server = sites.pop("server")
    assert server.split.count("validation") == table.split.count("validation") == 40
    assert server.split.count("test") == table.split.count("test") == 40
    assert len(server) == 80
    assert server.labels == LABELS
    assert {part for site in sites.values() for part in site.split} == {"train"}
    everyone = [set(site.patients) for site in (*sites.values(), server)]
    assert len(set().union(*everyone)) == sum(map(len, everyone))


def test_a_table_may_have_another_name(tmp_path: Path) -> None:
    table = pooled(2, 1).rows(np.arange(2))
    labels = write_site(tmp_path, table, LabelSet(("Mass",)))
    truth = write_site(tmp_path, table, LABELS, name="truth.csv")
    assert (labels, truth) == (tmp_path / "labels.csv", tmp_path / "truth.csv")
    assert [len(path.read_text().splitlines()[0].split(",")) for path in (labels, truth)] == [4, 17]


def test_documents_are_written_in_a_column_of_their_own(tmp_path: Path) -> None:
    texts = ('No mass,\n"clear".', "Edema.")
    table = Table(
        LabelSet(("Mass",)),
        ("1", "2"),
        ("P1", "P2"),
        np.array([[0], [np.nan]], np.float32),
        ("train", "test"),
        tmp_path,
        texts,
    )
    path = write_site(tmp_path / "alpha", table, LabelSet(("Mass",)))
    again = load_table(HospitalConfig(table=path, text_column=TEXT))
    assert again.texts == texts
    assert again.labels.names == ("Mass",)
    assert again.split == table.split
