"""docs/reference/egress.md: what leaves a site, in general and with each method."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from suture.core.labels import LabelSet
from suture.methods import METHODS
from suture.methods.base import Method
from suture.methods.parameters import exchanged
from suture.models import ModelSpec, build
from suture.models.classifier import Layout
from suture.protocol.decisions import CELLS, DecidedClass, DecidedGroup
from suture.protocol.egress import Egress, channels, declared, numbers
from suture.protocol.messages import (
    KEYS,
    Abstain,
    ClassScore,
    Metrics,
    Reason,
    Scores,
    SiteInfo,
    Spent,
    Update,
)

_LEDGER = (
    "BLAKE3 of the site's ledger, including this answer. Each line of the ledger has a secret salt of "
    "128 random bits, so the digest reveals nothing about the lines"
)

_FIELDS: Mapping[type[Any], Mapping[str, str]] = {
    SiteInfo: {
        "labels": "the site's own class names, at most 200 characters each",
        "n": "number of images or documents in each split",
        "threads": "number of torch threads",
        "code": "hash of the installed package",
        "label_type": "`multilabel` or `multiclass`",
        "counts": "where the method requests them: images with and without each class, sent once in an "
        "experiment; rounded to `round_counts`, withheld below `min_count`",
        "prior": "where the method has one: digest of the frozen network at the site",
        "protection": "`clip`, `noise` and `delta` of the site, if it has set them",
        "codes": "the codes of its classes, at most one of each terminology",
        "computed_on": "`cpu` or the model of the GPU, and the precision",
        "ledger": _LEDGER,
        "measures": "whether it has a validation loss that `min_loss` and `min_count` allow to leave",
    },
    Update: {
        "round": "number of the round",
        "labels": "the class names of the rows, as the site received them",
        "shared": 'tensors: see the method. With `transport = "float16"` in the job, float32 ones leave in '
        "float16, weights as their change of what the site received",
        "head": "rows of classes: see the method; the same",
        "class_weights": "a number for each row: see the method",
        "weight": "a number: see the method",
        "kind": "`weights` or `gradient`",
        "channels": (
            "further tensors: see the method; rows of classes are zeros for a class of fewer images than "
            "`min_count`; a site with `clip` refuses a method that has any"
        ),
        "scalars": "numbers: see the method; six digits",
        "train_loss": (
            "mean loss of the local steps, at most 5, rounded to a grid; withheld if they used fewer "
            "samples than `min_loss`"
        ),
        "metrics": "figures of the received model on the validation data: see below",
        "spent": "of its ledger: see below",
        "state": "number of the round from whose state the site continued; 0 without one",
        "ledger": _LEDGER,
    },
    Spent: {
        "epsilon": "ε of all updates of the site, in all its experiments; three digits, rounded up",
        "updates": "number of its updates",
        "unprotected": "number of updates without noise",
        "experiments": "number of its experiments",
        "figures": "number of figures of classes that it has sent",
        "numbers": "number of losses, counts, weights and other numbers that it has sent",
        "missing": "number of missing lines of its ledger that the site's administrator has accepted",
    },
    Metrics: {
        "round": "number of the round whose model it is",
        "split": "`validation`, or `test` at the end",
        "n": "number of images or documents",
        "loss": (
            "mean over labels, each at most 5, without withheld classes, rounded to a grid; withheld below "
            "`min_loss` samples"
        ),
        "classes": "figures of each class of the site: see below",
        "overall": (
            f"with multiclass labels: {', '.join(KEYS)}, rounded to grids, over the images of classes that "
            "are not withheld; precision only if `min_count` is 0"
        ),
        "attributes": (
            "of test data, where the site names an attribute: number of images, mean AUROC and `overall` "
            "for each of its values, at most 20; a value with fewer than `min_count` images is omitted, "
            "and so is any value that would reveal it"
        ),
        "decided": "of test data, if the job has a `decision` section: see below",
    },
    Scores: {
        "round": "number of the round whose model it is",
        "labels": "the class names of the rows: classes of the site that are not withheld",
        "class_tensors": "`positives` and `negatives`: how many validation images with and without each "
        f"class have a score in each of {CELLS} cells of log-odds between -12 and 12; neighbouring cells are "
        "joined until each has images of `min_count` patients, and `round_counts` images; rounded to "
        "`round_counts`",
        "spent": "of its ledger: see above",
        "ledger": "the same as of an update; an answer to `evaluate` has it too",
    },
    DecidedClass: {
        "own": (
            "sensitivity and specificity on the test images at the site's own threshold; each rounded to a "
            "grid"
        ),
        "pooled": "the same, at the threshold of all sites",
        "half": "the same, at a probability of 0.5",
        "ece": "calibration error before and after calibration, rounded to a grid",
        "brier": "Brier score before and after, rounded to a grid",
        "sets": "share of the images whose conformal set contains their label, rounded to a grid",
        "groups": "for each value of the site's attribute: see below",
    },
    DecidedGroup: {
        "positives": (
            "number of the images with the class, rounded to `round_counts`; a group with fewer than "
            "`min_count` of either kind is omitted, and so is any group that would reveal its number"
        ),
        "negatives": "number of those without, the same",
        "sensitivity": (
            "sensitivity at the site's own threshold, or at that of all sites if it has none; rounded to a "
            "grid"
        ),
        "specificity": "specificity, likewise",
    },
    ClassScore: {
        "auroc": "rounded to a grid",
        "low": "lower bound of its 95 % interval, on the same grid; of test data only",
        "high": "upper bound, the same",
        "recall": "with multiclass labels, on the same grid",
        "positives": (
            "as first sent in the experiment, rounded to `round_counts`; the whole score is withheld below "
            "`min_count`, or if it would reveal such a count"
        ),
        "negatives": "the same",
    },
    Abstain: {
        "reason": f"one of {', '.join(f'`{word}`' for word in get_args(Reason))}",
        "error": "class name of the exception, never its text",
        "rows": "number of faulty rows of data, if that is the reason",
    },
}

_MEANT = {
    SiteInfo: "Before round 1",
    Update: "After each round",
    Spent: "From its ledger, with each update and evaluation of a site that clips its updates (`spent`)",
    Metrics: "Metrics of a model on the site's own data",
    ClassScore: "Metrics of a class",
    Scores: "Counts of scores, once, of the selected model, if the job has a `decision` section",
    DecidedClass: "Decisions on the test images of a class (`decided`)",
    DecidedGroup: "Decisions by value of the site's attribute (`groups`)",
    Abstain: "Instead of an answer, when something fails",
}


_WEIGHTS = dict.fromkeys(("weight", "class_weights"), "")

_HEAD = """# What leaves a site

