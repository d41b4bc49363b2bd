"""Pages of tables: what stands in a row, a footnote and the head, and which pictures are drawn and shown."""

from __future__ import annotations

import os
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tomli_w

from official import write_chexpert, write_nih
from stored_by_hand import SPEC, filled, store, table_spec, tuned_outcome, tuned_spec
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.tables.cells import lines, over_series
from suture_papers.tables.conduct import Outcome, Session
from suture_papers.tables.figures import _series, existing_plots, write_plots
from suture_papers.tables.loading import load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import comparison_table, main_table, preamble, series_table, write_tables
from suture_papers.tables.results import Result, ResultStore
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import Plan, TableSpec
from suture_papers.tables.verdict import verdict
from world import suture

ALL = [{"name": "all"}]
SERIES = {"key": "simulation.images", "values": [20, 40], "label": "images"}
TINY = SPEC["presets"]["tiny"]


def page(outcome: Outcome, folder: Path) -> str:
    return write_tables(outcome, folder, "x")[0].read_text()


# Pages


def test_a_page_has_the_figures_and_comes_out_the_same_twice(tmp_path: Path) -> None:
    table = table_spec().preset(None)
    gain = {"theirs": 0.0, "ours": 0.1}
    outcome = filled(table, tmp_path / "runs", lambda run: {"A": 0.8, "B": 0.5 + gain[run.row] * run.seed})
    paths = write_tables(outcome, tmp_path, "two")
    text = paths[0].read_text()
    assert "| Vanilla FL | 0.650 ± 0.000 ns | .074 |" in text
    assert "0.79 |" in text  # published
    assert "6 runs in the table, 0.1 hours" in text
    ElementTree.fromstring(paths[2].read_text())
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_tables(outcome, tmp_path, "two")] == before


def test_a_page_of_fine_tuned_models_has_every_figure_of_each_task(tmp_path: Path) -> None:
    paths = write_tables(tuned_outcome(tuned_spec(), tmp_path / "runs"), tmp_path, "two")
    assert [path.name for path in paths] == ["two.md", "two.html", "two.svg", "two-curves.svg"]
    text = paths[0].read_text()
    assert "| FL | 0.600 ± 0.000 ns | .074 | 2.0 ± 0.0 ns | 1.000 [1] |" in text
    figures = "| 0.500 ± 0.000 | 0.500 ± 0.000 |"
    assert f"| A | PMFL | 0.800 ± 0.100 {figures} 0.400 ± 0.050 | 2.0 ± 0.0 | 90 / 10 |" in text
    # B ends at .8, .9 and 1, .9 on average: one run of three does not reach that.
    assert f"| B | PMFL | 0.900 ± 0.100 {figures} 0.450 ± 0.050 | 2.0 ± 0.0 (2 of 3) |" in text
    assert paths[1].read_text().count("<svg") == 2
    for path in paths[2:]:
        ElementTree.fromstring(path.read_text())


@pytest.mark.parametrize(
    "spec", [table_spec(), tuned_spec(), table_spec(series=SERIES)], ids=["", "tuned", "series"]
)
def test_nothing_done_yet_is_an_empty_table(spec: TableSpec, tmp_path: Path) -> None:
    outcome = collect(spec.preset(None), store(tmp_path))
    text = page(outcome, tmp_path)
    assert f"| {spec.rows['ours'].name} | – [1] | – |" in text
    assert "\n[1] not run yet\n" in text
    assert verdict(outcome).startswith("No result yet")


def test_an_undefined_comparison_has_its_reason_below_the_table(tmp_path: Path) -> None:
    """One seed: no pairs of runs; over classes, the differences are .1 and .2: t = 3, p = .205."""
    one = {"note": "", "seeds": [1]}
    spec = table_spec(presets={"one": one, "by-class": {**one, "pairs": "classes"}})
    gain = {"theirs": 0.0, "ours": 0.1}
    pages = {}
    for size in spec.presets:
        outcome = filled(
            spec.preset(size), tmp_path, lambda run: {"A": 0.5 + gain[run.row], "B": 0.5 + 2 * gain[run.row]}
        )
        paths = write_tables(outcome, tmp_path, "e")
        pages[paths[0].name] = paths[0].read_text()
        assert "[1] " in paths[1].read_text()
    assert list(pages) == ["e.md", "e-by-class.md"]
    assert "| Vanilla FL | 0.500 | – [1] | 0.500 | – [1] | 0.500 | – [1] |" in pages["e.md"]
    assert "| Vanilla FL | 0.500 ± 0.000 ns | .205 [1] |" in pages["e-by-class.md"]
    assert all("\n[1] " in text for text in pages.values())


