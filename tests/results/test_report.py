"""report.html: the figures and rows of a run of every kind, and nothing of it as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from example_run import (
    LABELS,
    OVERALL,
    SITES,
    diagnostic_records,
    history_records,
    metrics_record,
    run_record,
    with_pseudo_labels,
    write_decided_run,
    write_run,
)
from suture.core.errors import DiskError
from suture.core.files import write_json
from suture.data.batch import Augmentation
from suture.federation.server.selection import by_attribute, by_frequency, local_and_global
from suture.methods import method_class
from suture.models import ModelSpec
from suture.protocol.records import Run, parse
from suture_results.card import try_card
from suture_results.report import configuration, render_report, try_report, write_report

EVIL = "<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The visible text, the tables and the balance of the tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "hr"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "head" in self.open:
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] = " ".join((self.rows[-1][-1] + data).split())

    def row(self, *start: str) -> list[str]:
        """The rest of the one row that starts with these cells."""
        (found,) = [row for row in self.rows if row[: len(start)] == list(start)]
        return found[len(start) :]


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., Page]:
    """Writes a run, the example's where nothing else is given, and reads its page."""

    def write(
        run: dict[str, Any] | None = None,
        history: list[dict[str, Any]] | None = None,
        metrics: dict[str, Any] | None = None,
        lines: list[dict[str, Any]] | None = None,
    ) -> Page:
        records = history_records() if history is None else history
        figures = metrics_record() if metrics is None else metrics
        folder = write_run(tmp_path, run_record() | (run or {}), records, figures or None, lines)
        return Page(write_report(folder).read_text(encoding="utf-8"))

    return write


MakePage = Callable[..., Page]


def test_the_figures_of_classes_and_sites(page: MakePage) -> None:
    found = page()
    assert found.row("Edema", "harbour")[1:] == ["0.862", "0.827–0.894", "98", "2,803"]
    assert found.row("Hernia", "harbour")[1:] == ["—", "—", "0", "2,901"]
    assert found.row("Mean (4 classes)", "0.816")  # (.781 + .874 + .716 + .893) / 4
    assert found.row("Mean (4 classes)", "0.764")
    firsts = [row[0] for row in found.rows]
    shared, unique = firsts.index("At several sites"), firsts.index("At one site")
    best_first = ["Pleural Effusion", "Cardiomegaly", "Atelectasis", "Lung Opacity"]
    assert firsts[shared + 1 : shared + 5] == best_first
    assert firsts[unique + 1 : unique + 6] == ["Edema", "Pneumothorax", "Consolidation", "Fracture", "Hernia"]
    assert found.row("Class", "harbour") == ["hillside", "st-anne"]
    counted = "—1 / 1"  # below how many test images have the class and lack it
    assert found.row("Hernia", counted) == ["", ""]
    assert found.row("hillside", "7 of 8")[:2] == ["225 MB", "196 MB"]  # 8 x 28.1 down, 7 x 28.05 up
    assert found.row("head", "[own classes, 1024 + 1]") == ["rows of the classes the site knows"]
    assert "accuracy" not in found.text
    assert "Recall" not in found.row("Class", "Annotated at")


def lead_of(page: Page) -> dict[str, str]:
    """The lines of a page's lead by their heads."""
    found = re.search("Classes (.*?) Mean (.*?) Run (.*?) mean AUROC of", page.text)
    assert found is not None
    return dict(zip(("classes", "mean", "run"), found.groups(), strict=True))


def test_the_lead_names_best_and_weakest_class_the_mean_and_what_left_the_sites(page: MakePage) -> None:
    lead = lead_of(page())
    assert re.findall("Pleural Effusion|Fracture|0.893|0.612", lead["classes"]) == [
        "Pleural Effusion",
        "0.893",
        "Fracture",
        "0.612",
    ]
    assert "0.790" in lead["mean"]  # of the eight classes with an AUROC
    assert "2,901 cases" in lead["mean"]
    assert [
        word for word in ("3 sites", "9 classes", "MB", "model weights", "metrics") if word not in lead["run"]
    ] == []


