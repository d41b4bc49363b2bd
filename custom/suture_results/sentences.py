"""What the notes of a run say to a person; without torch, since the display of a run says them too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from suture.core.escaping import number_of

EXPERIMENTAL = (
    "[secure_aggregation] is experimental: nobody outside of this project has reviewed it, and a server that "
    "lies can still learn from sums (docs/threat_model.md)."
)

_SENTENCES = {
    "code_changed": "The code changed after round {round}, from {before} to {after}: earlier and later "
    "rounds were computed by different code.",
    "excluded": "{site} left this experiment: {why}.",
    "ledger": "{site} releases nothing: lines of its ledger are missing or were changed. Its administrator "
    "can restore the newest copy, or accept the gap with suture ledger --accept.",
    "class_by_code": "By its codes, {own!r} of {site} is the class {label!r}.",
    "more_by_code": "{number} more classes of sites were matched by their codes.",
    "unused_spelling": "label_map names {spelling!r}, which no site has: {instead}",
    "one_sided": "{label} is trained but not measured at {sites}: the atlas implies its presence, never its "
    "absence.",
    "pretrained_size": "{model} was pretrained on images of {pretrained} px, and model.size is {size}; for "
    "the size of its pretraining: --set model.size={pretrained}",
    "no_batch_norm": "{model} has no batch norm, so batch_norm={policy!r} changes nothing.",
    "frozen_batch_norm": "Batch norm is frozen (FedBN+), and {model} was not pretrained: it keeps mean 0 and "
    "variance 1, so it does not normalise. Set model.weights, or another batch_norm.",
    "selected_by": "No site sent a validation AUROC of {fewest} positives and {fewest} negatives or more, so "
    "selection = '{by}' was applied instead of 'site_auroc'.",
    "method": "{text}",
    "experimental": EXPERIMENTAL,
    "few_owners": "Secure aggregation: fewer than {fewest} sites annotate {labels}. All sites train these "
    "classes, the others as absent: a server that lies could let their sites alone learn.",
    "masked": "Secure aggregation: the server added up masked updates. One that follows the program knows "
    "who has which class, numbers of images, weights, losses and figures of each site, and no site's "
    "tensors. So max_update, exclusion of a site, norms, cosines and marks of outliers were off; each site "
    "checked its update.",
    "site_lied": "Secure aggregation, round {round}: {site} {why}.",
    "share_disputed": "Secure aggregation, round {round}: {site} or {other} lied about a share.",
    "rows_kept": "Secure aggregation, first in round {round}: the row of {labels} stayed as it was, because "
    "fewer than {fewest} sites sent it.",
    "unprotected": "Merged by the plain mean, not by robust.kind={kind!r}, because fewer than {fewest} sites "
    "send their rows{when}: {labels}.",
    "older_state": "{site} trained round {round} {state}, although it had sent an update of round {sent}: "
    "its state was lost, damaged or restored from a backup. The model therefore differs from that of an "
    "undisturbed run.",
    "joined": "it joined after round {round}, whose model was selected; continue with more rounds, or with "
    "selection = 'last'",
    "not_evaluated": "not evaluated",
}

_SHOWN = 200
"""Classes that a sentence lists."""


def sentence(code: str, values: Mapping[str, Any]) -> str:
    """Return what a note of a run says to a person; of a code without a sentence, the code itself."""
    values = dict(values)
    if code == "unmeasured":
        return why_unmeasured(values["counts"])
    if code not in _SENTENCES:
        return ", ".join([code, *(f"{name} {value}" for name, value in values.items())])
    if code == "unprotected":
        values["when"] = f" in round {values['round']}" if values["round"] else ""
        values["labels"] = sorted(name or "the shared tensors" for name in values["labels"])
    if code == "older_state":
        values["state"] = (
            f"from its state of round {values['state']}" if values["state"] else "without a state"
        )
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            values[name] = ", ".join(value[:_SHOWN]) + (", ..." if len(value) > _SHOWN else "")
    return _SENTENCES[code].format(**values)


def why_unmeasured(counts: Mapping[str, tuple[int | None, int | None]]) -> str:
    """Return why none of some sites has an AUROC of a class: each cause, and the sites that it holds for.

    Args:
        counts: of labelled images with and without it, None where withheld; "" is the server's test set.
    """
    causes: dict[str, list[str]] = {}
    for site, (positives, negatives) in counts.items():
        if positives is None or negatives is None:
            cause = (
                "withheld, because fewer than min_count images have it or lack it, or one patient "
                "would move it by over half its range (`suture data check`)"
            )
        elif positives or negatives:
            kind, n = ("negative", positives) if positives else ("positive", negatives)
            cause = f"no {kind} among {number_of(n, 'labelled case')}"
        else:
            cause = "no labelled case"
        causes.setdefault(cause, []).append(site)
    said = [cause + (f" at {listed(sites)}" if any(sites) else "") for cause, sites in causes.items()]
    return "; ".join(said) or "no site that annotates it has validation images"


def listed(names: Collection[str]) -> str:
    """Return names as a sentence has them."""
    *most, last = sorted(names) or ["no site"]
    return f"{', '.join(most)} and {last}" if most else last
