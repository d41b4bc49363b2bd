"""How many pseudo-labels are right: counted at a simulated site, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parties import METHOD, lines, run

from official import write_nih
from one_step import equal
from rounds import reply_of
from suture.core.labels import LabelSet
from suture.data.batch import Samples
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import load_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.table import Table
from suture.execution.job import Job, with_settings
from suture.execution.run import run_job
from suture.execution.sites import write_site
from suture.federation.site.trainer import DIAGNOSTICS_FILE, Diagnostics
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, unpack
from suture_papers.chest_xrays.chest_sites import NihSites
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import Teaching

LABELS = LabelSet(("Edema", "Mass"))
NAMES = ("0.png", "1.png", "2.png", "3.png")
TRUTH = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=np.float32)

LSM = FedLSM(
    local=LocalTraining(lr=1e-2, iterations=3, batch_size=8),
    teaching=Teaching(start_round=1, positive=0.0, negative=0.0),
)
"""Every guess of the teacher is a positive pseudo-label: 3 steps of 8 - 4 images without the mixtures."""


def diagnostics(folder: Path, order: list[int]) -> Diagnostics:
    """Of a site that knows Edema; the truth has its images in some other order."""
    people = tuple(f"p{i}" for i in range(4))
    table = Table(LABELS, NAMES, people, TRUTH, ("train",) * 4, folder / "images").rows(np.array(order))
    truth = write_site(folder, table, LABELS, "truth.csv")
    own = LabelSet(("Edema",))
    data = HospitalConfig(
        root=table.root, table=write_site(folder, table, own), labels=own.names, truth=truth
    )
    train = Samples({}, torch.from_numpy(TRUTH[:, :1]), people, NAMES)
    return Diagnostics("a", SiteConfig(data=data), train, folder / "state")


def guesses(*rows: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(rows) == 1


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_counts_by_hand_whatever_the_order_of_the_truth(order: list[int], tmp_path: Path) -> None:
    """Edema is true of images 0 and 1, Mass of 1 and 3; columns are those of the model."""
    for labels, swap in ((LABELS, 1), (LabelSet(("Mass", "Edema")), -1)):
        watch = diagnostics(tmp_path / str(swap), order).watching(labels)
        assert watch.observe is not None
        watch.observe(torch.tensor([0, 2]), guesses((1, 0)[::swap], (0, 1)[::swap]))  # Mass of 2 is wrong
        watch.observe(torch.tensor([3, 1, 1]), guesses((0, 1)[::swap], (1, 1), (1, 0)[::swap]))  # drawn twice
        watch.write(1)
        found = {"Edema": {"made": 3, "right": 3}, "Mass": {"made": 3, "right": 2}}
        assert lines(tmp_path / str(swap) / "state" / DIAGNOSTICS_FILE) == [
            {"site": "a", "round": 1, "classes": found}
        ]


def test_each_round_is_counted_by_itself_and_one_done_again_replaces_its_line(tmp_path: Path) -> None:
    record = diagnostics(tmp_path, [0, 1, 2, 3])

    def round_(number: int, row: int) -> None:
        watch = record.watching(LABELS)
        assert watch.observe is not None
        watch.observe(torch.tensor([row]), guesses((1, 0)))
        watch.write(number)

    def recorded() -> list[tuple[int, int]]:
        path = tmp_path / "state" / DIAGNOSTICS_FILE
        return [(line["round"], line["classes"]["Edema"]["right"]) for line in lines(path)]

    for number, row in ((1, 0), (2, 2), (3, 1)):
        round_(number, row)
    assert recorded() == [(1, 1), (2, 0), (3, 1)]
    round_(2, 1)
    assert recorded() == [(1, 1), (2, 1)]
    round_(3, 3)
    assert recorded() == [(1, 1), (2, 1), (3, 0)]


def test_figures_of_each_class_are_written_down_as_they_are_told(tmp_path: Path) -> None:
    """Without pseudo-labels no truth is read, and a round without figures leaves no line."""
    data = HospitalConfig(root=tmp_path, table=tmp_path / "no.csv", truth=tmp_path / "no.csv")
    record = Diagnostics("a", SiteConfig(data=data), None, tmp_path / "state")
    record.watching(LABELS).write(1)
    assert not (tmp_path / "state").exists()
    watch = record.watching(LABELS)
    assert watch.observe is None
    watch.record({"images": torch.tensor([3, 0]), "divergence": torch.tensor([0.5, 0.0])})
    watch.write(2)
    figures = {"images": {"Edema": 3, "Mass": 0}, "divergence": {"Edema": 0.5, "Mass": 0.0}}
    assert lines(tmp_path / "state" / DIAGNOSTICS_FILE) == [
        {"site": "a", "round": 2, "classes": {}, "figures": figures}
    ]


# A whole federation


def with_truth(federation: Any) -> Any:
    """The federation with a truth beside each site's table: every image has every finding but Hernia."""
    every = LabelSet(("Fibrosis", "Hernia", "Mass", "Nodule"))
    for name, config in federation.configs.items():
        table = load_table(config.data)
        y = np.tile(np.array([1, 0, 1, 1], dtype=np.float32), (len(table), 1))
        full = Table(every, table.images, table.patients, y, table.split, table.root)
        truth = write_site(config.data.table.parent, full, every, "truth.csv")
        data = config.data.model_copy(update={"truth": truth})
        federation.configs[name] = config.model_copy(update={"data": data})
    return federation


