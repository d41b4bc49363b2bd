"""The check of a study as a page: check.html, with a few images of each site as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from suture.core.errors import DataError, SutureError
from suture.core.files import atomic_write
from suture.data.config import SiteConfig
from suture.data.decoding import decode_image, resize_pad
from suture.data.images import ImageSource
from suture.data.table import SPLITS
from suture.execution.job import Job, load_job
from suture.models import ModelSpec
from suture_prepare.quality import Findings, Picture
from suture_prepare.site_images import SUMMARY
from suture_prepare.study_check import Together, matrix
from suture_results.example_images import png_uri
from suture_results.report import templates

PAGE = "check.html"

EXAMPLES = 6
"""Images that are shown of a site."""

_MOST_UNREADABLE = 20
"""Unreadable images of a site that are named."""


def job_of(study: Path, *, trust: bool = False) -> tuple[Job | None, str | None]:
    """Return the job of a study, and its fault; None where there is none, or none that can be read."""
    folder = study.expanduser().resolve()
    if not any((folder / name).is_file() for name in ("job.py", "job.toml")):
        return None, None
    try:
        return load_job(folder, trust=trust), None
    except SutureError as error:
        return None, str(error)


def write_page(
    study: Path,
    job: Job | None,
    configs: Mapping[str, SiteConfig],
    findings: Mapping[str, Findings],
    together: Together,
) -> Path:
    """Write check.html into the folder of a study and return its path. It holds images of patients.

    Args:
        job: of the study; its model decides the size of the images. None: the default model does.
        configs, findings: of each site.
        together: what only shows when sites are compared.

    Raises:
        DiskError: the folder cannot be written to.
    """
    folder, size = study.expanduser().resolve(), (job.model if job else ModelSpec()).size
    template = templates(Path(__file__).parent).get_template("study.html")
    page = template.render(
        study=job.title if job else folder.name,
        size=size,
        findings=findings,
        together=together,
        matrix=matrix(findings),
        rows=SUMMARY,
        splits=SPLITS,
        most=_MOST_UNREADABLE,
        examples={site: list(_examples(configs[site], found, size)) for site, found in findings.items()},
    )
    atomic_write(folder / PAGE, page.encode(), private=True)  # images of patients
    return folder / PAGE


def _examples(config: SiteConfig, found: Findings, size: int) -> Iterator[tuple[Picture, str]]:
    """The images of a site that the page shows: decoded, scaled and resized, without augmentation.

    Yields:
        name, split and labels of the image, and a URI that holds it as a PNG.
    """
    chosen = choose(found.pictures)
    if not chosen:
        return
    data = config.data
    with ImageSource(data.root, data.follow_links) as source:
        for picture in chosen:
            try:
                image = decode_image(source.raw(picture.name), picture.name, data.color, data.bits)
            except DataError:
                continue  # it was readable a moment ago; the next check names it
            yield picture, png_uri(resize_pad(image, size))


def choose(pictures: Sequence[Picture]) -> list[Picture]:
    """Choose a few images: the first of each class while there is room, then others evenly over the table."""
    first: dict[str, int] = {}
    for row, picture in enumerate(pictures):
        for label in picture.present:
            first.setdefault(label, row)
    evenly = range(0, len(pictures), max(1, len(pictures) // EXAMPLES))
    rows = dict.fromkeys([*sorted(first.values()), *evenly, *range(len(pictures))])
    return [pictures[row] for row in sorted(list(rows)[:EXAMPLES])]
