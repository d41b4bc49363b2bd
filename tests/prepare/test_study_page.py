"""suture_prepare.study_page and .atlas_page: the check and the atlas of a study as pages."""

from __future__ import annotations

import base64
import datetime
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hospitals import site
from suture.core.errors import ConfigError, DiskError
from suture.core.labels import LabelSet
from suture.core.ontology import Atlas, Decision
from suture.data.table import Table
from suture.execution.study import StudySites
from suture_prepare.atlas_page import Cell, _cells, all_relations, write_atlas_page
from suture_prepare.new_study import look, write_study
from suture_prepare.quality import Picture, check
from suture_prepare.study_check import compare
from suture_prepare.study_labels import study_lists
from suture_prepare.study_page import EXAMPLES, choose, job_of, write_page
from suture_results.inspection import ImageFacts
from world import refused

NAN = np.nan
HOSTILE = "<script>alert(1)</script>"
DAY = datetime.date(2026, 11, 25)


class Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def assert_harmless(text: str) -> None:
    """A page runs no program and needs no other file."""
    page = Page(text)
    assert not {"script", "svg", "link", "iframe"} & page.tags
    assert not any(name.startswith("on") for name in page.attributes)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert not re.search(r"url\(|@import", text)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A site whose file names and labels are HTML, and one with 12-bit values in 16-bit files."""
    header = ["image", "patient", "split", "Mass", HOSTILE]
    for name, top in (("alpha", 255), ("beta", 4095)):
        rows = [
            [f"{i}<b>&.png", f"p{i}", ("train", "validation", "test")[i % 3], i % 2, 0] for i in range(12)
        ]
        site(tmp_path / name, header, *rows, seed=top, top=top)
    write_study(tmp_path / "study", look({name: tmp_path / name for name in ("alpha", "beta")}))
    return tmp_path / "study"


def page_of(study: Path) -> str:
    configs = StudySites(str(study)).configs()
    findings = {site: check(config) for site, config in configs.items()}
    return write_page(study, job_of(study)[0], configs, findings, compare(configs, findings)).read_text()


def test_a_page_shows_images_as_the_model_sees_them(study: Path) -> None:
    job = study / "job.toml"
    job.write_text(job.read_text().replace("size = 64", "size = 32"))
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page_of(study))
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]
    assert len(images) == 2 * EXAMPLES
    assert {found.shape for found in images} == {(32, 32)}
    assert all(100 < found[8:24, 8:24].mean() < 155 for found in images), "12-bit values are not nearly black"


def test_a_page_escapes_names_and_is_private(study: Path) -> None:
    one, *others = (study.parent / "alpha" / "images" / f"{i}<b>&.png" for i in (1, 4, 7))
    for other in others:
        other.write_bytes(one.read_bytes())
    page = page_of(study)
    assert " = ".join(f"{i}&lt;b&gt;&amp;.png" for i in (1, 4, 7)) in page  # of the same pixels
    assert_harmless(page)
    assert all(
        text in page for text in ("&lt;script&gt;", "alpha", "beta", "train", "Mass", "16 bits, read as 12")
    )
    assert (study / "check.html").stat().st_mode & 0o777 == 0o600


def test_a_page_is_whole_or_the_old_one(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = page_of(study)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskError):
        page_of(study)
    assert (study / "check.html").read_text() == before
    assert not list(study.glob(".*"))


def test_the_size_is_that_of_the_job(study: Path) -> None:
    file = study / "job.toml"
    file.write_text(file.read_text().replace("size = 64", "size = 48"))
    job, fault = job_of(study)
    assert job is not None
    assert (job.model.size, fault) == (48, None)
    assert "48 × 48" in page_of(study)
    file.write_text(file.read_text().replace("size = 48", "size = 2"))
    job, fault = job_of(study)
    assert job is None
    assert "size" in str(fault)
    assert "64 × 64" in page_of(study)
    file.unlink()
    assert job_of(study) == (None, None)


def test_a_few_images_of_each_class_are_chosen() -> None:
    facts = ImageFacts(b"", b"", 1, 1, 8, None, colour=False, mean=0.0, brightest=0)
    pictures = [
        Picture(str(i), "train", {7: ("Mass",), 98: ("Edema", "Mass")}.get(i, ()), facts) for i in range(99)
    ]
    names = [picture.name for picture in choose(pictures)]
    assert len(names) == EXAMPLES
    assert {"7", "98"} <= set(names)
    assert (len(choose(pictures[:4])), choose([])) == (4, [])


# The atlas


def table(names: list[str], y: list[list[float]], **kind: str) -> Table:
    n = len(y)
    images, patients = (tuple(f"{letter}{i}" for i in range(n)) for letter in "ip")
    labels = LabelSet.of(names, **kind)  # type: ignore[arg-type]
    return Table(labels, images, patients, np.array(y, dtype=np.float32), ("train",) * n, Path())


def cells(names: list[str], y: list[list[float]], **kind: str) -> tuple[dict[str, Cell], int]:
    own = table(names, y, **kind)
    return _cells(own, own.labels.names, all_relations(Atlas()))


def atlas_page(tmp_path: Path, tables: dict[str, Table], atlas: Atlas) -> str:
    path = tmp_path / "atlas.html"
    write_atlas_page(path, "Study <i>", tables, study_lists(tables, atlas), atlas)
    return path.read_text()


def test_what_a_site_says_of_its_classes_and_of_their_parents() -> None:
    """Consolidation 1 implies Lung Opacity; Lung Opacity 0 implies no Edema; Lesion is in no list."""
    names = ["Lung Opacity", "Consolidation", "Edema"]
    counts = (Cell(True, 2, 1, 1), Cell(True, 1, 2, 1), Cell(True, 1, 1, 1))
    assert cells(names, [[NAN, 1, NAN], [0, NAN, NAN], [1, 0, 1]]) == (
        dict(zip(names, counts, strict=True)),
        0,
    )
    kinds, _ = cells(["Consolidation"], [[1], [0], [NAN]])
    assert kinds == {"Lung Opacity": Cell(False, 1, 0, 1), "Consolidation": Cell(True, 1, 1, 0)}
    torn, number = cells(["Lung Opacity", "Consolidation"], [[0, 1], [1, 1]])
    assert (number, torn["Consolidation"]) == (1, Cell(True, 1, 0, 0))
    one, _ = cells(["Melanoma", "Melanocytic Nevus"], [[1, 0], [0, 1]], label_type="multiclass")
    assert one == dict.fromkeys(("Melanoma", "Melanocytic Nevus"), Cell(True, 1, 1, 0)), "nothing is implied"


def test_relations_of_a_study_that_contradict_built_in_ones_go_first() -> None:
    atlas = Atlas(parents={"Lung Opacity": ("Consolidation",)})
    assert all_relations(atlas).parents == {"Lung Opacity": ("Consolidation",)}


def test_the_page_shows_tree_proposals_and_decisions(tmp_path: Path) -> None:
    decided = Decision(name="Lesion", relation="same", of="Lung Lesion", by="M. Ruiz", on=DAY)
    tables = {
        "alpha": table(["Lesion", "Cardiomegali"], [[1, 0]]),
        "beta": table(["Nodule", "Cardiomegaly"], [[1, 1]]),
    }
    text = " ".join(atlas_page(tmp_path, tables, Atlas(decisions=(decided,))).split())
    assert re.search(r'<td class="own"[^>]*>1</td><td class="one"[^>]*>≥ 1</td><td>1</td>', text)
    assert all(f in text for f in ("2 sites", "4 classes", "Cardiomegali</td>", "M. Ruiz", str(DAY)))


@pytest.mark.parametrize("sites", [2, 12])
def test_names_of_others_are_text(tmp_path: Path, sites: int) -> None:
    hostile = ["<script>alert(1)<script>", "'><img onerror='x' src=y>", "&lt<b>spot"]
    by = '"><svg onload=x>'
    decided = Decision(name=hostile[0], relation="child", of="Big <b>", by=by, on=DAY)
    atlas = Atlas(decisions=(decided,), exclusive=((hostile[1], hostile[2]),))
    tables = {f"site{i} <b>": table([*hostile, f"Spot {i}"], [[1, 0, 1, 0]]) for i in range(sites)}
    text = atlas_page(tmp_path, tables, atlas)
    assert_harmless(text)
    assert not {"img", "b", "i"} & Page(text).tags
    assert "&amp;lt&lt;b&gt;spot" in text


def test_two_classes_of_a_site_that_the_file_makes_one_are_refused() -> None:
    decided = Decision(name="Lesion", relation="same", of="Spot", by="M. Ruiz", on=DAY)
    with refused("alpha", "labels.toml", "'Spot'", by=ConfigError):
        study_lists({"alpha": table(["Lesion", "Spot"], [[1, 0]])}, Atlas(decisions=(decided,)))
