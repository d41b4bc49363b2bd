"""Which method to try on one's own data: a linear fit on federations in which all methods were measured.

Five numbers describe a federation: the share of pairs of image and class without a label, the share of
classes that one site alone annotates, the number of sites and the positives of a class (both as log2), and
how much gray levels differ between sites. z are their standardised values. With x = (1, z) and the rows X of
the n federations in which method m was run,

    gain_m(x) = x b_m,   b_m = (X'X + D)^-1 X'y_m,   D = diag(0, 1, 1, ...)                    (ridge)
    mean gain of such federations, 95 %:  gain_m(x) ± t s_m sqrt(h),       h = x (X'X + D)^-1 x'
    gain in one federation, 95 %:         gain_m(x) ± t s_m sqrt(1 + h)

y_m is the difference of the mean AUROC from the control, s_m the residual standard deviation with n - 6
degrees of freedom. h grows with the distance from the measured federations, and so do the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from suture.core.errors import DataError
from suture.core.files import read_json
from suture.learning.metrics import Floats

FITTED = Path(__file__).with_name("recommendations.json")
"""The fit; `python benchmarks/recommendations.py` writes it."""


@dataclass(frozen=True)
class SiteFacts:
    """What of a site's training data decides.

    Attributes:
        images: their number.
        positives: of each class that the site annotates.
        gray: mean and standard deviation, over images, of an image's mean gray level; None without images.
    """

    images: int
    positives: Mapping[str, int]
    gray: tuple[float, float] | None = None


@dataclass(frozen=True)
class Situation:
    """A federation in the numbers that the fit knows.

    Attributes:
        hidden: share of pairs of training image and class without a label.
        single: share of the classes that one site alone annotates.
        sites: their number.
        positives: median over classes of the positives at all sites that annotate it.
        shift: standard deviation of the sites' mean gray levels, in standard deviations of images within a
            site; None where it cannot be measured.
    """

    hidden: float
    single: float
    sites: int
    positives: float
    shift: float | None

    @property
    def vector(self) -> list[float]:
        """The numbers on the scales of the fit; NaN where unknown."""
        shift = math.nan if self.shift is None else self.shift
        return [self.hidden, self.single, math.log2(self.sites), math.log2(1 + self.positives), shift]


FEATURES = ("hidden", "single", "log2 sites", "log2 (1 + positives)", "shift")

ENOUGH = 2 * (1 + len(FEATURES))
"""Federations that a method has to be run in."""


def situation(sites: Mapping[str, SiteFacts]) -> Situation:
    """Return the numbers of a federation.

    Raises:
        DataError: there are fewer than two sites, no training images, or no classes.
    """
    owners: dict[str, list[SiteFacts]] = {}
    for site in sites.values():
        for label in site.positives:
            owners.setdefault(label, []).append(site)
    images = sum(site.images for site in sites.values())
    if len(sites) < 2 or not owners or not images:
        lacking = "second site" if len(sites) < 2 else "classes" if not owners else "training images"
        raise DataError(f"no {lacking} (sites: {', '.join(sites) or 'none'}); nothing can be recommended")
    labelled = sum(site.images for of in owners.values() for site in of)
    gray = [site.gray for site in sites.values() if site.gray is not None]
    within = math.sqrt(float(np.mean([sd**2 for _, sd in gray]))) if gray else 0.0
    known = len(gray) == len(sites) and within > 0
    return Situation(
        hidden=(images * len(owners) - labelled) / (images * len(owners)),  # exactly 0 where all is annotated
        single=sum(len(of) == 1 for of in owners.values()) / len(owners),
        sites=len(sites),
        positives=float(
            np.median([sum(site.positives[label] for site in of) for label, of in owners.items()])
        ),
        shift=float(np.std([mean for mean, _ in gray])) / within if known else None,
    )


@dataclass(frozen=True)
class Expected:
    """The gain of a method over the control, in mean AUROC.

    Attributes:
        gain: expected.
        mean: 95 % interval of the mean gain of such federations.
        single: 95 % interval of the gain in one of them.
    """

    gain: float
    mean: tuple[float, float]
    single: tuple[float, float]

    @property
    def told(self) -> bool:
        """Whether the interval of the mean excludes 0."""
        return self.mean[0] > 0 or self.mean[1] < 0


@dataclass(frozen=True)
class MethodFit:
    """The fit of one method; see the top of this module.

    Attributes:
        n: federations in which it was run.
        coefficients: b.
        residual: s.
        inverse: (X'X + D)^-1.
    """

    n: int
    coefficients: list[float]
    residual: float
    inverse: list[list[float]]

    def expected(self, x: Floats) -> Expected:
        """Return the gain at x = (1, z)."""
        t = float(stats.t.ppf(0.975, self.n - len(x)))
        gain, h = float(x @ self.coefficients), float(x @ np.asarray(self.inverse) @ x)
        near, far = t * self.residual * math.sqrt(h), t * self.residual * math.sqrt(1 + h)
        return Expected(gain, (gain - near, gain + near), (gain - far, gain + far))


@dataclass(frozen=True)
class Fit:
    """A fit, as its file holds it.

    Attributes:
        about: of which federations it is.
        center, scale, low, high: mean, standard deviation, smallest and largest value of each of `FEATURES`.
        methods: by row of the plan of the phantom maps.
        outside_told, outside_right: in federations outside of these ranges, which are not in the fit, how
            often a gain of the recommended method was told, and how often it was found.
    """

    about: str
    center: list[float]
    scale: list[float]
    low: list[float]
    high: list[float]
    methods: dict[str, MethodFit]
    outside_told: int = 0
    outside_right: int = 0

    def expected(self, of: Situation) -> dict[str, Expected]:
        """Return the expected gain of each method; an unknown shift is taken as the mean of the fit."""
        x = _rows(np.array([of.vector]), self.center, self.scale)[0]
        return {name: method.expected(x) for name, method in self.methods.items()}

    def outside(self, of: Situation) -> dict[str, float]:
        """Return by how many widths of its range each number lies outside of it; only those that do."""
        found = {}
        for name, value, low, high in zip(FEATURES, of.vector, self.low, self.high, strict=True):
            beyond = max(low - value, value - high) / (high - low)
            if beyond > 1e-6:  # false of NaN
                found[name] = beyond
        return found


def fit(situations: Sequence[Situation], gains: Mapping[str, Sequence[float]], about: str) -> Fit:
    """Fit the gains of each method.

    Args:
        situations: of the federations.
        gains: by method, the difference of the mean AUROC from the control in each federation; NaN where the
            method was not run.

    Raises:
        DataError: a method was run in too few federations.
    """
    vectors = np.array([of.vector for of in situations], dtype=np.float64)
    center, scale = np.nanmean(vectors, axis=0), np.nanstd(vectors, axis=0)
    rows, ridge = _rows(vectors, center, scale), np.diag([0.0, *[1.0] * len(FEATURES)])
    methods = {}
    for name, values in gains.items():
        run = ~np.isnan(np.asarray(values, dtype=np.float64))
        x, y = rows[run], np.asarray(values, dtype=np.float64)[run]
        if len(x) < ENOUGH:
            raise DataError(f"{name} was run in {len(x)} federations; a fit needs {ENOUGH}")
        inverse = np.linalg.inv(x.T @ x + ridge)
        b = inverse @ x.T @ y
        s = math.sqrt(float(((y - x @ b) ** 2).sum()) / (len(x) - len(ridge)))
        methods[name] = MethodFit(len(x), _digits(b), _digits([s])[0], [_digits(row) for row in inverse])
    low, high = np.nanmin(vectors, axis=0), np.nanmax(vectors, axis=0)
    return Fit(about, _digits(center), _digits(scale), _digits(low), _digits(high), methods)


def _rows(vectors: Floats, center: Sequence[float] | Floats, scale: Sequence[float] | Floats) -> Floats:
    """Return x = (1, z) of each federation; an unknown number is the mean."""
    z = np.nan_to_num((vectors - np.asarray(center)) / np.asarray(scale))
    return np.concatenate([np.ones((len(z), 1)), z], axis=1)


def _digits(values: Sequence[float] | Floats) -> list[float]:
    return [float(f"{value:.8g}") for value in values]


def stored_fit(path: Path = FITTED) -> Fit:
    """Return the fit of this package.

    Raises:
        DataError: the file is absent or damaged.
    """
    content = read_json(path, *Fit.__dataclass_fields__)
    methods = {name: MethodFit(**one) for name, one in content.pop("methods").items()}
    return Fit(**content, methods=methods)


def ranked(expected: Mapping[str, Expected], among: Sequence[str], most: int = 3) -> list[str]:
    """Return the methods worth trying: the two with the highest expected gain, and others that are told to
    gain, at most `most`.
    """
    order = sorted(among, key=lambda method: -expected[method].gain)
    return [m for i, m in enumerate(order) if i < 2 or expected[m].mean[0] > 0][:most]
