"""The images of all sites of a study, side by side: what differs, and what is there twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from suture.core.escaping import number_of
from suture.data.config import SiteConfig
from suture_prepare.quality import Case, Document, Findings

_FAR = 40.0
"""Gray levels between the mean of a site and that of the others from which on it is told."""

_TIMES = 2.0
"""How many times larger or smaller the images of a site are than the others', from which on it is told."""

_SHOWN = 3


SUMMARY = ("pixels", "depth", "channels", "gray levels")
"""What is said of a site's images: width and height; bits of a stored value, and how they are read; gray or
colour; and the levels that a model sees, 0 to 255."""


@dataclass(frozen=True)
class Shared:
    """Images that are at several sites.

    Attributes:
        images: how many.
        torn: how many of them one site trains on and another measures with.
        examples: a few of them, the torn ones first, each with the sites that have it.
    """

    images: int
    torn: int
    examples: tuple[tuple[tuple[str, Case], ...], ...]

    @property
    def noun(self) -> str:
        """What they are."""
        return "document" if any(isinstance(case, Document) for _, case in self.examples[0]) else "image"


def summarise(found: Findings, config: SiteConfig) -> dict[str, str]:
    """Return the images of a site in words, by `SUMMARY`; nothing where none can be read, as of text."""
    facts = [picture.facts for picture in found.pictures]
    if not facts:
        return {}
    sizes = sorted({(one.width, one.height) for one in facts}, key=lambda size: size[0] * size[1])
    pixels = " to ".join(f"{width} × {height}" for width, height in dict.fromkeys((sizes[0], sizes[-1])))
    depths = Counter(one.bits for one in facts)
    depth = ", ".join(
        f"{n:,} of {bits} bits" if len(depths) > 1 else f"{bits} bits" for bits, n in sorted(depths.items())
    )
    if highest := [one.highest for one in facts if one.highest is not None]:
        read = f", read as {config.data.bits}" if config.data.bits and 16 in depths else ""
        depth += f"{read}; values to {max(highest):,}"
    coloured = sum(one.colour for one in facts)
    how = "colour" if config.data.color else "gray"
    channels = f"{coloured:,} of {len(facts):,} in colour, read as {how}" if coloured else "gray"
    means = sorted(one.mean for one in facts)
    levels = f"mean {sum(means) / len(means):.0f}; images from {means[0]:.0f} to {means[-1]:.0f}"
    return dict(zip(SUMMARY, (pixels, depth, channels, levels), strict=True))


def differences(findings: Mapping[str, Findings]) -> Iterator[str]:
    """Yield a warning for what differs between the images of the sites and matters to one model."""
    facts = {site: [p.facts for p in found.pictures] for site, found in findings.items() if found.pictures}
    sides = {site: median(max(one.width, one.height) for one in of) for site, of in facts.items()}
    for site in _outliers(sides, lambda a, b: max(a, b) >= _TIMES * min(a, b)):
        yield (
            f"{site}: the longer side of its images has {sides[site]:.0f} pixels in the median, "
            f"elsewhere {_elsewhere(sides, site)}: after resizing, their sharpness differs"
        )
    means = {site: sum(one.mean for one in of) / len(of) for site, of in facts.items()}
    for site in _outliers(means, lambda a, b: abs(a - b) > _FAR):
        yield (
            f"{site}: the mean gray level of its images is {means[site]:.0f}, elsewhere "
            f"{_elsewhere(means, site)}; look at them on the page: window, inversion or [data] bits?"
        )
    depths = {site: Counter(one.bits for one in of).most_common(1)[0][0] for site, of in facts.items()}
    if min(depths.values(), default=8) <= 8 < max(depths.values(), default=8):
        few, deep = ([s for s, bits in depths.items() if (bits > 8) == more] for more in (False, True))
        yield (
            f"stored with 8 bits: {', '.join(few)}; with more: {', '.join(deep)}. Copies of 8 bits often "
            "have a window or contrast applied that the others lack; compare them on the page"
        )


def _outliers(values: Mapping[str, float], far: Callable[[float, float], bool]) -> list[str]:
    """The sites whose value is far from the median of the others'; of two sites, the first alone."""
    found = [
        site
        for site, value in values.items()
        if len(values) > 1 and far(value, median(other for name, other in values.items() if name != site))
    ]
    return found[:1] if len(values) == 2 else found


def _elsewhere(values: Mapping[str, float], site: str) -> str:
    others = sorted(value for name, value in values.items() if name != site)
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (others[0], others[-1])))


def find_shared(findings: Mapping[str, Findings]) -> Shared:
    """Find what is at several sites: images of the same pixels, or the same bytes of the file; documents."""
    same: dict[bytes, list[tuple[str, Case]]] = {}
    for site, found in findings.items():
        for case in found.cases:
            for digest in {case.facts.pixels, case.facts.file}:
                same.setdefault(digest, []).append((site, case))
    groups = {
        frozenset((site, picture.name) for site, picture in group): tuple(group)
        for digest, group in same.items()
        if len({site for site, _ in group}) > 1 and _tells(digest, group)
    }
    ordered = sorted(groups.values(), key=lambda group: not _is_torn(group))
    return Shared(len(ordered), sum(map(_is_torn, ordered)), tuple(ordered[:_SHOWN]))


def _tells(digest: bytes, group: list[tuple[str, Case]]) -> bool:
    """Whether a group says more than that of its pixels: equal files that sites read differently do."""
    pixels = {picture.facts.pixels for _, picture in group}
    return pixels == {digest} or len(pixels) > 1


def _is_torn(group: tuple[tuple[str, Case], ...]) -> bool:
    """Whether a site trains on an image that another measures with."""
    trained = {site for site, picture in group if picture.split == "train"}
    measured = {site for site, picture in group if picture.split in ("validation", "test")}
    return any(a != b for a in trained for b in measured)


def describe(found: Shared) -> str:
    """Return how many images are at several sites, and a few of them."""
    examples = "; ".join(
        " = ".join(f"{picture.name!r} of {site} ({picture.split})" for site, picture in group[:_SHOWN])
        for group in found.examples
    )
    how_many = f"{number_of(found.images, found.noun)} {'is' if found.images == 1 else 'are'}"
    more = "; …" if found.images > len(found.examples) else ""
    return f"{how_many} at several sites: {examples}{more}"