def test_a_class_of_few_cases_is_neither_best_nor_weakest(page: MakePage) -> None:
    metrics = metrics_record()
    metrics["counts"] |= {"Fracture": [9, 2887], "Pleural Effusion": [744, 2]}
    lead = lead_of(page(metrics=metrics))
    assert re.findall("[A-Z][a-z]+ ?[A-Z]?[a-z]*(?=, AUROC)", lead["classes"]) == [
        "Cardiomegaly",
        "Lung Opacity",
    ]
    metrics["counts"] = {label: [9, 2] for label in LABELS}
    assert "AUROC" not in lead_of(page(metrics=metrics))["classes"]


def test_the_lead_has_the_sites_alone_or_how_to_train_them(tmp_path: Path) -> None:
    def mean(command: str | None) -> str:
        run = run_record() | {"command": command}
        folder = write_run(tmp_path / "runs" / "one", run, history_records(2), metrics_record())
        return lead_of(Page(render_report(folder)))["mean"]

    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert "suture run" not in mean(None)
    assert "chest_surgical --set method=individual" in mean("suture run chest_surgical --env local")
    assert "/s --compare surgical" in mean("suture run /s --env local --set rounds=3")
    means = {"individual": {"mean": [0.71, 0.6, 0.8]}, "surgical": {"mean": [0.76, 0.7, 0.82]}}
    for beside in (tmp_path, tmp_path / "runs" / "chest_surgical-comparison"):
        write_json(beside / "comparison.json", {"methods": means, "title": "t"})
        found = mean("suture run /s --env local")
        assert re.findall("0.7[16]0|0.[67]00–0.8[02]0", found) == [
            "0.710",
            "0.600–0.800",
            "0.760",
            "0.700–0.820",
        ]
        assert "suture run" not in found
        (beside / "comparison.json").unlink()


def test_results_are_open_and_what_few_read_is_folded_until_the_run_ends(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run_record(), history_records(), metrics_record())
    page = render_report(folder)
    folded = re.findall(r'<details><summary><h2 id="[^"]+">([^<]+)', page)
    headings = re.findall(r'<h2 id="[^"]+">([^<]+)', page)
    assert {"Learning", "Traffic and time", "Configuration"} <= {*folded}
    assert headings[-len(folded) :] == folded
    assert headings[0] == "Results by class"
    write_run(tmp_path, run_record() | {"status": "running"}, history_records(2))
    assert "<details open><summary><h2" in render_report(folder)


def test_what_went_wrong_is_told_once_for_all_its_rounds(page: MakePage) -> None:
    history = history_records()
    for line in (history[0], history[1], history[4]):
        line["sites"]["harbour"] |= {"status": "abstained", "reason": "no row"}
        line["status"] = "unchanged"
    found = page(history=history)
    assert found.row("1–2, 5", "harbour") == ["abstained", "no row"]
    assert found.row("1–2, 5", "the federation")[0] == "unchanged"
    assert found.row("4", "st-anne")[0] == "rejected"
    assert found.row("7", "hillside") == ["missing", "no answer within 900 s"]


@pytest.mark.parametrize(
    ("run", "rounds"),
    [
        ({"status": "failed", "error": "st-anne has gone", "finished": None, "selected_round": None}, 3),
        ({"status": "running"}, 2),
        ({"status": "interrupted"}, 2),
    ],
)
def test_a_run_that_did_not_finish_has_a_page(run: dict[str, Any], rounds: int, tmp_path: Path) -> None:
    text = Page(render_report(write_run(tmp_path, run_record() | run, history_records(rounds)))).text
    assert run["status"] in text
    assert f"{rounds} of 8 rounds" in text
    assert run.get("error", "") in text
    at_once = {"status": "failed", "error": "no site came", "labels": [], "sites": {}, "egress": []}
    (tmp_path / "history.jsonl").unlink()
    assert "no site came" in Page(render_report(write_run(tmp_path, run_record() | at_once))).text


