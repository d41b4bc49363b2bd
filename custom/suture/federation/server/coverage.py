"""What the figures of a run do not cover: sites without a say in them, classes that nobody could measure.

All of it follows from what the sites have sent anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from suture.core.printable import number_of
from suture.federation.plan import Selection
from suture.federation.server.registry import Member
from suture.federation.server.scores import coarsest
from suture.protocol.messages import ClassScore, Metrics
from suture.protocol.records import Metrics as Figures
from suture.protocol.records import Round


def validation_gaps(
    history: Sequence[Round],
    members: Mapping[str, Member],
    labels: Sequence[str],
    selection: Selection,
    at_server: Collection[str] = (),
    causes: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a sentence on the sites, and one on the classes, that had no say in the selected round.

    Args:
        members: the sites that take part.
        labels: all classes.
        at_server: the classes that the server's validation data measure; see `HeldOut.measured`.
        causes: why sites did not measure a class; see `why_unmeasured`.
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
        causes = dict.fromkeys(unmeasured, "the server's validation data have no positive or no negative")
    for name in sorted(unmeasured):
        found.append(f"{name} was never validated: {(causes or {}).get(name, 'no site sent an AUROC')}")
    return found


def why_unmeasured(scores: Mapping[str, ClassScore]) -> str:
    """Return why none of some sites has an AUROC of a class: each cause, and the sites that it holds for.

    Args:
        scores: of the class, at each site that has measured it.
    """
    causes: dict[str, list[str]] = {}
    for site, score in scores.items():
        if score.positives is None or score.negatives is None:
            cause = (
                "withheld, because fewer than min_count images have it, or lack it, or because one patient "
                "would move the figure by over half its range (`suture data check` says which)"
            )
        elif score.positives or score.negatives:
            kind, n = ("negative", score.positives) if score.positives else ("positive", score.negatives)
            cause = f"no {kind} among {number_of(n, 'labelled case')}"
        else:
            cause = "no labelled case"
        causes.setdefault(cause, []).append(site)
    said = [f"{cause} at {_listed(sites)}" for cause, sites in causes.items()]
    return "; ".join(said) or "not evaluated"


_COARSE = 0.05
"""A larger step than this hides what a round usually gains."""


def cautions(history: Sequence[Round], selection: Selection, selected: int) -> list[str]:
    """Return a sentence where the selection rests on a tie, and one where its figures are coarse."""
    by = {"server_metric": "server_auroc", "server_balanced_accuracy": "server_balanced_accuracy"}
    key = by.get(selection, "loss")
    measured = [line for line in history if getattr(line.validation, key) is not None]
    chosen = next((line.validation for line in measured if line.round == selected), None)
    found = []
    if chosen is not None and selection != "last":
        value = getattr(chosen, key)
        equal = [r.round for r in measured if abs(getattr(r.validation, key) - value) < 1e-9]
        if len(equal) > 1:
            what = "loss" if key == "loss" else key.removeprefix("server_").replace("_", " ")
            then = "the highest AUROC decided, then the last" if key == "loss" else "the first was taken"
            found.append(
                f"The selection rests on a tie: the models of rounds {', '.join(map(str, equal))} have the "
                f"same validation {what}; of these, {then}"
            )
    steps = {
        "loss": coarsest(line.validation.loss_step for line in history),
        "AUROC": coarsest(line.validation.auroc_step for line in history),
    }
    coarse = [f"{name} {step:g}" for name, step in steps.items() if step is not None and step > _COARSE]
    if coarse:
        found.append(
            "The validation curves, and what is selected by them, are of figures that sites round, in steps "
            f"of up to {', '.join(coarse)}. Smaller differences between rounds mean nothing; more validation "
            "patients make the steps finer"
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
