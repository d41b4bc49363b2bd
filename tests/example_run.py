"""A run folder as a federation of three hospitals leaves it: nine classes, one of them undefined, eight
rounds, one update rejected, one site missing once."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from suture.core.files import write_json
from suture.federation.server.results import AT_SERVER, Results
from suture.federation.server.selection import across_sites
from suture.learning.decisions import operating
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Counts, Curves, histogram
from suture.protocol.decisions import Decided, DecidedClass, Decisions, DecisionSettings, Operating
from suture.protocol.messages import ClassScore, Metrics

SITES: dict[str, dict[str, Any]] = {
    "harbour": {
        "labels": ["Atelectasis", "Cardiomegaly", "Edema", "Hernia", "Pleural Effusion"],
        "n": {"train": 12480, "validation": 1560, "test": 1512},
    },
    "hillside": {
        "labels": ["Atelectasis", "Consolidation", "Lung Opacity", "Pleural Effusion", "Pneumothorax"],
        "n": {"train": 8014, "validation": 1002, "test": 987},
    },
    "st-anne": {
        "labels": ["Cardiomegaly", "Fracture", "Lung Opacity", "Pleural Effusion"],
        "n": {"train": 3127, "validation": 391, "test": 402},
    },
}
LABELS = sorted({label for site in SITES.values() for label in site["labels"]})
SCORES = {
    "Atelectasis": ClassScore(0.781, 0.762, 0.801, 512, 2389),
    "Cardiomegaly": ClassScore(0.874, 0.853, 0.893, 301, 2600),
    "Consolidation": ClassScore(0.743, 0.698, 0.786, 121, 2780),
    "Edema": ClassScore(0.862, 0.827, 0.894, 98, 2803),
    "Fracture": ClassScore(0.612, 0.471, 0.748, 14, 2887),
    "Hernia": ClassScore(None, None, None, 0, 2901),
    "Lung Opacity": ClassScore(0.716, 0.697, 0.735, 903, 1998),
    "Pleural Effusion": ClassScore(0.893, 0.880, 0.905, 744, 2157),
    "Pneumothorax": ClassScore(0.841, 0.803, 0.874, 133, 2768),
}


def run_record() -> dict[str, Any]:
    return {
        "job": "chest_surgical",
        "title": "Chest findings of three hospitals",
        "method": {
            "name": "surgical",
            "title": "Surgical Aggregation",
            "paper": "Kulkarni et al. 2023, arXiv:2301.06683",
            "hyperparameters": {"lr": 1e-4, "local_epochs": 1, "batch_size": 32, "optimizer": "adam"},
        },
        "model": {"backbone": "densenet121", "pretrained": True, "norm": "batch", "image_size": [224, 224]},
        "rounds": 8,
        "seed": 1,
        "experiment": "chest-2026-10",
        "env": "sim",
        "status": "finished",
        "error": None,
        "started": "2026-10-09T13:02:11+00:00",
        "finished": "2026-10-09T14:20:51+00:00",
        "versions": {"suture": "0.1.0", "python": "3.12.4", "torch": "2.14.0", "nvflare": "2.9.0"},
        "threads": {"server": 1, "harbour": 1, "hillside": 1, "st-anne": 1},
        "computed_on": {
            "harbour": "NVIDIA A40, bf16",
            "hillside": "cpu, float32",
            "st-anne": "NVIDIA A40, float32",
        },
        "labels": LABELS,
        "sites": SITES,
        "selected_round": 6,
        "selection": "site_loss",
        "egress": [
            {"field": field, "shape": shape, "why": why}
            for field, shape, why in (
                ("shared", "backbone: 362 tensors, 6.95 M values", "the merged backbone"),
                ("head", "[own classes, 1024 + 1]", "rows of the classes the site knows"),
                ("weight", "scalar", "the site's weight in the mean"),
                ("metrics", "loss, AUROC and counts per class", "selection and this report"),
            )
        ],
    }


def site_round(number: int, site: int) -> dict[str, Any]:
    loss = 0.30 + 0.05 * site
    record = {
        "status": "accepted",
        "reason": None,
        "weight": 1.0,
        "bytes_down": 28_100_000,
        "bytes_up": 28_050_000,
        "train_loss": loss + 0.38 * math.exp(-number / 2.5),
        "validation_loss": loss + 0.06 + 0.3 * math.exp(-number / 2.0),
        "seconds": 540.0 - 150 * site + 11 * (number % 3),
    }
    if (number, site) == (4, 2):
        record |= {
            "status": "rejected",
            "reason": "head row 'Fracture' is not finite; lower the learning rate",
        }
    if (number, site) == (7, 1):
        record |= {"status": "missing", "reason": "no answer within 900 s", "weight": None, "bytes_up": 0}
        record |= {"train_loss": None, "validation_loss": None, "seconds": None}
    return record


def history_records(rounds: int = 8) -> list[dict[str, Any]]:
    history = []
    for number in range(1, rounds + 1):
        sites = {name: site_round(number, i) for i, name in enumerate(SITES)}
        history.append(
            {
                "round": number,
                "phase": "main",
                "status": "committed",
                "seconds": 580.0 + 13 * (number % 3),
                "bytes_down": sum(s["bytes_down"] for s in sites.values()),
                "bytes_up": sum(s["bytes_up"] for s in sites.values()),
                "sites": sites,
                "validation": {
                    "loss": 0.41 + 0.3 * math.exp(-number / 2) + 0.006 * max(0, number - 6),
                    "auroc": 0.80 - 0.25 * math.exp(-number / 2.2),
                },
            }
        )
    return history


def metrics_record(overall: dict[str, float | None] | None = None) -> dict[str, Any]:
    owners = {label: tuple(s for s, v in SITES.items() if label in v["labels"]) for label in LABELS}
    at = {
        site: {
            label: ClassScore(score.auroc and round(score.auroc - 0.011 * (i - 1), 3), None, None, 1, 1)
            for label, score in SCORES.items()
            if label in SITES[site]["labels"]
        }
        for i, site in enumerate(SITES)
    }
    measured = Metrics(6, "test", 2901, None, SCORES, overall or {})
    return Results(LABELS, owners, measured, AT_SERVER, at).to_dict()


OVERALL = {
    "accuracy": 0.712,
    "balanced_accuracy": 0.561,
    "precision": 0.583,
    "recall": 0.561,
    "f1": 0.569,
}


def with_pseudo_labels(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rounds of a method that labels images itself; no site gives Hernia weight."""
    for line in history:
        for i, (name, site) in enumerate(line["sites"].items()):
            if site["status"] == "missing":
                continue
            grown = 1 - math.exp(-line["round"] / 3)
            site["scalars"] = {
                "pseudo_positive": 400.0 * (i + 1) * grown,
                "pseudo_negative": 9000.0 / (i + 1) * grown,
            }
            site["rows"] = {
                label: 0.0 if label == "Hernia" else 1000.0 if label in SITES[name]["labels"] else 150.0 * i
                for label in LABELS
            }
    return history


