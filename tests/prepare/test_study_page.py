"""suture_prepare.study_page: the check of a study as a page."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hospitals import image, table
from suture.core.errors import DiskError
from suture.data.inspection import ImageFacts
from suture.execution.study import StudySites
from suture_prepare.new_study import look, write_study
from suture_prepare.quality import Picture, check
from suture_prepare.study_check import compare
from suture_prepare.study_page import EXAMPLES, choose, job_of, write_page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A site whose file names and labels are HTML, and one with 12-bit values in 16-bit files."""
    for site, top in (("alpha", 255), ("beta", 4095)):
        rows = [["image", "patient", "split", "Mass", HOSTILE]]
        for i in range(12):
            name = f"{i}<b>&.png"
            image(tmp_path / site / "images" / name, i + top, top)
            rows.append([name, f"p{i}", ("train", "validation", "test")[i % 3], str(i % 2), "0"])
        table(tmp_path / site / "labels.csv", rows)
    write_study(tmp_path / "study", look({site: tmp_path / site for site in ("alpha", "beta")}))
    return tmp_path / "study"


def page_of(study: Path) -> str:
    configs = StudySites(str(study)).configs()
    findings = {site: check(config) for site, config in configs.items()}
    return write_page(study, job_of(study)[0], configs, findings, compare(configs, findings)).read_text()


def shown(page: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


def test_a_page_shows_images_as_the_model_sees_them(study: Path) -> None:
    job = study / "job.toml"
    job.write_text(job.read_text().replace("size = 64", "size = 32"))
    images = shown(page_of(study))
    assert len(images) == 2 * EXAMPLES
    assert {found.shape for found in images} == {(32, 32)}
    assert all(100 < found[8:24, 8:24].mean() < 155 for found in images), "12-bit values are not nearly black"


def test_a_page_needs_nothing_else_escapes_and_says_that_it_stays(study: Path) -> None:
    one, *others = (study.parent / "alpha" / "images" / f"{i}<b>&.png" for i in (1, 4, 7))
    for other in others:
        other.write_bytes(one.read_bytes())
    page = page_of(study)
    assert " = ".join(f"{i}&lt;b&gt;&amp;.png" for i in (1, 4, 7)) in page  # of the same pixels
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert "0&lt;b&gt;&amp;.png" in page
    assert not re.search(r"(src|href)=\"(?!data:)|<script|url\(|@import", page)
    assert "keep it on this machine" in page
    assert (study / "check.html").stat().st_mode & 0o777 == 0o600
    assert page.index("keep it on this machine") < page.index("<main>")
    for text in ("alpha", "beta", "train", "Mass", "16 bits, read as 12"):
        assert text in page


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
    assert job
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
    assert len(choose(pictures[:4])) == 4
    assert choose([]) == []
