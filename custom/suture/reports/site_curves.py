"""The curves of a class at each site: small plots beside one another, over those of all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suture.learning.proportions import Estimate, wilson
from suture.protocol.decisions import Diagrams
from suture.reports.charts import Scale
from suture.reports.decision_charts import Points, area, precision_bars, precisions, roc_bars

SIDE = 100
"""Width and height of a small plot; both axes run from 0 to 1."""

_X, _Y = Scale(0.0, 1.0, 0.0, SIDE), Scale(0.0, 1.0, SIDE, 0.0)


@dataclass(frozen=True)
class Small:
    """A small plot as SVG paths.

    Attributes:
        line: the site's curve; of reliability, none.
        bars: 95 % intervals.
        dots: positions of filled dots: the own threshold, or the bins of reliability.
        ring: position of the threshold of all sites, where it has a place here.
    """

    line: str = ""
    bars: str = ""
    dots: tuple[tuple[float, float], ...] = ()
    ring: tuple[float, float] | None = None


@dataclass(frozen=True)
class SiteCurves:
    """A class at a site.

    Attributes:
        images: validation images with the class and without, as the site has sent them.
        own, pooled: sensitivity and specificity on them at the site's threshold and at that of all sites.
        plots: ROC, precision by recall, and reliability.
    """

    site: str
    images: tuple[int, int]
    area: float
    own: tuple[Estimate, Estimate] | None
    pooled: tuple[Estimate, Estimate] | None
    plots: tuple[Small, Small, Small]


@dataclass(frozen=True)
class ClassCurves:
    """A class at its sites.

    Attributes:
        lines: of ROC and of precision by recall over all sites, which lie under those of a site.
        sites: that have curves.
        without: sites that annotate the class and have none.
    """

    lines: tuple[str, str]
    sites: Sequence[SiteCurves]
    without: Sequence[str]


def class_curves(pooled: Diagrams, sites: Mapping[str, Diagrams], owners: Sequence[str]) -> ClassCurves:
    """Return the small plots of a class.

    Args:
        pooled: over all sites.
        sites: of each site whose counts show curves.
        owners: the sites that annotate the class.
    """
    roc, precision = _lines(pooled)
    return ClassCurves(
        (_path(roc), _path(precision)),
        [_site(site, found) for site, found in sites.items()],
        [site for site in owners if site not in sites],
    )


def _site(site: str, found: Diagrams) -> SiteCurves:
    images = found.images or (0, 0)
    return SiteCurves(
        site,
        images,
        area(found),
        _rates(found.own, images),
        _rates(found.chosen, images),
        (
            _curve(
                _lines(found)[0],
                roc_bars(found.own or found.chosen, found),
                roc_bars(found.chosen, found),
                found,
            ),
            _curve(
                _lines(found)[1],
                precision_bars(found.own or found.chosen, found),
                precision_bars(found.chosen, found),
                found,
            ),
            _reliability(found),
        ),
    )


def _rates(at: tuple[float, float] | None, images: tuple[int, int]) -> tuple[Estimate, Estimate] | None:
    return None if at is None else (wilson(at[0], images[0]), wilson(at[1], images[1]))


def _lines(found: Diagrams) -> tuple[Points, Points]:
    return [(1 - spec, sens) for sens, spec in found.rates], precisions(found.rates, found.prevalence)


def _curve(line: Points, used: Sequence[Points], chosen: Sequence[Points], found: Diagrams) -> Small:
    """Return a curve with the interval of the threshold that the site uses, a dot where it is its own."""
    own = used[-1:] if found.own else []
    ring = _at(chosen[-1][0]) if chosen else None
    return Small(_path(line), "".join(map(_path, used[:-1])), tuple(_at(one[0]) for one in own), ring)


def _reliability(found: Diagrams) -> Small:
    bars, dots = [], []
    for p, share, images in found.reliability:
        _, low, high = wilson(share, images)
        bars.append(_path([(p, low), (p, high)]))
        dots.append(_at((p, share)))
    return Small("", "".join(bars), tuple(dots))


def _at(point: tuple[float, float]) -> tuple[float, float]:
    return round(_X(point[0]), 1), round(_Y(point[1]), 1)


def _path(points: Points) -> str:
    """Return the path of an SVG along some points; what does not move is left out."""
    places = list(dict.fromkeys(f"{x:g} {y:g}" for x, y in map(_at, points)))
    return f"M{'L'.join(places)}" if len(places) > 1 else ""