def diagnostic_records(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pseudo-labels of those rounds against the truth: 100 a round of each class the site lacks."""
    return [
        {
            "site": name,
            "round": line["round"],
            "classes": {
                label: {"made": 0 if label == "Hernia" else 100, "right": 0 if label == "Hernia" else 60 + i}
                for i, label in enumerate(LABELS)
                if label not in SITES[name]["labels"]
            },
        }
        for line in history
        for name, site in line["sites"].items()
        if "scalars" in site
    ]


def write_run(
    folder: Path,
    run: dict[str, Any],
    history: list[dict[str, Any]] | None = None,
    metrics: dict[str, Any] | None = None,
    diagnostics: list[dict[str, Any]] | None = None,
) -> Path:
    write_json(folder / "run.json", run)
    if history is not None:
        _write_lines(folder / "history.jsonl", history)
    if diagnostics is not None:
        _write_lines(folder / "diagnostics.jsonl", diagnostics)
    if metrics is not None:
        write_json(folder / "metrics.json", metrics)
    return folder


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


MANY = [
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion", "Emphysema", "Fibrosis", "Hernia",
    "Infiltration", "Mass", "Nodule", "Pleural Thickening", "Pneumonia", "Enlarged Cardiomediastinum",
]  # fmt: skip


def write_large_run(folder: Path) -> Path:
    """A run of 14 classes at 8 sites with long names; without test data at the server."""
    names = [f"university-hospital-{town}" for town in ("north", "south", "east", "west")] + list("abcd")
    sites: dict[str, dict[str, Any]] = {
        site: {
            "labels": [name for k, name in enumerate(MANY) if (k + i) % 3 == 0],
            "n": {"train": 90_000 - 9_000 * i, "validation": 9_000, "test": 9_000},
        }
        for i, site in enumerate(names)
    }
    at = {
        site: {
            name: ClassScore(0.95 - 0.02 * k - 0.01 * i, None, None, 40 + 3 * k, 800 + 10 * i)
            for k, name in enumerate(MANY)
            if name in sites[site]["labels"]
        }
        for i, site in enumerate(names)
    }
    owners = {name: [s for s in names if name in sites[s]["labels"]] for name in MANY}
    history = [{**line, "sites": _of_many(line, names)} for line in history_records()]
    measured = Metrics(6, "test", 72_000, None, across_sites(at))
    metrics = Results(MANY, owners, measured, "sites' test data", at).to_dict()
    return write_run(folder, {**run_record(), "labels": MANY, "sites": sites}, history, metrics)


def _of_many(line: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: site_round(line["round"], i) for i, name in enumerate(names)}


DECIDED = ("Nodule", "Pneumothorax")


def write_decided_run(folder: Path) -> Path:
    """A run of 34 sites that decide two classes; two have too few images for curves of the first."""
    rng = np.random.default_rng(0)
    names = [f"hospital-{k:02}" for k in range(34)]
    counts = {
        site: {name: _pair(rng, 7 if k < 2 and name == "Nodule" else 30 + 3 * k) for name in DECIDED}
        for k, site in enumerate(names)
    }
    settings = DecisionSettings()
    together = {name: Curves.of([found[name] for found in counts.values()]) for name in DECIDED}
    alone = {site: {n: Curves.of([pair]) for n, pair in found.items()} for site, found in counts.items()}
    decisions = Decisions(settings, _operating(together), {s: _operating(own) for s, own in alone.items()})
    drawn = {
        site: {
            name: one
            for name, c in own.items()
            if (one := diagrams(c, decisions.of(site, name), "sensitivity"))
        }
        for site, own in alone.items()
    }
    at = Decided(0.85, 0.8)
    measured = DecidedClass(at, at, at, (0.1, 0.05), (0.1, 0.05))
    record = asdict(decisions) | {
        "measured": {site: dict.fromkeys(DECIDED, asdict(measured)) for site in names},
        "counts": {site: dict.fromkeys(DECIDED, (30, 120)) for site in names},
        "diagrams": {
            n: asdict(d)
            for n, c in together.items()
            if (d := diagrams(c, decisions.of(None, n), "sensitivity"))
        },
        "site_diagrams": {site: {n: asdict(d) for n, d in own.items()} for site, own in drawn.items()},
    }
    scores = {name: ClassScore(0.9, 0.85, 0.95, 900, 4000) for name in DECIDED}
    figures = Metrics(6, "test", 4900, None, scores)
    metrics = Results(DECIDED, dict.fromkeys(DECIDED, names), figures, AT_SERVER, {}).to_dict()
    sites = {
        site: {"labels": list(DECIDED), "n": {"train": 900, "validation": 150, "test": 150}} for site in names
    }
    run = {**run_record(), "labels": list(DECIDED), "sites": sites}
    return write_run(folder, run, metrics=metrics | {"decisions": record})


def _pair(rng: np.random.Generator, positives: int) -> tuple[Counts, Counts]:
    """Counts of images of as many patients, in cells of five, as real sites send them."""
    scores = rng.normal(1, 1.5, positives), rng.normal(-1.5, 1.5, 120)
    found = [histogram(one, np.arange(len(one)), 5) for one in scores]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def _operating(curves: Mapping[str, Curves]) -> dict[str, Operating]:
    return {name: one for name, c in curves.items() if (one := operating(c, DecisionSettings()))}