@pytest.mark.complete
def test_watching_writes_what_was_guessed_changes_nothing_and_nothing_of_it_leaves(tiny: Any) -> None:
    """Every message of a site is the same with and without a truth, but for the time it took.

    Four images in each of three steps: 12 guesses for each class that a site does not know.
    """
    answers: dict[str, list[Packed]] = {"plain": [], "watched": []}
    for out, answered in answers.items():
        federation = tiny(LSM) if out == "plain" else with_truth(tiny(LSM))

        def keep(site: str, task: TaskData, answer: Packed, kept: list[Packed] = answered) -> Packed:
            kept.append(answer)
            return answer

        run(federation, out, keep)
        assert bool(list(federation.folder.glob(f"{out}/**/{DIAGNOSTICS_FILE}"))) == (out == "watched")
    assert len(answers["plain"]) == 3 * 5  # handshake, two rounds, validation, test
    for one, two in zip(*answers.values(), strict=True):
        assert one.header | {"ledger": None} == two.header | {"ledger": None}  # it is salted
        assert equal(one.tensors, two.tensors)
    update = unpack(answers["watched"][3])
    assert isinstance(update, Update)
    assert update.scalars == {"pseudo_positive": 24, "pseudo_negative": 0}
    right, wrong = {"made": 12, "right": 12}, {"made": 12, "right": 0}
    unknown = {
        "alpha": {"Fibrosis": right, "Hernia": wrong},
        "beta": {"Fibrosis": right, "Mass": right},
        "gamma": {"Hernia": wrong},
    }
    for site, classes in unknown.items():
        found = lines(federation.folder / "watched" / "sites" / site / DIAGNOSTICS_FILE)
        assert found == [{"site": site, "round": n, "classes": classes} for n in (1, 2)]


@pytest.mark.complete
def test_a_method_that_guesses_nothing_needs_no_truth(tiny: Any) -> None:
    federation = with_truth(tiny(METHOD, rounds=1))
    for config in federation.configs.values():
        config.data.truth.unlink()
    federation.run()
    assert not list(federation.folder.rglob(DIAGNOSTICS_FILE))


def test_the_truth_is_not_what_a_site_trains_on(tiny: Any) -> None:
    """Its own table is; it knows its own classes."""
    info = reply_of(with_truth(tiny(LSM)).sites()["alpha"], TaskData("handshake"))
    assert info.labels == ("Mass", "Nodule")
    assert min(min(counts) for counts in info.counts.values()) > 0  # the truth has no image without a mass


@pytest.mark.complete
def test_a_simulations_report_shows_what_was_right(tmp_path: Path) -> None:
    made = Job(
        name="small",
        title="disjoint findings",
        method=LSM,
        model=ModelSpec("cnn", size=16),
        rounds=2,
        simulation=NihSites(root=str(write_nih(tmp_path / "nih")), classes="disjoint"),
    )
    report = run_job(made, "local", tmp_path / "r") / "report.html"
    found = lines(tmp_path / "r" / DIAGNOSTICS_FILE)
    assert [(line["site"], line["round"]) for line in found] == [
        (site, number) for site in ("site-1", "site-2") for number in (1, 2)
    ]
    for line in found:
        config = load_site_config(tmp_path / "r" / "sites" / line["site"] / "suture.toml")
        assert not set(line["classes"]) & set(load_table(config.data).labels)
        assert [counts["made"] for counts in line["classes"].values()] == [12] * 7
    right = sum(c["right"] for line in found[:2] for c in line["classes"].values())
    assert right > 0
    # 2 rounds, 7 classes, 12 images
    assert f'<td class="num">168</td><td class="num">{right}</td>' in report.read_text()
    run_job(with_settings(made, ["rounds=3"]), "local", tmp_path / "r", resume=True)
    assert [line["round"] for line in lines(tmp_path / "r" / DIAGNOSTICS_FILE)] == [1, 2, 3] * 2
