"""The data of all sites of a study, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table as Grid

from suture.core.labels import lookalikes
from suture.data.config import SiteConfig
from suture.data.quality import Findings
from suture.data.table import SPLITS, Split
from suture.protocol.privacy import PrivacyConfig

SAY: dict[Split, str] = {"validation": "the selection of the round", "test": "the final figures"}
"""What a split of a site has a say in."""


@dataclass(frozen=True)
class Together:
    """What only shows when sites are compared.

    Attributes:
        problems: what stops a run.
        warnings: what a person should know.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def compare(configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings]) -> Together:
    """Compare the sites of a study.

    Args:
        configs, findings: of each site.
    """
    return Together(tuple(_problems(configs, findings)), tuple(_warnings(configs, findings)))


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
        _behind_the_loss(found, configs[site].privacy) >= max(configs[site].privacy.min_loss, 1)
        for site, found in findings.items()
    ):
        yield (
            "no site has enough validation images for its [privacy] min_loss and min_count, so no round can "
            'be selected; lower them, or set selection = "last" in job.toml'
        )


def _warnings(configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings]) -> Iterator[str]:
    for label, sites in _owners(findings).items():
        for split in SAY:
            if not any(findings[site].counts[label][split].positives for site in sites):
                yield f"{label!r}: no site has a positive {split} image, so it is not measured"
    for site, found in findings.items():
        for split, what in SAY.items():
            if found.images and not found.images.get(split):
                yield f"{site} has no {split} images: it has no say in {what}"
        limits = configs[site].privacy
        n, least = _behind_the_loss(found, limits), limits.min_loss
        if found.images.get("validation") and n < least:
            yield (
                f"{site} has {n} validation images of classes with [privacy] min_count = {limits.min_count} "
                f"present and absent ones, fewer than min_loss = {least}: it sends no loss, by which rounds "
                "are selected"
            )


def _behind_the_loss(found: Findings, limits: PrivacyConfig) -> int:
    """The largest number of validation images that a site's loss may be of: withheld classes do not count."""
    of = [counts["validation"] for counts in found.counts.values()]
    shown = [c for c in of if min(c.positives, c.negatives) >= limits.min_count]
    return min(found.images.get("validation", 0), sum(c.positives + c.negatives for c in shown))


def render_matrix(findings: Mapping[str, Findings], together: Together) -> RenderableType:
    """Render classes by sites: present / absent / unknown images over all splits."""
    grid = Grid(title="Images of each class at each site: present / absent / unknown")
    grid.add_column("class")
    for site, found in findings.items():
        grid.add_column(f"{escape(site)}\n{sum(found.images.values()):,} images", justify="right")
    labels = sorted({label for found in findings.values() for label in found.counts})
    for label in labels:
        grid.add_row(escape(label), *(_cell(found, label) for found in findings.values()))
    lines = [f"[bold red]problem[/] {escape(text)}" for text in together.problems]
    lines += [f"[bold yellow]warning[/] {escape(text)}" for text in together.warnings]
    return Group(grid, *lines)


def _cell(found: Findings, label: str) -> str:
    if label not in found.counts:
        return "–"
    of = [found.counts[label][split] for split in SPLITS]
    present, absent = sum(c.positives for c in of), sum(c.negatives for c in of)
    return f"{present:,} / {absent:,} / {sum(c.unknown for c in of):,}"