@pytest.mark.parametrize("series", [None, SERIES])
def test_what_a_preset_leaves_out_is_not_rendered(series: dict[str, Any] | None, tmp_path: Path) -> None:
    rows = {**SPEC["rows"], "theirs": {**SPEC["rows"]["theirs"], "published": {"away": "0.79"}}}
    columns = [{"name": "here"}, {"name": "away", "test": "away"}]
    presets = {"few": {**TINY, "columns": ["here"]}}
    tests = {"away": {"data": {"dataset": "nih"}}}
    table = table_spec(columns=columns, tests=tests, rows=rows, series=series, presets=presets).preset("few")
    outcome = filled(table, tmp_path / "runs", lambda _: {"A": 0.5, "B": 0.5})
    texts = [path.read_text() for path in write_tables(outcome, tmp_path, "x")]
    assert not [text for text in texts if "away" in text or "0.79" in text]
    assert "| here | p |" in texts[0]


def test_a_series_has_a_table_over_all_its_values_with_what_was_published(tmp_path: Path) -> None:
    theirs = {**SPEC["rows"]["theirs"], "published": {"all": "0.82"}, "steady": True}
    spec = table_spec(series=SERIES, columns=ALL, rows={**SPEC["rows"], "theirs": theirs})
    more = {"theirs": 0.0, "ours": 0.02}
    outcome = filled(
        spec.preset(None), tmp_path / "runs", lambda run: dict.fromkeys("AB", 0.6 + more[run.row] * run.seed)
    )
    table = series_table(outcome)
    assert (table.heads[-1], table.rows[0][-1], table.rows[1][-1]) == ("published", "0.82", "–")
    assert "Vanilla FL" in table.caption
    assert "published" not in main_table(outcome).heads
    assert page(outcome, tmp_path).count("| 20 |") == 2
    marks = [over_series(outcome, column) for column in spec.columns]
    (panel,) = _series(spec, lines(outcome), marks)
    against = marks[0]["theirs"].against
    assert against is not None
    assert [text.text for text in panel.texts if text.tone is not None] == [against.mark] == ["**"]


def measured(n: int, seed: int, **tests: int) -> Result:
    metrics = {"source": "server test set", "n": n, "auroc": {}}
    found = {name: {"global": {"n": images}} for name, images in tests.items()}
    return Result({"settings": {"seed": seed}, "sites": {}}, metrics, None, None, 36.0, found)


def test_a_page_says_what_it_is_tested_on_and_where_runs_differ_in_it() -> None:
    table = table_spec(columns=ALL).preset(None)
    plan = Plan("?", "auroc", {"auroc": 0.01}, "never", "b")
    study = replace(table, spec=replace(table.spec, plan=plan))  # each of its seeds has images of its own

    def tested(*results: Result, table: Any = table) -> str:
        cells = {("ours", "None"): dict(enumerate(results)), ("theirs", "None"): {}}
        return dict(preamble(Outcome(table, cells, {}), "x")).get("tested on", "")

    assert tested(measured(2496, 1), measured(2496, 2)) == "2,496 images"
    differ = tested(measured(40, 1, away=9), measured(30, 2, away=9))
    assert differ.startswith("30 or 40 images (NOT")
    assert differ.endswith("; away: 9 images")
    assert tested(*map(measured, (40, 30, 35), (0, 1, 2)), table=study) == "30 to 40 images"
    at_sites = Result({"settings": {}}, {"source": "sites' test data", "n": 80}, None, None, 1.0)
    assert not tested(at_sites)


def test_the_comparison_of_single_classes_by_hand() -> None:
    none = {"auroc": None}
    theirs = {"Edema": {"auroc": 0.9, "low": 0.85, "high": 0.95}, "Hernia": none}
    better = {"Edema": {"auroc": 0.8, "low": 0.7, "high": 0.9, "p": 0.0004}, "Hernia": none}
    table = comparison_table(load_spec("nih_disjoint"), {"central_full": theirs, "surgical": better})
    whole, ours = "Central, complete labels", "Surgical Aggregation, FedAvg"
    assert table.heads == ["class", whole, ours, "p", f"published: {whole}", f"published: {ours}"]
    assert table.rows[0] == [
        *("Edema", "0.900 (0.850, 0.950)", "0.800 (0.700, 0.900)", "< .001"),
        *("0.89 (0.88, 0.90)", "0.88 (0.86, 0.89), p .06"),
    ]
    assert table.rows[1][:4] == ["Hernia", "–", "–", "–"]


