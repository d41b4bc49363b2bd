"""Secure aggregation as a setting of a job: which methods it fits, and with what else it goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.methods import METHODS
from suture.methods.base import Method
from suture.methods.robust import RobustMerge
from suture.protocol.egress import OWNED_CLASSES, Layout
from suture.protocol.messages import MOST_SITES
from suture.protocol.precision import Transport


@validated(frozen=True, config=STRICT)
class SecureAggregation:
    """The server learns sums of the sites' updates and no update.

    Attributes:
        colluders: number of sites that may tell the server all that they know. Each class, and each round,
            needs three sites more than this.
    """

    colluders: Annotated[int, Field(ge=0, le=MOST_SITES)] = 0

    @property
    def fewest(self) -> int:
        """Number of sites that a sum needs."""
        return 3 + self.colluders


def check_secure(
    secure: SecureAggregation | None,
    method: Method,
    robust: RobustMerge | None = None,
    transport: Transport = "float32",
) -> None:
    """Check that a method's updates can be added up without the server seeing them.

    Raises:
        ConfigError: they cannot; says why, and the remedy.
    """
    if secure is None:
        return
    if robust:
        raise ConfigError(
            f"secure_aggregation and robust.kind={robust.kind!r} exclude each other: a robust merge compares "
            "the sites' updates, and the server does not see them; remove one of the two sections"
        )
    if transport != "float32":
        raise ConfigError(
            f"secure_aggregation and transport={transport!r} exclude each other: masked numbers "
            "have 64 bits; set transport='float32'"
        )
    if why := unfit(method):
        others = ", ".join(name for name, kind in METHODS.items() if not unfit(kind()))
        raise ConfigError(
            f"secure_aggregation: {method.about.title} {why}; remove [secure_aggregation], or choose one of "
            f"the methods that fit: {others}"
        )


def unfit(method: Method) -> str | None:
    """Why the server of a method needs more than the weighted sum of updates; None where it does not."""
    egress = method.egress(Layout({}, {}))
    if method.about.local_only:
        return method.about.local_only
    if not method.merges_by_mean:
        return "makes more of the updates than their weighted sum"
    if method.sharing.head_at_site:
        return "keeps heads at the sites, which a server could begin so that all sites but one learn nothing"
    if up := egress.going("up"):
        return f"also sends {', '.join(channel.name for channel in up)}, which would not be masked"
    if any(isinstance(w, tuple) and w[0] <= 0 for w in (egress.weight, egress.class_weight)):
        return "may give a site or a row the weight 0, so that a sum would be of fewer sites than it seems"
    masked = method.labels.view == "all" and method.labels.unknown == "masked"
    if masked and egress.class_weight != OWNED_CLASSES:
        return "sends rows of classes that a site has not trained, so that a sum would be of fewer sites"
    return None
