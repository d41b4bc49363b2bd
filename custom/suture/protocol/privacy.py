"""What a site agrees to send: [privacy] of its `suture.toml`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from suture.core.validation import Section

NO_ENCRYPTION = (
    "encrypted updates cannot be validated: neither the site's filter nor the server could see what they "
    "hold, so homomorphic encryption is not supported; TLS encrypts them in transit, and clip and noise "
    "under [privacy] in suture.toml protect their content"
)


class PrivacyConfig(Section):
    """What this site agrees to send.

    Attributes:
        label_view: the class names that the site accepts to see: its own, or all of the federation.
        min_count: counts below this are withheld, and so are figures of so few images; others are rounded to
            what one patient can move. 0 withholds nothing and sends six digits.
        min_loss: a loss over fewer samples is withheld; others are bounded and rounded likewise, but for 0.
        round_counts: counts of labels are rounded to multiples of this.
        max_faults: the share of unreadable images that is tolerated.
        clip: the largest L2 norm of an update that leaves; None does not clip.
        noise: standard deviation of Gaussian noise on it, in units of `clip`.
        delta: δ of the differential privacy that the report states.
    """

    label_view: Literal["own", "all"] = "own"
    min_count: int = Field(default=5, ge=0)
    min_loss: int = Field(default=20, ge=0)
    round_counts: int = Field(default=1, ge=1)
    max_faults: float = Field(default=0.05, ge=0, le=1)
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    noise: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _unencrypted(cls, values: Any) -> Any:
        if isinstance(values, dict) and "encryption" in values:
            raise ValueError(f"encryption: {NO_ENCRYPTION}")
        return values

    @property
    def protection(self) -> dict[Literal["clip", "noise", "delta"], float]:
        """Clip, noise and delta for the site info; empty without clipping."""
        return {} if self.clip is None else {"clip": self.clip, "noise": self.noise, "delta": self.delta}

    @model_validator(mode="after")
    def _noise_is_clipped(self) -> PrivacyConfig:
        if self.noise and self.clip is None:
            raise ValueError("noise is in units of clip; set clip, the largest norm of an update")
        return self
