"""What the figures of a run do not cover: sites without a say in them, classes that nobody could measure.

All of it follows from what the sites have sent anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from suture.federation.plan import Selection
from suture.federation.server.registry import Member
from suture.protocol.messages import Metrics
from suture.protocol.records import Metrics as Figures
from suture.protocol.records import Round


def validation_gaps(
    history: Sequence[Round],
    members: Mapping[str, Member],
    labels: Sequence[str],
    selection: Selection,
    at_server: Collection[str] = (),
) -> list[str]:
    """Return a sentence on the sites, and one on the classes, that had no say in the selected round.

    Args:
        members: the sites that take part.
        labels: all classes.
        at_server: the classes that the server's validation data measure; see `HeldOut.measured`.
    """
    committed = [line for line in history if line.status == "committed"]
    if selection == "last" or not committed:
        return []
    found = []
    if selection == "site_loss":
        heard = {name for r in committed for name, s in r.sites.items() if s.validation_loss is not None}
        silent = {name: member.n for name, member in members.items() if name not in heard}
        if silent:
            found.append(
                f"The round was selected by the validation losses of {_listed(heard)} only: "
                f"{_why(silent, 'validation')}"
            )
        unmeasured = set.intersection(*(set(line.validation.unmeasured) for line in committed))
    else:
        unmeasured = set(labels) - set(at_server)
    if names := sorted(unmeasured):
        found.append(
            f"No validation AUROC: {_listed(names)}. The validation data have no positive or no "
            "negative, or fewer than min_count"
        )
    return found


def test_gaps(figures: Figures, tested: Mapping[str, Metrics], members: Mapping[str, Member]) -> list[str]:
    """Return a sentence on the sites without test data, and one on the classes without a final AUROC.

    Args:
        figures: metrics.json.
        tested: each site's metrics on its own test data; of no account where the server has a test set.
    """
    found = []
    if figures.source == "sites' test data":
        heard = [name for name, metrics in sorted(tested.items()) if metrics.n]
        silent = {name: member.n for name, member in members.items() if name not in heard}
        if silent:
            found.append(f"The final figures come from {_listed(heard)} only: {_why(silent, 'test')}")
    if figures.undefined:
        reasons = (f"{name} ({why})" for name, why in sorted(figures.undefined.items()))
        found.append(f"No test AUROC: {', '.join(reasons)}")
    return found


def _why(silent: Mapping[str, Mapping[str, int | None]], split: str) -> str:
    """Say why each of some sites sent no figure of a split."""
    few = f"sent none: too few labelled {split} images for its limits, or it did not answer"
    return "; ".join(
        f"{name} {few if n.get(split) else f'has no {split} images'}" for name, n in sorted(silent.items())
    )


def _listed(names: Collection[str]) -> str:
    *most, last = sorted(names) or ["no site"]
    return f"{', '.join(most)} and {last}" if most else last
