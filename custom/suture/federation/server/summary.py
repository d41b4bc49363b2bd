"""The content of metrics.json: what the selected model knows, class by class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from suture.core.errors import LabelError
from suture.federation.server.breakdown import Figures, by_attribute, by_frequency, local_and_global
from suture.learning.metrics import mean_defined
from suture.protocol.messages import ClassScore

Source = Literal["server test set", "sites' test data"]
AT_SERVER: Source = "server test set"


def summarise(
    labels: Sequence[str],
    owners: Mapping[str, Sequence[str]],
    scores: Mapping[str, ClassScore],
    sites: Mapping[str, Mapping[str, ClassScore]],
    n: int | None,
    source: Source,
    selected_round: int | None,
    overall: Mapping[str, float | None] | None = None,
    *,
    loss: float | None = None,
    mean_interval: tuple[float, float] | None = None,
    frequency: Mapping[str, Sequence[str]] | None = None,
    attributes: Mapping[str, Figures] | None = None,
    local: Mapping[str, tuple[Figures, Figures]] | None = None,
    weighting: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of metrics.json.

    Args:
        labels: the classes of the model.
        owners: for each class the sites that know it; a class of one site is "unique", of more "shared".
        scores: score of each class; a class that is missing was not evaluated.
        sites: scores at each site, of the classes evaluated there.
        n: images behind `scores`; None where a site withholds it.
        source: where `scores` come from.
        selected_round: round of the evaluated model.
        overall: figures over all classes at once, as of `single_label`; none in a multi-label task.
        loss: cross-entropy of what is known, over all classes at once.
        mean_interval: 95 % interval of the mean AUROC; several sites' own data have none.
        frequency: classes that are common, less so, and rare; see `by_frequency`.
        attributes: figures of the images of each attribute; see `by_attribute`.
        local: of each site the figures of the global model and of its own; see `local_and_global`.
        weighting: who counted how much in each round; see `suture.federation.server.weighting.weighting`.

    Returns:
        ``mean_auroc``, ``mean_interval``, ``loss``, ``auroc``, ``intervals``, ``counts``, ``recall``,
        ``groups``, ``sites``, ``n``, ``source``, ``selected_round``, ``undefined`` (the reason of every class
        without an AUROC), ``overall``, ``long_tail``, ``attributes``, ``local_models`` and ``weighting``;
        what does not apply is empty. Means are over the classes where the AUROC is defined.

    Raises:
        LabelError: `scores` or a site names a class that is not among `labels`.
    """
    for where, named in {"the scores": scores, **{f"site {s!r}": v for s, v in sites.items()}}.items():
        _check(where, named, labels)
    areas = {name: scores[name].auroc if name in scores else None for name in labels}
    recall = {name: score.recall for name, score in scores.items() if score.recall is not None}
    return {
        "mean_auroc": mean_defined(areas.values()),
        "mean_interval": None if mean_interval is None else list(mean_interval),
        "loss": loss,
        "auroc": areas,
        "intervals": {name: _interval(scores.get(name)) for name in labels},
        "counts": {name: _counts(scores.get(name)) for name in labels},
        "recall": {name: recall[name] for name in labels if name in recall},
        "groups": {
            "shared": mean_defined(areas[name] for name in labels if len(owners.get(name, ())) > 1),
            "unique": mean_defined(areas[name] for name in labels if len(owners.get(name, ())) == 1),
        },
        "sites": {site: {name: score.auroc for name, score in at.items()} for site, at in sites.items()},
        "n": n,
        "source": source,
        "selected_round": selected_round,
        "undefined": {name: _reason(scores.get(name)) for name in labels if areas[name] is None},
        "overall": dict(overall or {}),
        "long_tail": by_frequency(frequency or {}, recall),
        "attributes": by_attribute(attributes or {}),
        "local_models": local_and_global(local or {}),
        "weighting": dict(weighting or {}),
    }


def across_sites(sites: Mapping[str, Mapping[str, ClassScore]]) -> dict[str, ClassScore]:
    """Class by class, the unweighted mean of the AUROC, and the recall, over the sites where it is defined.

    Counts are summed over all sites that evaluated the class, and None if one of them withholds its own.
    The interval is None unless a single site defines the AUROC: intervals of different sites do not average.
    """
    return {
        name: _across([at[name] for at in sites.values() if name in at])
        for name in dict.fromkeys(name for at in sites.values() for name in at)
    }


def _across(scores: Sequence[ClassScore]) -> ClassScore:
    defined = [s for s in scores if s.auroc is not None]
    low, high = (defined[0].low, defined[0].high) if len(defined) == 1 else (None, None)
    return ClassScore(
        mean_defined(s.auroc for s in defined),
        low,
        high,
        _total(s.positives for s in scores),
        _total(s.negatives for s in scores),
        mean_defined(s.recall for s in scores),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _check(where: str, named: Iterable[str], labels: Sequence[str]) -> None:
    foreign = [name for name in named if name not in labels]
    if foreign:
        raise LabelError(f"{where}: class {foreign[0]!r} is not among {', '.join(labels)}")


def _interval(score: ClassScore | None) -> list[float] | None:
    return None if score is None or score.low is None or score.high is None else [score.low, score.high]


def _counts(score: ClassScore | None) -> list[int | None]:
    return [None, None] if score is None else [score.positives, score.negatives]


def _reason(score: ClassScore | None) -> str:
    """Why a class has no AUROC."""
    if score is None:
        return "not evaluated"
    if score.positives is None or score.negatives is None:
        return "too few positives or negatives; counts withheld"
    if score.positives and score.negatives:
        return "positives and negatives lie at different sites"
    if score.positives:
        return f"no negative among {_cases(score.positives)}"
    if score.negatives:
        return f"no positive among {_cases(score.negatives)}"
    return "no labelled case"


def _cases(n: int) -> str:
    return f"{n} labelled case{'s' if n > 1 else ''}"
