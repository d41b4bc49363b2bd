"""What turns a score into a decision: the grid on which sites count scores, and what is fitted to the counts.

A score is the log-odds of a probability, so that rare classes, whose probabilities lie near 0, are resolved
as well as common ones.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import MOST_ATTRIBUTES, OPEN, STRICT

GRID = np.linspace(-12.0, 12.0, 385)
"""The edges between the cells of a histogram of scores: log-odds in steps of 1/16."""

Rule = Literal["sensitivity", "specificity", "youden", "cost"]
Kind = Literal["platt", "temperature"]
Probability = Annotated[FiniteFloat, Field(ge=0, le=1)]

JOINED = -1
"""In a histogram, in place of a count: the images of this cell are counted in the next one."""

CELLS = len(GRID) + 1
"""Cells of a histogram: below the first edge, between two edges, and from the last edge on."""


@validated(frozen=True, config=STRICT)
class Calibration:
    """An increasing line from the log-odds of a model's probabilities to those of calibrated ones.

    Attributes:
        slope, intercept: of Platt's line; temperature scaling has the slope 1 / T and no intercept.
    """

    slope: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    intercept: FiniteFloat = 0.0


@validated(frozen=True, config=STRICT)
class Operating:
    """By what a class is decided, at one site or over all.

    Attributes:
        thresholds: probability of the model at and above which an image is positive, by rule.
        calibration: None where the scores do not permit any.
        prevalence: share of the positives among the images that it was fitted to.
    """

    thresholds: Annotated[dict[Rule, Probability], Field(max_length=4)]
    calibration: Calibration | None
    prevalence: Probability


@validated(frozen=True, config=STRICT)
class Decision:
    """By what a site decides a class.

    Attributes:
        own: fitted to its own validation data; None where it has too few, or does not annotate the class.
        pooled: fitted to those of all sites.
    """

    own: Operating | None
    pooled: Operating | None

    @property
    def fitted(self) -> Operating | None:
        """What calibrates the class at the site: its own, where it has one."""
        return self.own or self.pooled


@validated(frozen=True, config=STRICT)
class Decided:
    """How well test images of a class are decided at a threshold; None where withheld or undefined.

    Attributes:
        sensitivity: share of the images with the class that are found, rounded to a grid.
        specificity: share of those without that are cleared, rounded to a grid.
    """

    sensitivity: Probability | None
    specificity: Probability | None


@validated(frozen=True, config=STRICT)
class DecidedGroup:
    """How well the test images with one value of the site's attribute are decided.

    Attributes:
        positives: number of the images with the class, rounded to `round_counts`; a group with fewer than
            `min_count` of either kind is omitted, and so is any group that would reveal its number.
        negatives: number of those without, the same.
        sensitivity: sensitivity at the site's own threshold, or at that of all sites if it has none; rounded
            to a grid.
        specificity: specificity, likewise.
    """

    positives: Annotated[int, Field(ge=0, le=2**53)]
    negatives: Annotated[int, Field(ge=0, le=2**53)]
    sensitivity: Probability | None
    specificity: Probability | None


@validated(frozen=True, config=STRICT)
class DecidedClass:
    """How well a site's test images of a class are decided and calibrated.

    Attributes:
        own: sensitivity and specificity on the test images at the site's own threshold; each rounded to a
            grid.
        pooled: the same, at the threshold of all sites.
        half: the same, at a probability of 0.5.
        ece: calibration error before and after calibration, rounded to a grid.
        brier: Brier score before and after, rounded to a grid.
        groups: for each value of the site's attribute: see below.
    """

    own: Decided | None
    pooled: Decided | None
    half: Decided
    ece: tuple[Probability | None, Probability | None]
    brier: tuple[Probability | None, Probability | None]
    groups: Annotated[dict[str, DecidedGroup], Field(max_length=MOST_ATTRIBUTES)] = Field(
        default_factory=dict
    )


@validated(frozen=True, config=STRICT)
class Diagrams:
    """What the counts of scores of validation images, of a site or of all, show of a class.

    Attributes:
        rates: sensitivity and specificity at growing thresholds, from (1, 0) to (0, 1).
        prevalence: share of the positives.
        reliability: of each bin with images: mean calibrated probability, share of positives, images.
        images: number of images with the class, and without.
        chosen: sensitivity and specificity at the threshold that the job's rule takes for all sites.
        own: the same, at the threshold of the site whose images these are.
    """

    rates: tuple[tuple[Probability, Probability], ...]
    prevalence: Probability
    reliability: tuple[tuple[Probability, Probability, Annotated[int, Field(ge=1)]], ...]
    images: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    chosen: tuple[Probability, Probability] | None = None
    own: tuple[Probability, Probability] | None = None


Share = Annotated[float, Field(gt=0, lt=1)]


@validated(frozen=True, config=STRICT)
class DecisionSettings:
    """How a job turns scores into decisions.

    Attributes:
        rule: the threshold by which an image is decided; those of the other rules are kept with the model.
        sensitivity, specificity: the targets of the rules of these names.
        cost: of a missed finding, in false alarms; for the rule ``cost``.
        calibration: see `suture.learning.calibration.fit`.
    """

    rule: Rule = "sensitivity"
    sensitivity: Share = 0.9
    specificity: Share = 0.9
    cost: Annotated[float, Field(gt=0, le=1e6)] = 5.0
    calibration: Kind = "platt"


@validated(frozen=True, config=OPEN)
class Decisions:
    """By what a model decides: ``decisions`` of its model.json.

    Attributes:
        settings: of the job.
        pooled: of each class, fitted to the counts of all sites.
        sites: of each site and class, fitted to its own counts.
        format: version of this description.
    """

    settings: DecisionSettings
    pooled: dict[str, Operating] = Field(default_factory=dict)
    sites: dict[str, dict[str, Operating]] = Field(default_factory=dict)
    format: Literal[1] = 1

    def of(self, site: str | None, label: str) -> Decision:
        """Return by what a site, or somebody without one, decides a class; of a class nobody has, nothing."""
        return Decision(self.sites.get(site or "", {}).get(label), self.pooled.get(label))
