import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from example_run import (
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
from suture_results.card import try_card
from suture_results.report import render_report, try_report, write_report

VOID = {"meta", "br", "hr"}


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
        if tag not in VOID:
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
        """The one row that starts with these cells."""
        (found,) = [r for r in self.rows if r[: len(start)] == list(start)]
        return found


def page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(run_folder: Path) -> None:
    html = write_report(run_folder).read_text(encoding="utf-8")
    assert not re.search(r"""src=|href=(?!"#)|url\(|@import|<script|<link""", html)


def test_the_head_names_the_run_and_its_result(run_folder: Path) -> None:
    text = page(run_folder).text
    assert "Chest findings of three hospitals" in text
    assert "9 October 2026, 13:02 UTC" in text
    assert (
        "3 sites trained one model of 9 classes, 5 of them annotated at one site only, in 8 rounds." in text
    )
    assert "0.816 classes annotated at several sites" in text  # (.781 + .874 + .716 + .893) / 4
    assert "6 selected round of 8" in text


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


def test_every_class_has_its_row(run_folder: Path) -> None:
    found = page(run_folder)
    assert found.row("Edema", "harbour")[3:] == ["0.862", "0.827–0.894", "98", "2,803"]
    hernia = found.row("Hernia", "harbour")
    assert hernia[2:] == ["no positive among 2,901 labelled cases", "—", "—", "0", "2,901"]
    assert found.row("Mean (4 classes with an AUROC)", "0.816")
    assert found.row("Mean (4 classes with an AUROC)", "0.764")


def test_classes_stand_in_their_group_best_first(run_folder: Path) -> None:
    firsts = [r[0] for r in page(run_folder).rows]
    shared, unique = firsts.index("At several sites"), firsts.index("At one site")
    assert firsts[shared + 1 : shared + 5] == [
        "Pleural Effusion",
        "Cardiomegaly",
        "Atelectasis",
        "Lung Opacity",
    ]
    assert firsts[unique + 1 : unique + 6] == ["Edema", "Pneumothorax", "Consolidation", "Fracture", "Hernia"]


def test_each_site_has_its_column_and_its_totals(run_folder: Path) -> None:
    found = page(run_folder)
    assert found.row("Class", "harbour") == ["Class", "harbour", "hillside", "st-anne"]
    counted = "—1 / 1"  # below how many test images have the class and lack it
    assert found.row("Hernia", counted) == ["Hernia", counted, "", ""]
    assert found.row("hillside", "7 of 8")[2:4] == ["225 MB", "196 MB"]  # 8 x 28.1 down, 7 x 28.05 up


def test_what_went_wrong_is_told(run_folder: Path) -> None:
    found = page(run_folder)
    assert found.row("4", "st-anne")[2:] == [
        "rejected",
        "head row 'Fracture' is not finite; lower the learning rate",
    ]
    assert found.row("7", "hillside")[2:] == ["missing", "no answer within 900 s"]


def test_equal_events_of_several_rounds_are_one(tmp_path: Path) -> None:
    history = history_records()
    for line in (history[0], history[1], history[4]):
        line["sites"]["harbour"] |= {"status": "abstained", "reason": "no row"}
        line["status"] = "unchanged"
    found = page(write_run(tmp_path, run_record(), history))
    assert found.row("1–2, 5", "harbour") == ["1–2, 5", "harbour", "abstained", "no row"]
    assert found.row("1–2, 5", "the federation")[2] == "unchanged"


def test_what_left_the_sites_is_listed(run_folder: Path) -> None:
    row = page(run_folder).row("head", "[own classes, 1024 + 1]")
    assert row[2] == "rows of the classes the site knows"


def test_a_failed_run_says_what_is_absent(tmp_path: Path) -> None:
    run = run_record() | {"status": "failed", "error": "site 'st-anne' has gone", "finished": None}
    run |= {"selected_round": None}
    text = page(write_run(tmp_path, run, history_records(3))).text
    assert "This run failed after 3 rounds." in text
    assert "site 'st-anne' has gone" in text
    assert "in 3 of 8 rounds" in text
    assert "There is no metrics.json" in text


@pytest.mark.parametrize(
    ("status", "words"), [("running", "is still running"), ("interrupted", "was interrupted")]
)
def test_an_unfinished_run_says_so(tmp_path: Path, status: str, words: str) -> None:
    text = page(write_run(tmp_path, run_record() | {"status": status}, history_records(2))).text
    assert f"This run {words}" in text
    assert "2 of 8 rounds" in text


def test_a_run_that_failed_at_once_has_a_page(tmp_path: Path) -> None:
    run: dict[str, Any] = run_record() | {
        "status": "failed",
        "error": "no site came",
        "labels": [],
        "sites": {},
    }
    text = page(write_run(tmp_path, run | {"egress": []})).text
    assert "failed before its first round ended" in text
    assert "before the sites had agreed on their labels" in text
    assert "There is no history.jsonl" in text
    assert "before the method declared" in text


def test_phases_are_named(tmp_path: Path) -> None:
    history = history_records()
    for line in history[:3]:
        line["phase"] = "warm-up"
    assert "warm-up from round 1, main from round 4." in page(write_run(tmp_path, run_record(), history)).text


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = run_record() | {"title": evil, "error": evil, "status": "failed"}
    run["egress"] = [{"field": evil, "shape": evil, "why": evil}]
    run["sites"] = {evil: {"labels": [evil], "n": {"train": 1}}}
    run["labels"] = [evil]
    history = history_records(1)
    history[0]["sites"] = {evil: {"status": "rejected", "reason": evil}}
    metrics = metrics_record() | {
        "source": evil,
        "sites": {evil: {evil: 0.5}},
        "undefined": {evil: {"code": evil}},
    }
    html = write_report(write_run(tmp_path, run, history, metrics)).read_text(encoding="utf-8")
    assert evil not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") > 10


def test_one_site_is_not_compared_with_others_and_no_case_is_no_figure(tmp_path: Path) -> None:
    run = run_record() | {
        "sites": {"a": {"labels": ["Edema"], "n": {"train": 2, "test": 0}}},
        "labels": ["Edema"],
    }
    text = page(write_run(tmp_path, run, history_records(1), metrics_record() | {"n": 0})).text
    assert "1 site trained one model of 1 class in 8 rounds." in text
    assert "It was not evaluated, because there are no test cases." in text
    assert "classes annotated at several sites" not in text
    assert "classes annotated at one site" in text


def test_many_sites_and_rounds_still_make_a_page(tmp_path: Path) -> None:
    names = [f"site-{i:02d}" for i in range(20)]
    member = {"labels": ["Edema"], "n": {"train": 10, "validation": None, "test": 1}}
    run = run_record() | {"sites": dict.fromkeys(names, member), "labels": ["Edema"], "rounds": 50}
    history = history_records(50)
    for line in history:
        line["sites"] = dict.fromkeys(names, line["sites"]["harbour"])
    found = page(write_run(tmp_path, run, history))
    assert found.row("site-19", "50 of 50")
    assert "20 sites trained one model of 1 class, none of them" in found.text


def test_a_single_label_task_has_its_figures_in_the_head(tmp_path: Path) -> None:
    text = page(write_run(tmp_path, run_record(), [], metrics_record(OVERALL))).text
    assert "0.712 accuracy 0.561 balanced accuracy 0.569 macro F1 0.583 macro precision" in text


def test_another_run_has_no_such_parts(run_folder: Path) -> None:
    text = page(run_folder).text
    for words in (
        "accuracy",
        "macro",
        "Pseudo-label",
        "Share of each site in the class rows",
        "notes",
        "diagnostics.jsonl",
    ):
        assert words not in text


def test_notes_are_listed(tmp_path: Path) -> None:
    said = ("No site gave counts of Hernia: its class weight is 1", "<b>")
    run = run_record() | {"notes": [{"code": "method", "values": {"text": text}} for text in said]}
    text = page(write_run(tmp_path, run)).text
    assert "Notes No site gave counts of Hernia: its class weight is 1 <b>" in text


def test_pseudo_labels_have_their_section(tmp_path: Path) -> None:
    history = with_pseudo_labels(history_records())
    found = page(write_run(tmp_path, run_record(), history, metrics_record()))
    assert "Positive pseudo-labels, per site harbour hillside st-anne" in found.text
    assert "Negative pseudo-labels, per site" in found.text
    assert "true labels of the" not in found.text


def test_a_simulation_tells_how_good_they_were(tmp_path: Path) -> None:
    history = with_pseudo_labels(history_records())
    found = page(write_run(tmp_path, run_record(), history, None, diagnostic_records(history)))
    assert "true labels of the simulation" in found.text
    assert found.row("Cardiomegaly", "700") == ["Cardiomegaly", "700", "427", "61 %"]
    assert found.row("hillside", "Made") == ["hillside", "Made", "Correct", "Share correct"]
    # hillside missed a round and made none of Hernia: 7 rounds of Cardiomegaly, Edema and Fracture
    assert found.row("All classes", "2,100")[2] == "1,316"
    assert "metrics.json and diagnostics.jsonl of this folder" in found.text


def test_who_made_each_row(tmp_path: Path) -> None:
    found = page(write_run(tmp_path, run_record(), with_pseudo_labels(history_records())))
    text = found.text
    assert "share of that weight in round 8" in text
    assert found.row("st-anne", "13 %")[2] == "47 %"  # 300 of 2300 of Atelectasis, then Cardiomegaly
    assert "A row without any weight" in text
    assert found.row("Unchanged")[1:] == ["", "", "", "", "", "kept", "", "", ""]  # below Hernia
    assert "Atelectasis, % harbour hillside st-anne" in text
    assert "Hernia, %" not in text  # its row is unchanged in every round


def test_many_sites_and_classes_still_make_a_matrix(tmp_path: Path) -> None:
    labels = [f"Finding of a long name {i}" for i in range(40)]
    sites = {f"site-{i}": {"labels": labels, "n": {"train": 1}} for i in range(8)}
    history = history_records(2)
    for line in history:
        site = line["sites"]["harbour"] | {"rows": dict.fromkeys(labels, 5.0)}
        line["sites"] = dict.fromkeys(sites, site)
    run = run_record() | {"labels": labels, "sites": sites}
    found = page(write_run(tmp_path, run, history))
    shares = [r for r in found.rows if r[0] in sites and len(r) in (17, 9)]  # 40 classes in blocks of 16
    assert sum(len(r) - 1 for r in shares) == 8 * 40
    assert "stayed as it was" not in found.text


def test_names_in_these_parts_become_no_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = run_record() | {
        "notes": [{"code": evil, "values": {evil: evil}}],
        "labels": [evil],
        "sites": {evil: SITES["harbour"]},
    }
    history = history_records(1)
    history[0]["sites"] = {
        evil: {"status": "accepted", "scalars": {"pseudo_positive": 1.0}, "rows": {evil: 1.0}}
    }
    made = [{"site": evil, "round": 1, "classes": {evil: {"made": 2, "right": 1}}}]
    html = write_report(write_run(tmp_path, run, history, None, made)).read_text(encoding="utf-8")
    assert evil not in html
    assert "Share of each site in the class rows" in html
    assert "true labels of the" in html


@pytest.mark.parametrize(("name", "words"), [("query_loss", "Query loss"), ("largest_gap", "Largest gap")])
def test_every_number_that_a_site_sends_is_drawn(tmp_path: Path, name: str, words: str) -> None:
    history = history_records()
    assert words not in page(write_run(tmp_path, run_record(), history, metrics_record())).text
    for line in history[1:]:  # withheld in the first round
        for site in line["sites"].values():
            site["scalars"] = {name: 0.5}
    text = page(write_run(tmp_path, run_record(), history, metrics_record())).text
    assert f"{words}, per site harbour hillside st-anne" in text


@pytest.mark.complete
def test_the_contents_lead_to_every_section(tmp_path: Path) -> None:
    page = write_report(write_decided_run(tmp_path)).read_text()
    ids = re.findall(r'<h2 id="([^"]+)">', page)
    assert ids == re.findall(r'<a href="#([^"]+)">', page)
    assert len(ids) == len(set(ids)) == page.count("<h2")
    assert {"results-by-class", "decisions"} <= set(ids)


@pytest.mark.complete
def test_a_page_does_not_depend_on_the_pages_before_it(tmp_path: Path) -> None:
    """The templates are compiled once in a process."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    write_run(one, run_record(), history_records(), metrics_record())
    first = render_report(one)
    render_report(write_decided_run(two))
    assert render_report(one) == first