def test_few_or_many_sites_and_classes_make_a_page(page: MakePage) -> None:
    one = {"sites": {"a": {"labels": ["Edema"], "n": {"train": 2, "test": 0}}}, "labels": ["Edema"]}
    assert (
        "1 site trained one model of 1 class"
        in page(one, history_records(1), metrics_record() | {"n": 0}).text
    )
    labels = [f"Finding of a long name {i}" for i in range(40)]
    names = [f"site-{i:02d}" for i in range(20)]
    sites = {name: {"labels": labels, "n": {"train": 1, "validation": None}} for name in names}
    history = history_records(50)
    for line in history:
        line["sites"] = dict.fromkeys(names, line["sites"]["harbour"] | {"rows": dict.fromkeys(labels, 5.0)})
    found = page({"labels": labels, "sites": sites, "rounds": 50}, history, {})
    assert found.row("site-19", "50 of 50")
    shares = [row for row in found.rows if row[0] in sites and len(row) in (17, 9)]  # in blocks of 16
    assert sum(len(row) - 1 for row in shares) == 20 * 40


def test_nothing_of_a_run_becomes_markup(page: MakePage, tmp_path: Path) -> None:
    run = {"title": EVIL, "error": EVIL, "status": "failed", "labels": [EVIL]}
    run |= {"egress": [{"field": EVIL, "shape": EVIL, "why": EVIL}], "label_type": "multiclass"}
    run |= {"sites": {EVIL: SITES["harbour"]}, "notes": [{"code": EVIL, "values": {EVIL: EVIL}}]}
    history = history_records(2)
    answer = {"scalars": {"pseudo_positive": 1.0}, "rows": {EVIL: 1.0}, "train_loss": 1.0}
    history[0]["sites"] = {EVIL: {"status": "accepted", **answer}}
    history[1]["sites"] = {EVIL: {"status": "rejected", "reason": EVIL}}
    metrics = metrics_record(OVERALL) | {
        "source": EVIL,
        "sites": {EVIL: {EVIL: 0.5}},
        "undefined": {EVIL: {"code": EVIL}},
        "long_tail": by_frequency({EVIL: (EVIL,)}, {EVIL: 0.5}),
        "attributes": by_attribute({EVIL: LIGHT}),
        "local_models": local_and_global({EVIL: (LIGHT, DARK)}),
    }
    figures = {"images": {EVIL: 90}, "divergence": {EVIL: 0.5}}
    lines = [{"site": EVIL, "round": 1, "classes": {EVIL: {"made": 2, "right": 1}}, "figures": figures}]
    found = page(run, history, metrics, lines)
    assert found.text.count(EVIL) > 20  # as text
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert EVIL not in html
    assert not re.search(r"""src=|href=(?!"#)|url\(|@import|<script|<link""", html.replace("src=x", ""))


LIGHT = {"n": 1200, "auroc": 0.81} | OVERALL
DARK = {"n": 85, "auroc": 0.755} | OVERALL | {"balanced_accuracy": 0.441}
RECALL = {label: 0.1 * i for i, label in enumerate(LABELS) if label != "Hernia"}


