import io

import pytest
from rich.console import Console

from example_run import OVERALL, metrics_record, run_record
from suture.core.errors import DataError
from suture.federation.server.selection import by_frequency
from suture.protocol.records import Metrics, Run, parse
from suture_results.tables import class_table


def shown(run: dict, metrics: dict) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(class_table(parse(Run, run, "run.json"), parse(Metrics, metrics, "metrics.json")))
    return [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]


def test_the_table_by_hand() -> None:
    rows = shown(run_record(), metrics_record())
    assert ["Edema", "harbour", "0.862", "0.827–0.894", "98"] in rows
    assert ["Pleural Effusion", "3 of 3 sites", "0.893", "0.880–0.905", "744"] in rows
    assert ["Hernia", "harbour", "—", "no positive among 2,901 labelled cases", "0"] in rows
    means = [(r[0], r[2]) for r in rows if r[0].startswith("Mean")]
    assert means == [
        ("Mean (4)", "0.816"),
        ("Mean (4)", "0.764"),
        ("Mean (with an AUROC)", "0.790"),
    ]


def test_a_class_of_few_cases_is_marked_and_comes_after_all_that_are_ranked() -> None:
    def order(counts: tuple[int, int]) -> list[str]:
        metrics = metrics_record()
        metrics["auroc"]["Edema"], metrics["counts"]["Edema"] = 0.999, counts
        rows = [r for r in shown(run_record(), metrics) if len(r) > 1 and r[1] in run_record()["sites"]]
        return [f"{r[0]} {r[2]}" for r in rows]

    assert order((10, 2000))[0] == "Edema 0.999"
    for counts in ((9, 2000), (2000, 9)):
        found = order(counts)
        assert found[-2:] == ["Edema 0.999 (few)", "Hernia —"]
        assert found[0] != found[-2]


def test_a_single_label_task_has_its_figures_below_the_mean() -> None:
    rows = shown(run_record(), metrics_record(OVERALL))
    assert [(r[0], r[2]) for r in rows if len(r) > 2][-5:] == [
        ("Mean (with an AUROC)", "0.790"),
        ("Accuracy", "0.712"),
        ("Balanced accuracy", "0.561"),
        ("Macro F1", "0.569"),
        ("Macro precision", "0.583"),
    ]


def test_groups_of_classes_have_their_accuracy_last() -> None:
    groups = by_frequency({"head": ("Edema",), "tail": ("Hernia",)}, {"Edema": 0.75, "Hernia": 0.25})
    rows = shown(run_record(), metrics_record(OVERALL) | {"long_tail": groups})
    assert [(r[0], r[2]) for r in rows if r[0].startswith("Accuracy, ")] == [
        ("Accuracy, head classes", "0.750"),
        ("Accuracy, tail classes", "0.250"),
        ("Accuracy, all classes", "0.500"),
    ]


def test_figures_that_nothing_defines_are_not_shown() -> None:
    metrics = metrics_record(dict.fromkeys(OVERALL))
    assert shown(run_record(), metrics) == shown(run_record(), metrics_record())


def test_names_are_not_markup() -> None:
    run = run_record() | {"title": "[red]x", "labels": ["[bold]y"]}
    rows = shown(run, metrics_record())
    assert rows[0][0] == "[red]x"
    assert any(r[0] == "[bold]y" for r in rows)


def test_the_caption_shows_numbers_as_people_write_them() -> None:
    run = run_record()
    (last,) = [r for r in shown(run, metrics_record() | {"n": 25_596}) if "cases" in r[0]]
    assert last[0].startswith("25,596 cases, ")
    assert "\\u" not in last[0]
    assert any(r[0].startswith("1 case, ") for r in shown(run, metrics_record() | {"n": 1}))


def test_a_long_name_is_wrapped_below_its_beginning() -> None:
    run = run_record() | {"labels": ["Word " * 40 + "end"]}
    console = Console(file=io.StringIO(), width=100)
    console.print(class_table(parse(Run, run, "run.json"), parse(Metrics, metrics_record(), "metrics.json")))
    lines = [line for line in console.file.getvalue().splitlines() if "Word" in line]  # type: ignore[attr-defined]
    assert len(lines) > 1
    assert all(line.startswith("   Word") for line in lines)


def test_a_missing_field_is_named() -> None:
    metrics = metrics_record()
    del metrics["counts"]
    with pytest.raises(DataError, match=r"metrics\.json: counts: is missing"):
        shown(run_record(), metrics)


def test_the_mean_has_its_interval_and_the_loss_a_line_where_there_are_any() -> None:
    rows = shown(run_record(), metrics_record() | {"mean_interval": [0.77, 0.81], "loss": 0.1534})
    assert [r[:4] for r in rows if len(r) > 2][-2:] == [
        ["Mean (with an AUROC)", "", "0.790", "0.770–0.810"],
        ["Loss (cross-entropy)", "", "0.153", ""],
    ]