def test_single_classes_stand_beside_what_the_paper_printed(tmp_path: Path) -> None:
    """A column of recall has a table of its own."""
    by_class = {"source": "Table 1", "published": {"ours": {"A": "0.91"}}}
    columns = [*ALL, {"name": "r", "metric": "recall"}]
    table = table_spec(by_class=by_class, columns=columns, rows=rows_without_figures()).preset(None)
    text = page(filled(table, tmp_path, lambda _: {"A": 0.8, "B": None}), tmp_path / "pages")
    assert "| A | 0.800 | 0.800 (0.91) |" in text
    assert "Table 1" in text
    assert "Recall of each class" in text


def rows_without_figures() -> dict[str, Any]:
    return {key: {"name": row["name"], "set": row["set"]} for key, row in SPEC["rows"].items()}


# The sentence at the head

THEIRS = [0.70, 0.72, 0.71, 0.69, 0.73]
BETTER = [a + d for a, d in zip(THEIRS, (0.02, 0.03, 0.01, 0.025, 0.02), strict=True)]
NEAR = [a + d for a, d in zip(THEIRS, (0.02, -0.03, 0.01, 0.005, -0.015), strict=True)]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        # Differences .02, .03, .01, .025, .02: mean .021, SD .0074, t(.975, 4) 2.776, so .021 ± .0092.
        (BETTER, THEIRS, ("5 seeds", "beats Vanilla FL by .021 (95 % .012 to .030, p = .003)")),
        (THEIRS, BETTER, ("is worse than Vanilla FL by .021 (95 % .012 to .030, p = .003)",)),
        (NEAR, THEIRS, ("does not differ", "\u2212.002, 95 % \u2212.027 to .023")),
        (THEIRS, THEIRS, ("does not differ", "(.000, p = 1.000)")),
        ([0.9], [0.5], ("1 seed:", "has .900; Vanilla FL .500", "too few")),
        ([0.9, 0.91], [0.5, 0.51001], ("better than Vanilla FL by .400, but two pairs",)),
        ([0.75] * 3, [0.5] * 3, ("the same for all pairs",)),
        ([], THEIRS, ("No result yet",)),
        (THEIRS, [], ("cannot be compared with Vanilla FL (not run yet)",)),
    ],
)
def test_the_sentence_says_who_won_by_how_much(
    ours: list[float], theirs: list[float], said: tuple[str, ...], tmp_path: Path
) -> None:
    table = table_spec(presets={"tiny": {"note": "", "seeds": [1, 2, 3, 4, 5]}}).preset(None)
    values = {"ours": dict(enumerate(ours, 1)), "theirs": dict(enumerate(theirs, 1))}

    def areas(run: Run) -> dict[str, float | None] | None:
        area = values[run.row].get(run.seed)
        return None if area is None else {"A": area, "B": area}

    outcome = filled(table, tmp_path, areas)
    sentence = verdict(outcome)
    assert [words for words in said if words not in sentence] == []
    assert ("beats" in sentence) == ("beats" in said[-1])
    assert page(outcome, tmp_path / "out").split("\n\n")[1] == sentence
    assert sentence in (tmp_path / "out" / "x.html").read_text()


def test_of_several_rows_of_one_run_the_caution_is_said_once(tmp_path: Path) -> None:
    rows = {**SPEC["rows"], "others": {"name": "FedAvg", "set": {"method": "fedavg"}}}
    table = table_spec(rows=rows, presets={"tiny": {"note": "", "seeds": [1]}}).preset(None)
    areas = {"ours": 0.9, "theirs": 0.5, "others": 0.6}
    sentence = verdict(filled(table, tmp_path, lambda run: dict.fromkeys("AB", areas[run.row])))
    assert "has .900; Vanilla FL .500; FedAvg .600: too few" in sentence


# Further plots

PLOTS = {
    "frequencies": {"of": "frequencies", "sources": ["nih", "chexpert"], "source": "Fig. 4a"},
    "together": {"of": "cooccurrence", "sources": ["nih"]},
    "features": {"of": "features", "row": "ours", "sources": ["nih", "chexpert"]},
    "related": {"of": "predictions", "row": "ours", "sources": ["nih", "chexpert"]},
}