`suture egress` prints this page; a test compares it with the code. It is the allow-list of the site's filter:
a site sends only what is listed here, with the name, type and size given here.
[Threat model](../threat_model.md) explains what it reveals. Figures are rounded to the largest change
that one patient could cause ("a grid", [rules](../protection.md#rules-of-disclosure)); if `min_count` or
`min_loss` is 0, to six digits. These limits and `round_counts` are set under `[privacy]` in a site's
`suture.toml`; `clip` and `noise` there apply to tensors only.
"""

_BY_METHOD = """## By method

These tables are for the default settings of each method; the report of a run shows those of the run. Tensors
have the names and shapes of the model, and all their values are finite. Personal tensors never leave.
"""


def page() -> str:
    """Return the text of docs/reference/egress.md."""
    sections = [_table(_MEANT[kind], fields) for kind, fields in _FIELDS.items()]
    return "\n".join([_HEAD, *sections, _BY_METHOD, *(_method(kind()) for kind in METHODS.values())])


def _table(title: str, fields: Mapping[str, str]) -> str:
    return f"## {title}\n\n" + _rows(("field", "what"), fields.items())


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _method(method: Method) -> str:
    """Return the section of a method: what it declares for a small model."""
    title = f"### `{method.about.name}`: {method.about.title}\n\n"
    if method.limits.local_only and method.limits.pooled:
        return f"{title}No federation: it {method.limits.local_only}.\n"
    egress = method.egress(_layout(method))
    own = {row["field"]: row for row in declared(egress)}
    facts = [(name, text, own.get(name, {}).get("why", "")) for name, text in _sent(method, egress)]
    return title + _rows(("sent", "what", "why"), facts)


def _layout(method: Method) -> Layout:
    """Return names and shapes of the parameters of a small model that the method shares."""
    model = build(ModelSpec("cnn"), LabelSet(("A",)), 0, pretrained=False)
    return exchanged(model, method)


def _sent(method: Method, egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield each part of an update that depends on the method, and its type and range."""
    shown = {row["field"]: row["shape"] for row in declared(dataclasses.replace(egress, why=_WEIGHTS))}
    what = "gradients" if egress.kind == "gradient" else "weights"
    if egress.shared:
        types = "/".join(sorted({dtype.removeprefix("torch.") for _, dtype in egress.shared.values()}))
        part = f", {method.share.fraction:g} of the {method.share.of} of each" if method.share else ""
        norm = (
            "with batch norm and its statistics" if method.batch_norm == "average" else "without batch norm"
        )
        yield "shared", f"{types} {what} outside the head{part}, {norm}"
    if egress.head:
        own, every = "each of the site's classes", "every class of the federation"
        yield "head", f"a row of {what} for {every if method.label_use.view == 'all' else own}"
    yield "weight", shown["weight"]
    yield "class_weights", shown["class_weights"]
    yield from channels(egress)
    yield from numbers(egress)
    if egress.counts:
        yield "counts", f"two numbers per class of the site, with {' or '.join(egress.counts)} labels"
    if egress.prior:
        yield "prior", "a digest"
