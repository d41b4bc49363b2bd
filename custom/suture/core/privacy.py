"""What a site agrees to send: [privacy] of its `suture.toml`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictBool, model_validator

from suture.core.validation import Section

NO_ENCRYPTION = (
    "homomorphic encryption is not supported: one key opens every site's updates, and nobody could check "
    "them. TLS encrypts them in transit, [secure_aggregation] in the job hides them from the server. "
    "To protect their content, set epsilon or noise under [privacy] in suture.toml"
)

Protected = Literal["clip", "noise", "epsilon", "delta"]

_RANGES: dict[Protected, tuple[float, float]] = {
    "clip": (1e-9, 1e9),
    "noise": (0.0, 1e6),
    "epsilon": (0.01, 50.0),
    "delta": (1e-100, 1.0),
}
"""Closed range of each value of a site's protection: from within them ε can be computed."""

_LEAST_NOISE = 1e-6
"""Less noise than this, but for none, would have an ε that no float holds."""


_LEAST_DELTA = 1e-10
"""Of `epsilon`: smaller ones are lost among the rounding errors of its accountant."""


def check_protection(values: dict[Protected, float]) -> dict[Protected, float]:
    """Check and return clip, noise or epsilon, and delta of a site: all in their ranges, or none of them.

    Raises:
        ValueError: names the value.
    """
    if values and values.keys() not in ({"clip", "noise", "delta"}, {"clip", "epsilon", "delta"}):
        raise ValueError("clip, delta, and noise or epsilon must be set together")
    for name, value in values.items():
        low, high = _RANGES[name]
        if not low <= value <= high or (name == "noise" and 0 < value < _LEAST_NOISE):
            least = f"0, or between {_LEAST_NOISE:g}" if name == "noise" else f"between {low:g}"
            raise ValueError(f"{name} = {value:g} must be {least} and {high:g}")
    if "epsilon" in values and not _LEAST_DELTA <= values["delta"] < 1:
        raise ValueError(f"delta = {values['delta']:g} must be at least {_LEAST_DELTA:g} with epsilon")
    return values


class PrivacyConfig(Section):
    """What this site agrees to send.

    Attributes:
        label_view: the class names that the site may be shown: only its own, or all of the federation.
        secure_aggregation: refuses jobs that have none.
        min_count: smaller counts are withheld, and so are figures of fewer images; other figures are rounded
            to the largest change that one patient could cause. 0 withholds nothing and sends six digits.
        min_loss: a loss over fewer samples is withheld; other losses are bounded and rounded likewise, except
            with 0.
        round_counts: counts of labels are rounded to multiples of this; at most twice `min_count` (2 if that
            is 0), so that no count is rounded to 0. 1 is exact.
        max_faults: the tolerated share of unreadable images.
        epsilon: the ε of an experiment for each training patient, at `delta`: the site trains by DP-SGD with
            the noise that this takes. Needs `suture[privacy]`; excludes `noise`. None trains without.
        clip: the largest L2 norm of an update; larger ones are scaled down. With `epsilon` that of a
            patient's gradient in a step, by default 1. None does not clip.
        noise: standard deviation of the Gaussian noise added to an update, in units of `clip`.
        delta: δ of the differential privacy that the report states.
        max_answers: the maximum number of answers in an experiment.
        reanswers: the maximum number of repeated tasks of an experiment that the site computes again, because
            model, classes or settings differ. An identical task gets the stored answer and does not count.
        max_figures: the maximum number of times that figures of a class are sent, over all experiments.
        max_experiments: the maximum number of experiments that the site takes part in.
        max_epsilon: the maximum ε, at `delta`, of all updates in all experiments together; None is unlimited.
    """

    label_view: Literal["own", "all"] = "own"
    secure_aggregation: StrictBool = False
    min_count: int = Field(default=5, ge=0)
    min_loss: int = Field(default=20, ge=0)
    round_counts: int = Field(default=1, ge=1)
    max_faults: float = Field(default=0.05, ge=0, le=1)
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)
    noise: float = Field(default=0.0, ge=0, allow_inf_nan=False, strict=True)
    delta: float = Field(default=1e-5, gt=0, lt=1, strict=True)
    max_answers: int = Field(default=2_000, ge=1)
    reanswers: int = Field(default=3, ge=0)
    max_figures: int = Field(default=10_000, ge=0)
    max_experiments: int = Field(default=50, ge=1)
    max_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)

    @classmethod
    def of_public_data(cls, label_view: Literal["own", "all", "target"]) -> PrivacyConfig:
        """Return what a simulated site agrees to: its data are public, so that nothing is withheld.

        Args:
            label_view: of the method; see `LabelUse`.
        """
        return cls().exact().model_copy(update={"label_view": "all" if label_view == "all" else "own"})

    def exact(self) -> PrivacyConfig:
        """Return what the site agrees to where nothing leaves the machine: every class name, and figures that
        are neither withheld, rounded nor counted. What protects the model stays.
        """
        counted = dict.fromkeys(("max_answers", "max_figures", "max_experiments"), 10**9)
        everything = {"label_view": "all", "min_count": 0, "min_loss": 0, "round_counts": 1}
        return self.model_copy(update=everything | counted)

    @model_validator(mode="before")
    @classmethod
    def _unencrypted(cls, values: Any) -> Any:
        if isinstance(values, dict) and "encryption" in values:
            raise ValueError(f"encryption: {NO_ENCRYPTION}")
        if isinstance(values, dict) and values.get("epsilon") is not None:
            return {"clip": 1.0, **values}
        return values

    @property
    def protection(self) -> dict[Protected, float]:
        """Clip, noise or epsilon, and delta for the site info; empty without clipping."""
        if self.clip is None:
            return {}
        if self.epsilon is not None:
            return {"clip": self.clip, "epsilon": self.epsilon, "delta": self.delta}
        return {"clip": self.clip, "noise": self.noise, "delta": self.delta}

    @model_validator(mode="after")
    def _no_count_becomes_zero(self) -> PrivacyConfig:
        least = max(1, self.min_count)
        if self.round_counts > 2 * least:
            raise ValueError(
                f"round_counts = {self.round_counts} would send {least} as 0; set it to at most {2 * least}, "
                f"or min_count to at least {(self.round_counts + 1) // 2}"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_clipped(self) -> PrivacyConfig:
        if self.noise and self.clip is None:
            raise ValueError("noise is in units of clip; set clip, the largest norm of an update")
        if self.epsilon is not None and self.noise:
            raise ValueError("epsilon and noise exclude each other: epsilon finds the noise; remove noise")
        if self.max_epsilon is not None and not (self.noise or self.epsilon):
            raise ValueError("max_epsilon needs epsilon, or clip and noise: without noise ε is infinite")
        if self.max_epsilon is not None and self.max_epsilon < (self.epsilon or 0):
            raise ValueError(
                f"max_epsilon = {self.max_epsilon:g} is below epsilon = {self.epsilon:g}, so the site could "
                "not take part in a single experiment; raise max_epsilon or lower epsilon"
            )
        check_protection(self.protection)
        return self
