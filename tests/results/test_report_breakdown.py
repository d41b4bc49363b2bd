"""The report's sections of common and rare classes, attributes, local models, weights and divergences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import Page, page

from example_run import LABELS, OVERALL, history_records, metrics_record, run_record, write_run
from suture.federation.server.selection import by_attribute, by_frequency, local_and_global

HEADINGS = (
    "Common and rare classes",
    "By attribute",
    "The global model and the sites' own",
    "Weight of each site",
    "Distance of each class from the prior",
)
RECALL = {label: 0.1 * i for i, label in enumerate(LABELS) if label != "Hernia"}
LIGHT = {"n": 1200, "auroc": 0.81} | OVERALL
DARK = {"n": 85, "auroc": 0.755} | OVERALL | {"balanced_accuracy": 0.441}


def shown(folder: Path, **parts: Any) -> Page:
    run = run_record() | {"label_type": "multiclass"}
    return page(write_run(folder, run, history_records(), metrics_record(OVERALL) | parts))


def test_a_plain_run_has_none_of_them(run_folder: Path) -> None:
    found = page(run_folder)
    assert not [heading for heading in HEADINGS if heading in found.text]
    assert "Recall" not in found.row("Class", "Annotated at")


def test_recall_stands_beside_the_auroc(tmp_path: Path) -> None:
    found = shown(tmp_path, recall=RECALL)
    assert found.row("Class", "Annotated at")[3:] == ["AUROC", "95 % CI", "Recall", "Positive", "Negative"]
    assert found.row("Edema", "harbour")[3:] == ["0.862", "0.827–0.894", "0.300", "98", "2,803"]
    assert found.row("Hernia", "harbour")[3:] == ["—", "—", "—", "0", "2,901"]


def test_common_and_rare_classes(tmp_path: Path) -> None:
    groups = {"head": ("Atelectasis", "Edema"), "tail": ("Hernia", "Fracture")}
    found = shown(tmp_path, recall=RECALL, long_tail=by_frequency(groups, RECALL))
    assert found.row("Head") == ["Head", "Atelectasis, Edema", "0.150"]
    assert found.row("Tail") == ["Tail", "Hernia, Fracture", "0.400"]
    assert found.row("All") == ["All", "", "0.275"]
    assert "the head has more than 700 and the tail fewer than 70" in found.text


def test_attributes(tmp_path: Path) -> None:
    found = shown(tmp_path, attributes=by_attribute({"dark": DARK, "light": LIGHT}))
    head = found.row("Attribute")
    assert head[1:] == ["Cases", "AUROC", "Accuracy", "Balanced accuracy", "Macro F1", "Macro precision"]
    assert found.row("light")[:5] == ["light", "1,200", "0.810", "0.712", "0.561"]
    assert found.row("dark")[:5] == ["dark", "85", "0.755", "0.712", "0.441"]
    assert found.row("Mean", "")[:5] == ["Mean", "", "0.782", "0.712", "0.501"]


def test_attributes_of_a_task_of_several_labels_have_the_auroc_alone(tmp_path: Path) -> None:
    parts = {"women": {"n": 700, "auroc": 0.8}, "men": {"n": 812, "auroc": None}}
    found = shown(tmp_path, attributes=by_attribute(parts))
    assert found.row("Attribute") == ["Attribute", "Cases", "AUROC"]
    assert found.row("men") == ["men", "812", "—"]


def test_the_global_model_beside_the_sites_own(tmp_path: Path) -> None:
    found = shown(
        tmp_path, local_models=local_and_global({"harbour": (LIGHT, DARK), "hillside": (DARK, DARK)})
    )
    assert found.row("Site", "Cases") == ["Site", "Cases", "AUROC", "Accuracy", "Balanced accuracy"]
    assert found.row("harbour", "1,200")[2:] == ["0.810", "0.755", "0.712", "0.712", "0.561", "0.441"]
    assert found.row("Mean", "")[2:] == ["0.782", "0.755", "0.712", "0.712", "0.501", "0.441"]


def test_weights_that_say_something_are_drawn(tmp_path: Path) -> None:
    history = history_records()
    for line in history:
        for i, site in enumerate(line["sites"].values()):
            site["weight"] = site["weight"] and (i + 1) * 10.0 / line["round"]
    text = page(write_run(tmp_path, run_record(), history)).text
    assert "Weight, per site harbour hillside st-anne" in text
    assert "Share of the sum of weights, %, per site" in text
    assert "The method's weight: the site's weight in the mean." in text


def test_a_simulation_shows_how_far_classes_are_from_the_prior(tmp_path: Path) -> None:
    figures = {"images": {"Edema": 90, "Hernia": 0}, "divergence": {"Edema": 0.5, "Hernia": 0.0}}
    lines = [{"site": "harbour", "round": 6, "classes": {}, "figures": figures}]
    found = page(write_run(tmp_path, run_record(), history_records(), None, lines))
    assert "under the model at the start of round 6" in found.text
    assert "Divergence, over images at all sites" in found.text
    assert "diagnostics.jsonl of this folder" in found.text


@pytest.mark.parametrize("evil", ["<img src=x onerror=alert(1)>"])
def test_names_become_no_markup(evil: str, tmp_path: Path) -> None:
    parts = {
        "long_tail": by_frequency({evil: (evil,)}, {evil: 0.5}),
        "attributes": by_attribute({evil: LIGHT}),
        "local_models": local_and_global({evil: (LIGHT, DARK)}),
    }
    found = shown(tmp_path, **parts)
    assert evil in found.text  # as text
    assert evil not in (tmp_path / "report.html").read_text(encoding="utf-8")
