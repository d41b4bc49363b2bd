"""The data of all sites of a study, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table as Grid

from suture.core.labels import lookalikes
from suture.data.config import SiteConfig
from suture.data.quality import Count, Findings
from suture.data.table import SPLITS, Split
from suture.simulation.site_images import (
    ROWS,
    ImageSummary,
    Shared,
    describe,
    differences,
    shared,
    summarise,
)

SAY: dict[Split, str] = {"validation": "the selection of the round", "test": "the final figures"}
"""What a split of a site has a say in."""


@dataclass(frozen=True)
class Together:
    """What only shows when sites are compared.

    Attributes:
        problems: what stops a run.
        warnings: what a person should know.
        images: a summary for each site; None where its data are text, or no image can be read.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    images: Mapping[str, ImageSummary | None] = field(default_factory=dict)


def compare(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], job_fault: str | None = None
) -> Together:
    """Compare the sites of a study.

    Args:
        configs, findings: of each site.
        job_fault: what is wrong with the job, if anything is.
    """
    images = {site: summarise(found, configs[site]) for site, found in findings.items()}
    twins = shared(findings)
    problems = [*filter(None, [job_fault]), *_problems(configs, findings), *_torn(twins)]
    return Together(tuple(problems), tuple(_warnings(configs, findings, twins)), images)


def _owners(findings: Mapping[str, Findings]) -> dict[str, list[str]]:
    """The sites that annotate each class."""
    owners: dict[str, list[str]] = {}
    for site, found in findings.items():
        for label in found.counts:
            owners.setdefault(label, []).append(site)
    return owners


def _problems(configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings]) -> Iterator[str]:
    owners = _owners(findings)
    for a, b in lookalikes(owners):
        yield (
            f"{a!r} ({', '.join(owners[a])}) and {b!r} ({', '.join(owners[b])}) look alike. If they are one "
            f'class, write under [data.synonyms] of {owners[b][0]}: "{b}" = "{a}"; if not, in job.toml: '
            f'accept_labels = ["{b}"]'
        )
    if len({config.data.color for config in configs.values()}) > 1:
        yield "some sites read images in colour and some in gray; set [data] color alike at all"
    if not any(
        found.images.get("validation", 0) >= max(configs[site].privacy.min_loss, 1)
        for site, found in findings.items()
    ):
        yield (
            "no site has enough validation images for its [privacy] min_loss, so no round can be selected; "
            'lower it, or set selection = "last" in job.toml'
        )


def _torn(twins: Shared) -> Iterator[str]:
    if twins.torn:
        yield (
            f"{describe(twins)}. {twins.torn:,} of them: for training at one site and for validation or test "
            "at another, so the figures would be of images that the model has learned; leave the split of "
            "such a row blank at one of the sites, or remove the row"
        )


def _warnings(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], twins: Shared
) -> Iterator[str]:
    yield from _unmeasured(findings)
    if twins.images and not twins.torn:
        yield f"{describe(twins)}. Each counts once for each site"
    yield from differences(findings)
    for site, found in findings.items():
        for split, what in SAY.items():
            if found.images and not found.images.get(split):
                yield f"{site} has no {split} images: it has no say in {what}"
        n, least = found.images.get("validation", 0), configs[site].privacy.min_loss
        if 0 < n < least:
            yield (
                f"{site} has {n} validation images, fewer than its [privacy] min_loss = {least}: it sends no "
                "loss, by which rounds are selected"
            )


def _unmeasured(findings: Mapping[str, Findings]) -> Iterator[str]:
    """Classes without a positive image in a split, anywhere or at a site that annotates them."""
    lacking: dict[tuple[str, Split], list[str]] = {}
    for label, sites in _owners(findings).items():
        for split in SAY:
            without = [site for site in sites if not findings[site].counts[label][split].positives]
            if len(without) == len(sites):
                yield f"{label!r}: no site has a positive {split} image, so it is not measured"
                continue
            for site in without:
                if findings[site].images.get(split):
                    lacking.setdefault((site, split), []).append(label)
    for (site, split), labels in lacking.items():
        yield (
            f"{site} has no positive {split} image of {', '.join(map(repr, labels))}: in {SAY[split]}, "
            f"{'it is' if len(labels) == 1 else 'they are'} measured at other sites alone"
        )


def render_matrix(findings: Mapping[str, Findings], together: Together) -> RenderableType:
    """Render classes by sites: present / absent / unknown images over all splits."""
    grid = Grid(title="Images of each class at each site: present / absent / unknown")
    grid.add_column("class")
    for site, found in findings.items():
        grid.add_column(f"{escape(site)}\n{sum(found.images.values()):,} images", justify="right")
    for label, cells in matrix(findings).items():
        grid.add_row(escape(label), *map(_cell, cells))
    lines = [f"[bold red]problem[/] {escape(text)}" for text in together.problems]
    lines += [f"[bold yellow]warning[/] {escape(text)}" for text in together.warnings]
    grids = [grid, _image_grid(together)] if any(together.images.values()) else [grid]
    return Group(*grids, *lines)


def _image_grid(together: Together) -> Grid:
    grid = Grid(title="Images of each site")
    grid.add_column("")
    for site in together.images:
        grid.add_column(escape(site), justify="right")
    for key, name in ROWS.items():
        grid.add_row(name, *(getattr(summary, key, "–") for summary in together.images.values()))
    return grid


def matrix(findings: Mapping[str, Findings]) -> dict[str, list[Count | None]]:
    """Return, for each class, the labels of each site over all splits; None where a site lacks the class."""
    labels = sorted({label for found in findings.values() for label in found.counts})
    return {label: [_count(found, label) for found in findings.values()] for label in labels}


def _count(found: Findings, label: str) -> Count | None:
    if label not in found.counts:
        return None
    of = [found.counts[label][split] for split in SPLITS]
    return Count(*(sum(getattr(c, kind) for c in of) for kind in ("positives", "negatives", "unknown")))


def _cell(count: Count | None) -> str:
    return f"{count.positives:,} / {count.negatives:,} / {count.unknown:,}" if count else "–"
