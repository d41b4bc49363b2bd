"""docs/reference/egress.md: what leaves a site, in general and with each method."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any

from suture.core.escaping import markdown_table
from suture.core.labels import LabelSet
from suture.methods import METHODS
from suture.methods.base import Method
from suture.models import ModelSpec, build
from suture.models.classifier import Layout
from suture.protocol.decisions import Decided, DecidedClass, DecidedGroup
from suture.protocol.egress import Egress, channels, list_declared, numbers
from suture.protocol.messages import (
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Masking,
    MaskKeys,
    Metrics,
    Scores,
    SiteInfo,
    Spent,
    Update,
)

_MEANT: dict[type[Any], str] = {
    SiteInfo: "Before round 1",
    Update: "After each round",
    Evaluation: "After the last round, and after the test of the selected model",
    Spent: "From its ledger, with each update and evaluation of a site that clips its updates (`spent`)",
    Metrics: "Metrics of a model on the site's own data",
    ClassScore: "Metrics of a class",
    Figures: "Metrics by value of the site's attribute (`attributes`)",
    Scores: "Counts of scores, once, of the selected model, if the job has a `decision` section",
    Masking: "In each round of a job with `secure_aggregation`, four times",
    MaskKeys: "Keys of one attempt of secure aggregation (`keys`)",
    DecidedClass: "Decisions on the test images of a class (`decided`)",
    Decided: "Decisions at one threshold (`own`, `pooled`, `half`)",
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
    sections = [_table(title, kind) for kind, title in _MEANT.items()]
    return "\n".join([_HEAD, *sections, _BY_METHOD, *(_method(kind()) for kind in METHODS.values())])


def _table(title: str, kind: type[Any]) -> str:
    """Return the fields of a class by its own docstring, which has to name each."""
    texts = {name: text for of in kind.__mro__[:-1] for name, text in attribute_texts(of).items()}
    names = sorted(
        (one.name for one in dataclasses.fields(kind)), key=lambda n: n not in kind.__annotations__
    )
    return f"## {title}\n\n" + markdown_table(
        ("field", "what"), [(n, texts[n].removesuffix(".")) for n in names]
    )


def _method(method: Method) -> str:
    """Return the section of a method: what it declares for a small model."""
    title = f"### `{method.about.name}`: {method.about.title}\n\n"
    if method.about.local_only and method.about.pooled:
        return f"{title}No federation: it {method.about.local_only}.\n"
    egress = method.egress(_layout(method))
    own = {row["field"]: row for row in list_declared(egress)}
    facts = [(name, text, own.get(name, {}).get("why", "")) for name, text in _list_sent(method, egress)]
    return title + markdown_table(("sent", "what", "why"), facts)


def _layout(method: Method) -> Layout:
    """Return names and shapes of the parameters of a small model that the method shares."""
    model = build(ModelSpec("cnn"), LabelSet(("A",)), 0, pretrained=False)
    return method.sharing.layout(model)


def _list_sent(method: Method, egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield each part of an update that depends on the method, and its type and range."""
    shown = {row["field"]: row["shape"] for row in list_declared(dataclasses.replace(egress, why=_WEIGHTS))}
    what = "gradients" if egress.kind == "gradient" else "weights"
    if egress.shared:
        types = "/".join(sorted({dtype.removeprefix("torch.") for _, dtype in egress.shared.values()}))
        share = method.sharing.share
        part = f", {share.fraction:g} of the {share.of} of each" if share else ""
        averaged = method.sharing.batch_norm == "average"
        norm = "with batch norm and its statistics" if averaged else "without batch norm"
        yield "shared", f"{types} {what} outside the head{part}, {norm}"
    if egress.head:
        own, every = "each of the site's classes", "every class of the federation"
        yield "head", f"a row of {what} for {every if method.labels.view == 'all' else own}"
    yield "weight", shown["weight"]
    yield "class_weights", shown["class_weights"]
    yield from channels(egress)
    yield from numbers(egress)
    if egress.counts:
        yield "counts", f"two numbers per class of the site, with {' or '.join(egress.counts)} labels"
    if method.sharing.prior:
        yield "prior", "a digest"


def attribute_texts(kind: Any) -> dict[str, str]:
    """Return the entries of `Attributes:` in a docstring; "mean, std: ..." counts for both."""
    _, found, rest = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    block = re.split(r"\n(?=\S)", rest)[0] if found else ""
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", block):
        names, colon, text = entry.partition(": ")
        if colon and re.fullmatch(r"[\w, ]+", names.strip()):
            plain = " ".join(text.split()).replace("``", "`")
            texts |= dict.fromkeys(re.split(r",\s*", names.strip()), plain)
    return texts
