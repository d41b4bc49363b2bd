"""The card of a model and the tables of the terminal: what the files of the run say, written alike."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console

from example_run import LABELS, OVERALL, SITES, metrics_record, run_record
from small_models import CNN_32, saved_model
from suture.core.errors import DataError
from suture.core.escaping import markdown
from suture.federation.server.selection import by_frequency
from suture.models.saved import stated_digest
from suture.protocol.records import Metrics, Run, parse
from suture_results import formatting as formats
from suture_results.card import PAGE, rounded, try_card, write_card
from suture_results.report import write_report
from suture_results.tables import class_table
from world import refused, suture

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    saved_model(tmp_path / "model", CNN_32, tuple(LABELS))
    (tmp_path / "metrics.json").write_text(json.dumps(metrics_record()))
    change(tmp_path)
    return tmp_path


def change(folder: Path, **facts: Any) -> Path:
    (folder / "run.json").write_text(json.dumps(run_record() | facts))
    return folder


def test_the_figures_are_those_of_the_run(run_dir: Path) -> None:
    """Every number with three decimals is one of metrics.json, and each class's and site's is there."""
    text = write_card(run_dir).read_text()
    metrics = (run_dir / "metrics.json").read_text()
    known = {f"{float(number):.3f}" for number in re.findall(r"\d+\.\d+", metrics)}
    found = set(re.findall(r"(?<![\d.])\d\.\d{3}(?![\d.])", text.partition("## Evaluation")[2]))
    assert found
    assert found <= known
    for value in json.loads(metrics)["auroc"].values():
        assert value is None or f"{value:.3f}" in found
    assert all(f"| {site} |" in text for site in SITES)
    assert stated_digest(run_dir / "model") in text


def test_the_front_matter_is_read_and_no_licence_is_invented(run_dir: Path) -> None:
    facts = yaml.safe_load(write_card(run_dir).read_text().split("---\n")[1])
    assert "license" not in facts
    assert facts["pipeline_tag"] == "image-classification"
    value = facts["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == round(json.loads((run_dir / "metrics.json").read_text())["mean_auroc"], 3)
    suture("model", "card", run_dir, "--license", "apache-2.0")
    text = (run_dir / "model" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "apache-2.0"


def test_the_code_of_the_card_runs_and_the_citation_is_that_of_the_project(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_card(run_dir).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (run_dir / "images").mkdir()
    Image.fromarray(np.zeros((40, 40), np.uint8)).save(run_dir / "images" / "a.png")
    monkeypatch.chdir(run_dir)
    exec(code, {})
    assert "a.png" in capsys.readouterr().out
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (entry,) = re.findall(r"```bibtex\n(.*?)```", text, re.DOTALL)
    names = [author["name"] for author in cited["authors"]]
    assert all(
        f"{{{value}}}" in entry for value in (cited["title"], cited["version"], cited["license"], *names)
    )


def test_counts_are_rounded_and_foreign_text_is_no_markup() -> None:
    told = ["—", "< 10", "< 10", "10", "99", "150", "1100"]
    assert [rounded(n) for n in (None, 0, 9, 10, 99, 149, 1057)] == told
    assert markdown("a|<b>\n[x](y)") == r"a\|\<b\>\\n\[x\](y)"


def test_the_page_says_what_the_card_says_and_foreign_text_is_no_markup(run_dir: Path) -> None:
    """Names come from other sites: a script in one is text on the page too, and no link is made."""
    bad = "<script>alert(1)</script> [x](javascript:alert(2)) ![y](https://z) `a` &lt; \n# Title"
    change(run_dir, title=bad, notes=[{"code": "method", "values": {"text": bad}}])
    card = write_card(run_dir).read_text()
    page = (run_dir / "model" / PAGE).read_text()
    body = re.sub(r"(?s)<(nav|pre)\b.*?</\1>", "", page.partition("<body")[2])  # its own links and code
    assert not re.findall(r"<(script|a|img|code)\b", body)
    assert "&lt;script&gt;" in body
    assert not re.findall(r"<[^>]*\b(?:src|href)=(?!\"#)|url\(|@import", page)  # it needs no other file
    assert body.count("<h1>") == 1
    assert body.count("<h2 ") == card.count("\n## ")
    for value in json.loads((run_dir / "metrics.json").read_text())["auroc"].values():
        assert value is None or f"{value:.3f}</td>" in body


def test_a_run_that_did_not_finish_has_no_card_and_none_is_lost_to_its_card(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with refused("failed", by=DataError):
        write_card(change(run_dir, status="failed"))
    try_card(change(run_dir, status="interrupted"))
    assert not (run_dir / "model" / "README.md").exists()
    try_card(change(run_dir))
    assert (run_dir / "model" / PAGE).exists()
    assert not caplog.records
    (run_dir / "metrics.json").write_text("{")
    try_card(run_dir)
    assert "metrics.json" in caplog.text


def facts_of_model(**facts: Any) -> dict[str, Any]:
    return {"model": run_record()["model"] | facts}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"robust": {"kind": "median", "liars": 1}}, "kind median, liars 1"),
        ({"protection": {"harbour": {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5}}}, "with noise"),
        (facts_of_model(modalities=["CR", "DX"]), "CR, DX"),
        (facts_of_model(weights="download"), "download"),
        ({"pretrained": {"file": "dino_v2.pth", "sha256": "ab" * 32}}, f"dino\\_v2.pth, SHA-256 {'ab' * 32}"),
        ({"pretrained": {"file": "a", "sha256": "cd" * 32}} | facts_of_model(train="head"), ", frozen"),
    ],
)
def test_what_the_run_did_besides_is_stated(facts: dict[str, Any], said: str, run_dir: Path) -> None:
    assert said not in write_card(run_dir).read_text()
    assert write_card(change(run_dir, **facts)).read_text().count(said) == 1
    if "protection" in facts:
        assert write_report(run_dir).read_text().count(said) == 1


def test_figures_that_sites_round_are_not_read_as_exact(run_dir: Path) -> None:
    assert " in steps of " not in write_card(run_dir).read_text()
    record = metrics_record()
    steps = {name: 0.5 for name, value in record["auroc"].items() if value is not None}
    (run_dir / "metrics.json").write_text(json.dumps(record | {"steps": steps}))
    assert " in steps of 0.5 | " in write_card(run_dir).read_text()


def shown(run: dict[str, Any] | None = None, metrics: dict[str, Any] | None = None) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=140, record=True)
    figures = parse(Metrics, metrics or metrics_record(), "metrics.json")
    console.print(class_table(parse(Run, run_record() | (run or {}), "run.json"), figures))
    return [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]


def test_the_table_by_hand() -> None:
    rows = shown()
    assert ["Edema", "harbour", "0.862", "0.827–0.894", "98"] in rows
    assert ["Pleural Effusion", "3 of 3 sites", "0.893", "0.880–0.905", "744"] in rows
    means = [(row[0], row[2]) for row in rows if row[0].startswith("Mean")]
    assert means == [("Mean (4)", "0.816"), ("Mean (4)", "0.764"), ("Mean (8 classes)", "0.790")]
    groups = by_frequency({"head": ("Edema",), "tail": ("Hernia",)}, {"Edema": 0.75, "Hernia": 0.25})
    more = {"long_tail": groups, "mean_interval": [0.77, 0.81], "loss": 0.1534, "n": 25_596}
    rows = [row for row in shown(None, metrics_record(OVERALL) | more) if len(row) > 2][-9:]
    assert [row[2] for row in rows] == [
        *("0.790", "0.153", "0.712", "0.561", "0.569", "0.583"),  # mean, loss, accuracies, F1, precision
        *("0.750", "0.250", "0.500"),  # of head, tail and all classes
    ]
    assert rows[0][3] == "0.770–0.810"
    assert shown(None, metrics_record(dict.fromkeys(OVERALL))) == shown()


def test_a_class_of_few_cases_is_marked_and_comes_after_all_that_are_ranked() -> None:
    def order(counts: tuple[int, int]) -> list[str]:
        metrics = metrics_record()
        metrics["auroc"]["Edema"], metrics["counts"]["Edema"] = 0.999, counts
        return [f"{row[0]} {row[2]}" for row in shown(None, metrics) if len(row) > 1 and row[1] in SITES]

    assert order((10, 2000))[0] == "Edema 0.999"
    for counts in ((9, 2000), (2000, 9)):
        assert order(counts)[-2:] == ["Edema 0.999 (few)", "Hernia —"]


def test_names_are_no_markup_and_a_missing_field_is_named() -> None:
    rows = shown({"title": "[red]x", "labels": ["[bold]y"]})
    assert rows[0][0] == "[red]x"
    assert any(row[0] == "[bold]y" for row in rows)
    metrics = metrics_record()
    del metrics["counts"]
    with refused("metrics.json", "counts", by=DataError):
        shown(None, metrics)


THIN = "\u202f"


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (formats.area, {None: "—", 0.81249: "0.812"}),
        (formats.interval, {None: "—", (0.7, 0.85): "0.700–0.850"}),
        (formats.count, {None: "—", 12480: "12,480"}),
        (formats.date_time, {None: "—"}),
        (formats.size, {0: "0 B", 999: "999 B", 1500: "1.5 kB", 28_100_000: "28.1 MB", 2e9: "2 GB"}),
        (
            formats.duration,
            {None: "—", 0.4567: "0.457 s", 119: "119 s", 125: "2 min 5 s", 7199.9: "2 h 0 min"},
        ),
        (formats.percent, {None: "—", 0: "0 %", 0.001: "<1 %", 0.625: "62 %", 0.9999: ">99 %", 1.0: "100 %"}),
        (formats.spans, {(5, 1, 3, 4, 8, 9): "1, 3–5, 8–9"}),
        (formats.setting, {"adam": "adam", 1e-4: "0.0001", True: "true", None: "null", (1, 2): "[1, 2]"}),
    ],
)
def test_numbers_have_sensible_digits_and_units(write: Any, texts: dict[Any, str]) -> None:
    for value, text in texts.items():
        assert write(value).replace(THIN, " ") == text