class House:
    """A table's file, its data, and the model that its one run left."""

    def __init__(self, folder: Path) -> None:
        self.results, self.root, self.work = (folder / name for name in ("results", "data", "work"))
        write_nih(self.root / "nih")
        write_chexpert(self.root / "chexpert")
        nih = {"root": "{data}/nih/images", "table": "{data}/nih/Data_Entry_2017.csv"}
        chexpert = {"root": "{data}/chexpert", "table": "{data}/chexpert/train.csv"}
        tests = {
            name: {"data": {"dataset": name, "split": "patients", **data}}
            for name, data in {"nih": nih, "chexpert": chexpert}.items()
        }
        presets = {"tiny": {"note": "", "seeds": [1]}, "less": {"note": "", "seeds": [1], "skip": ["ours"]}}
        columns = [{"name": "NIH", "test": "nih"}]
        changes = {"columns": columns, "tests": tests, "rows": rows_without_figures(), "presets": presets}
        self.path = folder / "two.toml"
        self.path.write_text(tomli_w.dumps({**SPEC, **changes, "drawings": PLOTS}))
        self.spec = load_spec(str(self.path))
        self.reported: list[str] = []
        run = next(run for run in final_runs(self.spec.preset(None), {}) if run.row == "ours")
        labels = LabelSet((*NIH.names, *(name for name in CHEXPERT.names if name not in NIH)))
        small, self.model = ModelSpec("cnn", size=16), self.work / run.name / "model"
        save_model(build(small, labels, 1, pretrained=False), small, self.model, {})

    def draw(self, preset: str = "tiny") -> dict[str, bytes]:
        self.reported.clear()
        session = Session(
            ResultStore(self.results / "runs", "two"), self.work, self.root, self.reported.append
        )
        write_plots(self.spec.preset(preset), session, self.results, "two")
        return {path.name.removeprefix("two-"): path.read_bytes() for path in self.results.glob("*.svg")}

    def page(self) -> str:
        suture("table", self.path, "--results", self.results, "--render")
        return (self.results / "two.html").read_text()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.complete
def test_data_and_a_model_are_drawn_and_shown_with_what_they_are(house: House) -> None:
    """A model is drawn again only when it is younger."""
    found = house.draw()
    assert set(found) == {f"{name}.svg" for name in PLOTS}
    for name in ("Hernia", "Support Devices", "nih", "chexpert"):  # texts of an SVG are text
        assert name.encode() in found["frequencies.svg"]
    assert b"Lung Lesion" in found["related.svg"]
    captions = existing_plots(house.spec, house.results, "two")
    assert list(captions) == [f"two-{name}.svg" for name in PLOTS]
    assert "(Fig. 4a)" in captions["two-frequencies.svg"]
    page = house.page()
    assert page.count("<svg") == 1
    assert page.count('<img src="data:image/svg+xml;base64,') == 4
    assert all(f"{caption}</figcaption>" in page for caption in captions.values())
    assert "<svg" not in (house.results / "two.md").read_text()
    house.draw()
    assert not [line for line in house.reported if "features" in line or "related" in line]
    later = (house.results / "two-features.svg").stat().st_mtime + 5
    os.utime(house.model / "model.json", (later, later))
    house.draw()
    assert sum("features" in line or "related" in line for line in house.reported) == 2


def test_a_plot_without_its_data_its_model_or_its_row_is_left_out_by_name(house: House) -> None:
    assert set(house.draw("less")) == {"frequencies.svg", "together.svg"}
    assert sum("'ours'" in line for line in house.reported) == 2
    (house.model / "model.json").unlink()
    assert set(house.draw()) == {"frequencies.svg", "together.svg"}
    assert sum(str(house.model) in line for line in house.reported) == 2
    (house.results / "two-frequencies.svg").unlink()
    (house.root / "chexpert/train.csv").unlink()
    assert set(house.draw()) == {"together.svg"}
    assert sum("{data}/chexpert/train.csv" in line for line in house.reported) == 3


@pytest.mark.parametrize("kind", ["svg", "link", "pipe", "folder"])
def test_a_plot_that_somebody_put_there_is_an_image_and_no_part_of_the_page(
    kind: str, house: House, tmp_path: Path
) -> None:
    """A script in a picture would run in the page, a link would show a secret, and a pipe has no end."""
    script = "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    path, secret = house.results / "two-features.svg", tmp_path / "secret"
    path.parent.mkdir()
    secret.write_text(script)
    if kind == "svg":
        path.write_text(script)
    elif kind == "link":
        path.symlink_to(secret)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    page = house.page()
    assert "alert" not in page
    assert (b64encode(script.encode()).decode() in page) == (kind == "svg")