def test_figures_of_one_label_of_recall_of_groups_and_of_models_have_their_rows(page: MakePage) -> None:
    groups = {"head": ("Atelectasis", "Edema"), "tail": ("Hernia", "Fracture")}
    parts = {
        "recall": RECALL,
        "long_tail": by_frequency(groups, RECALL),
        "attributes": by_attribute({"dark": DARK, "light": LIGHT}),
        "local_models": local_and_global({"harbour": (LIGHT, DARK), "hillside": (DARK, DARK)}),
    }
    found = page({"label_type": "multiclass"}, None, metrics_record(OVERALL) | parts)
    assert all(f"{value:.3f}" in found.text for value in OVERALL.values())
    assert found.row("Class", "Annotated at")[1:] == ["AUROC", "95 % CI", "Recall", "Positive", "Negative"]
    assert found.row("Edema", "harbour")[1:] == ["0.862", "0.827–0.894", "0.300", "98", "2,803"]
    assert found.row("Hernia", "harbour")[1:] == ["—", "—", "—", "0", "2,901"]
    assert found.row("Head") == ["Atelectasis, Edema", "0.150"]
    assert found.row("Tail") == ["Hernia, Fracture", "0.400"]
    assert found.row("All") == ["", "0.275"]
    assert len(found.row("Attribute")) == 6
    assert found.row("light")[:4] == ["1,200", "0.810", "0.712", "0.561"]
    assert found.row("dark")[:4] == ["85", "0.755", "0.712", "0.441"]
    assert found.row("harbour", "1,200") == ["0.810", "0.755", "0.712", "0.712", "0.561", "0.441"]
    assert found.row("Mean", "", "0.782", "0.712")[0] == "0.501"
    assert found.row("Mean", "", "0.782", "0.755") == ["0.712", "0.712", "0.501", "0.441"]


def test_attributes_of_a_task_of_several_labels_have_the_auroc_alone(page: MakePage) -> None:
    parts = {"women": {"n": 700, "auroc": 0.8}, "men": {"n": 812, "auroc": None}}
    found = page(metrics=metrics_record() | {"attributes": by_attribute(parts)})
    assert found.row("Attribute") == ["Cases", "AUROC"]
    assert found.row("men") == ["812", "—"]


def test_pseudo_labels_and_who_made_each_row(page: MakePage) -> None:
    history = with_pseudo_labels(history_records())
    found = page(None, history, None, diagnostic_records(history))
    assert found.row("Cardiomegaly", "700") == ["427", "61 %"]
    # hillside missed a round and made none of Hernia: 7 rounds of Cardiomegaly, Edema and Fracture
    assert found.row("All classes", "2,100")[0] == "1,316"
    assert found.row("st-anne", "13 %")[0] == "47 %"  # 300 of 2300 of Atelectasis, then Cardiomegaly
    assert found.row("Unchanged") == ["", "", "", "", "", "kept", "", "", ""]  # below Hernia
    assert "Atelectasis, %" in found.text
    assert "Hernia, %" not in found.text  # its row is unchanged in every round


def test_what_sites_send_besides_is_drawn_and_a_plain_run_has_none_of_it(page: MakePage) -> None:
    titles = ("Query loss", "Weight, per site", "Share of the sum of weights", "Divergence, over images")
    plain = page().text
    assert [title for title in (*titles, "warm-up", "Pseudo", "Share of each site") if title in plain] == []
    history = history_records()
    for line in history:
        for i, site in enumerate(line["sites"].values()):
            site["weight"] = site["weight"] and (i + 1) * 10.0 / line["round"]
            site["scalars"] = {"query_loss": 0.5} if line["round"] > 1 else {}  # withheld in the first round
    for line in history[:3]:
        line["phase"] = "warm-up"
    figures = {"images": {"Edema": 90, "Hernia": 0}, "divergence": {"Edema": 0.5, "Hernia": 0.0}}
    lines = [{"site": "harbour", "round": 6, "classes": {}, "figures": figures}]
    notes = [{"code": "method", "values": {"text": "Hernia weighs 1"}}]
    text = page({"notes": notes}, history, None, lines).text
    assert [title for title in titles if title not in text] == []
    assert "warm-up from round 1" in text
    assert "Hernia weighs 1" in text


