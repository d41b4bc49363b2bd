"""Further plots of a table: of its data, and of one of its models; what is left out, and why."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from official import write_chexpert, write_nih
from suture.cli import app
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.tables.conduct import Session
from suture_papers.tables.figures import existing_plots, write_plots
from suture_papers.tables.loading import load_spec
from suture_papers.tables.results import ResultStore
from suture_papers.tables.runs import final_runs

TEXT = """
title = "Two methods"
source = "nowhere"
job = "demo"
reference = "ours"
columns = [{ name = "NIH", test = "nih" }]

[rows.ours]
name = "Surgical Aggregation"
set = { method = "surgical" }

[tests.nih.data]
dataset = "nih"
root = "{data}/nih/images"
table = "{data}/nih/Data_Entry_2017.csv"
split = "patients"

[tests.chexpert.data]
dataset = "chexpert"
root = "{data}/chexpert"
table = "{data}/chexpert/train.csv"
split = "patients"

[drawings.frequencies]
of = "frequencies"
sources = ["nih", "chexpert"]
source = "Fig. 4a"

[drawings.together]
of = "cooccurrence"
sources = ["nih"]

[drawings.features]
of = "features"
row = "ours"
sources = ["nih", "chexpert"]

[drawings.related]
of = "predictions"
row = "ours"
sources = ["nih", "chexpert"]

[presets.tiny]
note = "for tests"
seeds = [1]
"""


class House:
    """A table's file, its data, and the model that its one run left."""

    def __init__(self, folder: Path) -> None:
        self.path, self.results = folder / "two.toml", folder / "results"
        self.path.write_text(TEXT)
        write_nih(folder / "data" / "nih")
        write_chexpert(folder / "data" / "chexpert")
        self.spec = load_spec(str(self.path))
        self.table = self.spec.preset(None)
        self.reported: list[str] = []
        self.root, self.work = folder / "data", folder / "work"
        self.run = next(final_runs(self.table, {}))
        spec = ModelSpec("cnn", size=16)
        labels = LabelSet((*NIH.names, *(name for name in CHEXPERT.names if name not in NIH)))
        self.model = self.work / self.run.name / "model"
        save_model(build(spec, labels, 1, pretrained=False), spec, self.model, {})

    def session(self) -> Session:
        return Session(ResultStore(self.results / "runs", "two"), self.work, self.root, self.reported.append)

    def draw(self) -> dict[str, bytes]:
        self.reported.clear()
        write_plots(self.table, self.session(), self.results, "two")
        return {path.name: path.read_bytes() for path in self.results.glob("*.svg")}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.complete
def test_data_and_a_model_are_drawn_and_shown_with_what_they_are(house: House) -> None:
    found = house.draw()
    assert set(found) == {f"two-{name}.svg" for name in ("frequencies", "together", "features", "related")}
    for name in ("Hernia", "Support Devices", "nih", "chexpert"):  # texts of an SVG are text
        assert name.encode() in found["two-frequencies.svg"]
    assert b"patients" in found["two-together.svg"] or b"images" in found["two-together.svg"]
    assert b"Lung Lesion" in found["two-related.svg"]
    assert existing_plots(house.spec, house.results, "two") == {
        "two-frequencies.svg": "How often each class occurs (Fig. 4a)",
        "two-together.svg": "Which classes occur together in nih",
        "two-features.svg": "Features of test images",
        "two-related.svg": "Predictions of related classes",
    }


@pytest.mark.complete
def test_a_model_is_drawn_again_only_when_it_is_younger(house: House) -> None:
    house.draw()
    house.draw()
    assert [line for line in house.reported if "features" in line or "related" in line] == []
    later = (house.results / "two-features.svg").stat().st_mtime + 5
    os.utime(house.model / "model.json", (later, later))
    house.draw()
    assert sum("features" in line or "related" in line for line in house.reported) == 2


def test_without_data_or_model_a_plot_is_left_out_by_name(house: House) -> None:
    (house.model / "model.json").unlink()
    (house.root / "chexpert/train.csv").unlink()
    assert set(house.draw()) == {"two-together.svg"}
    assert [line for line in house.reported if "'features'" in line] == [
        "warning: plot 'features' is left out: there is no {data}/chexpert/train.csv"
    ]


def test_a_lost_model_is_reported_with_the_remedy(house: House) -> None:
    (house.model / "model.json").unlink()
    assert set(house.draw()) == {"two-frequencies.svg", "two-together.svg"}
    assert any("holds no model; delete the run's line in" in line for line in house.reported)


@pytest.mark.complete
def test_the_page_shows_the_plots_with_their_captions(house: House) -> None:
    house.draw()
    words = ["table", str(house.path), "--results", str(house.results), "--render"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page = (house.results / "two.html").read_text()
    assert page.count("<svg") == 1
    assert page.count('<img src="data:image/svg+xml;base64,') == 4
    assert page.count("<figcaption") == 5
    assert "How often each class occurs (Fig. 4a)</figcaption>" in page
    assert "<svg" not in (house.results / "two.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('sources = ["nih"]', 'sources = ["nih", "chexpert"]', "of one source"),
        ('sources = ["nih"]', 'sources = ["nhi"]', "nih"),
        ('sources = ["nih"]', "sources = []", "sources"),
        ('of = "features"\nrow = "ours"', 'of = "features"', "name its row"),
        ('of = "features"\nrow = "ours"', 'of = "features"\nrow = "hours"', "ours"),
        ('of = "cooccurrence"', 'of = "cooccurrence"\nrow = "ours"', "are of data"),
        ("seeds = [1]", 'seeds = [1]\n[series]\nkey = "rounds"\nvalues = [1]\nlabel = "rounds"', "series"),
    ],
)
def test_what_a_plot_cannot_be_of_is_refused(
    old: str, new: str, named: str, house: House, tmp_path: Path
) -> None:
    (tmp_path / "wrong.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=named):
        load_spec(str(tmp_path / "wrong.toml"))


def test_a_row_that_the_preset_skips_is_not_existing_plots(house: House, tmp_path: Path) -> None:
    more = '[rows.other]\nname = "Vanilla FL"\nset = { method = "vanilla" }\n\n[tests.nih.data]'
    text = TEXT.replace("[tests.nih.data]", more).replace('row = "ours"', 'row = "other"')
    (tmp_path / "skips.toml").write_text(text + 'skip = ["other"]\n')
    spec: Any = load_spec(str(tmp_path / "skips.toml"))
    write_plots(spec.preset(None), house.session(), house.results, "skips")
    assert any("skips its row 'other'" in line for line in house.reported)
    assert not (house.results / "skips-features.svg").exists()


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
    words = ["table", str(house.path), "--results", str(house.results), "--render"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    page = (house.results / "two.html").read_text()
    assert "alert" not in page
    assert (b64encode(script.encode()).decode() in page) == (kind == "svg")
