"""The atlas of a study as a page."""

from __future__ import annotations

import datetime
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.ontology import Atlas, Decision
from suture.data.table import Table
from suture_prepare.atlas_page import Cell, _cells, all_relations, write_atlas_page
from suture_prepare.study_labels import study_lists

NAN = np.nan


def table(names: list[str], y: list[list[float]], **kind: str) -> Table:
    n = len(y)
    return Table(
        LabelSet.of(names, **kind),  # type: ignore[arg-type]
        tuple(f"{i}.png" for i in range(n)),
        tuple(f"p{i}" for i in range(n)),
        np.array(y, dtype=np.float32),
        ("train",) * n,
        Path(),
    )


def page(tmp_path: Path, tables: dict[str, Table], atlas: Atlas) -> str:
    path = tmp_path / "atlas.html"
    write_atlas_page(path, "Study <i>", tables, study_lists(tables, atlas), atlas)
    return path.read_text()


def test_what_a_site_says_of_its_classes_and_of_their_parents() -> None:
    """Consolidation 1 implies Lung Opacity; Lung Opacity 0 implies no Edema; Lesion is in no list."""
    y = [[NAN, 1, NAN], [0, NAN, NAN], [1, 0, 1]]
    own = table(["Lung Opacity", "Consolidation", "Edema"], y)
    cells, torn = _cells(own, own.labels.names, all_relations(Atlas()))
    assert torn == 0
    assert cells == {
        "Lung Opacity": Cell(True, 2, 1, 1),
        "Consolidation": Cell(True, 1, 2, 1),
        "Edema": Cell(True, 1, 1, 1),
    }
    kinds = table(["Consolidation"], [[1], [0], [NAN]])
    cells, _ = _cells(kinds, kinds.labels.names, all_relations(Atlas()))
    assert cells == {"Lung Opacity": Cell(False, 1, 0, 1), "Consolidation": Cell(True, 1, 1, 0)}


def test_contradictory_images_are_told_and_multiclass_labels_imply_nothing() -> None:
    torn = table(["Lung Opacity", "Consolidation"], [[0, 1], [1, 1]])
    cells, number = _cells(torn, torn.labels.names, all_relations(Atlas()))
    assert (number, cells["Consolidation"]) == (1, Cell(True, 1, 0, 0))
    one = table(["Melanoma", "Melanocytic Nevus"], [[1, 0], [0, 1]], label_type="multiclass")
    cells, _ = _cells(one, one.labels.names, all_relations(Atlas()))
    assert cells == {"Melanoma": Cell(True, 1, 1, 0), "Melanocytic Nevus": Cell(True, 1, 1, 0)}


def test_relations_of_a_study_that_contradict_built_in_ones_go_first() -> None:
    atlas = Atlas(parents={"Lung Opacity": ("Consolidation",)})
    assert all_relations(atlas).parents == {"Lung Opacity": ("Consolidation",)}


def test_the_page_shows_tree_proposals_and_decisions(tmp_path: Path) -> None:
    on = datetime.date(2026, 11, 25)
    decided = Decision(name="Lesion", relation="same", of="Lung Lesion", by="M. Ruiz", on=on)
    tables = {
        "alpha": table(["Lesion", "Cardiomegali"], [[1, 0]]),
        "beta": table(["Nodule", "Cardiomegaly"], [[1, 1]]),
    }
    text = " ".join(page(tmp_path, tables, Atlas(decisions=(decided,))).split())
    assert "2 sites with 4 classes; 1 open proposal, 1 decision." in text
    assert re.search(r'<td class="own"[^>]*>1</td><td class="one"[^>]*>≥ 1</td><td>1</td>', text)
    assert "Cardiomegali</td><td>the same as</td>" in text
    assert "M. Ruiz" in text
    assert "2026-11-25" in text


@pytest.mark.parametrize("sites", [2, 12])
def test_names_of_others_are_text_and_the_page_needs_no_other_file(tmp_path: Path, sites: int) -> None:
    hostile = ["<script>alert(1)<script>", "'><img onerror='x' src=y>", "&lt<b>spot"]
    by = '"><svg onload=x>'
    values = {"name": hostile[0], "of": "Big <b>", "by": by, "on": datetime.date(2026, 11, 25)}
    atlas = Atlas(decisions=(Decision(relation="child", **values),), exclusive=((hostile[1], hostile[2]),))  # type: ignore[arg-type]
    tables = {f"site{i} <b>": table([*hostile, f"Spot {i}"], [[1, 0, 1, 0]]) for i in range(sites)}
    found: list[tuple[str, dict[str, str | None]]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    text = page(tmp_path, tables, atlas)
    Tags().feed(text)
    assert not {"script", "img", "svg", "b", "i", "link", "iframe"} & {tag for tag, _ in found}
    assert not any(name.startswith("on") or name in {"src", "href"} for _, own in found for name in own)
    assert "url(" not in text
    assert "@import" not in text
    assert "&amp;lt&lt;b&gt;spot" in text


def test_two_classes_of_a_site_that_the_file_makes_one_are_told() -> None:
    on = datetime.date(2026, 11, 25)
    decided = Decision(name="Lesion", relation="same", of="Spot", by="M. Ruiz", on=on)
    with pytest.raises(ConfigError, match=r"alpha has two classes that labels.toml makes one, 'Spot'"):
        study_lists({"alpha": table(["Lesion", "Spot"], [[1, 0]])}, Atlas(decisions=(decided,)))