def test_the_tree_of_an_atlas_has_figures_once_the_run_has_ended(page: MakePage) -> None:
    tree = {"Consolidation": ["Lung Opacity"], "Edema": ["Lung Opacity"], "Fracture": ["Injury <b>"]}
    found = page({"parents": tree}).rows
    [first] = [i for i, row in enumerate(found) if row[0].startswith("Injury <b>")]
    names = ("Injury", "Fracture", "Lung Opacity", "Consolidation", "Edema")
    assert all(row[0].startswith(name) for row, name in zip(found[first:], names, strict=False))
    figures = ["0.612", "0.716", "0.743", "0.862"]
    assert [value in row for row, value in zip(found[first + 1 :], figures, strict=False)] == [True] * 4
    assert not [
        row for row in page({"parents": tree, "status": "running"}).rows if row[0].startswith("Injury")
    ]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("rule", "target", "missed"),
    [
        ("sensitivity", 0.9, True),
        ("sensitivity", 0.854, False),
        ("specificity", 0.81, True),
        ("specificity", 0.8, False),
        ("youden", 1.0, False),
    ],
)
def test_a_rate_below_its_target_is_marked(rule: str, target: float, missed: bool, tmp_path: Path) -> None:
    """The run of the example has 85 % and 80 % at each threshold."""
    folder = write_decided_run(tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["decisions"]["settings"] |= {"rule": rule} | ({rule: target} if rule != "youden" else {})
    for found in (metrics["decisions"]["pooled"], *metrics["decisions"]["sites"].values()):
        for one in found.values():
            one["thresholds"] = {rule: 0.3}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    page = render_report(folder)
    assert ('class="num missed"' in page) == missed
    if rule != "youden":
        counted = sum(len(found) for found in metrics["decisions"]["sites"].values())
        assert f"{counted if missed else 0} of {counted} site thresholds" in page


@pytest.mark.complete
def test_a_page_of_decisions_has_contents_and_depends_on_no_page_before_it(tmp_path: Path) -> None:
    """The templates are compiled once in a process."""
    (tmp_path / "plain").mkdir()
    plain = write_run(tmp_path / "plain", run_record(), history_records(), metrics_record())
    first = render_report(plain)
    (tmp_path / "decided").mkdir()
    decided = render_report(write_decided_run(tmp_path / "decided"))
    ids = re.findall(r'<h2 id="([^"]+)">', decided)
    assert ids == re.findall(r'<a href="#([^"]+)">', decided)
    assert len(ids) == len(set(ids)) == decided.count("<h2")
    assert render_report(plain) == first


@pytest.mark.parametrize("error", [DiskError(28, "No space left on device", "r"), KeyError("x")])
def test_only_a_bug_in_a_page_has_a_traceback(
    error: Exception, run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("suture_results.report.write_report", fails)
    monkeypatch.setattr("suture_results.card.read_run", fails)
    try_report(run_folder)
    try_card(run_folder)
    assert [bool(record.exc_info) for record in caplog.records] == [isinstance(error, KeyError)] * 2


def test_settings_that_were_changed_or_matter_are_shown_and_none_is_lost() -> None:
    changed = asdict(replace(Augmentation(), rotation=33.0))
    own = {"hyperparameters": asdict(method_class("surgical")())}
    parts = {"method": run_record()["method"] | own, "model": asdict(ModelSpec("cnn"))}
    parts |= {"augmentation": changed, "robust": {"kind": "median", "liars": 1}}
    run = parse(Run, run_record() | json.loads(json.dumps(parts)), "test")  # as run.json has it
    method, model, augmentation, robust = configuration(run)
    assert augmentation.shown == (("rotation", 33.0),)
    assert dict(augmentation.shown + augmentation.rest) == changed
    assert {"local.lr", "local.epochs", "local.batch_size"} == {name for name, _ in method.shown}
    assert ("local.momentum", 0.9) in method.rest
    assert [name for name, _ in model.shown] == ["name", "size"]
    assert robust.shown == (("kind", "median"), ("liars", 1))
    elsewhere = {"name": "elsewhere", "title": "", "paper": "", "hyperparameters": {"a": {"b": None}, "c": 1}}
    method, *_ = configuration(parse(Run, run_record() | {"method": elsewhere}, "test"))
    assert (method.shown, method.rest) == ((("a.b", None), ("c", 1)), ())
