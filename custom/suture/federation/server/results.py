"""The end of a run: the exported model, and metrics.json with what the selected model achieves."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from suture.core.errors import LabelError, is_bug
from suture.core.ontology import codes_of
from suture.federation.server.global_model import classifier
from suture.federation.server.selection import (
    Plain,
    by_attribute,
    by_frequency,
    condense,
    interval_of_mean,
    local_and_global,
    mean_over_sites,
    plain,
    weighting,
)
from suture.federation.server.server import Server, Stage
from suture.learning.evaluation import counts_of
from suture.learning.metrics import mean_defined
from suture.methods.base import GlobalModel
from suture.models.classifier import classes_below
from suture.models.saved import save_model
from suture.protocol.messages import ClassScore, Evaluation, Metrics, Spent
from suture.protocol.records import Note, read_history

log = logging.getLogger(__name__)

_BOOTSTRAP = 1000

_Source = Literal["server test set", "sites' test data"]
AT_SERVER: _Source = "server test set"


def finish(server: Server, tested: Mapping[str, Metrics], fault: Exception | None = None) -> None:
    """Write model/, metrics.json and the facts of the run, each even where another fails, and close the run.

    Args:
        tested: the metrics of each site on its own test data. They make the results where the server has no
            labelled test set.
        fault: what failed after the last round, if anything has.

    Raises:
        Exception: the first failure, `fault` included, after the rest was written.
    """
    model, selected = server.select_model(), server.selected_round
    faults = [fault] if fault else []

    def facts() -> None:
        held_out, spent = server.held_out, _collect_spent(server)
        server.record.update(
            selected_round=selected,
            selection=server.state.standings.by or server.schedule.selection,
            spent={site: asdict(one) for site, one in spent.items()},
            unmeasured=server.unmeasured,
            measured_here=list(held_out.measurable_labels("validation")) if held_out else [],
            tested=sorted(site for site, metrics in tested.items() if metrics.n),
        )

    export_model, metrics = partial(_export, server, model), partial(_write_metrics, server, model, tested)
    for step in (export_model, metrics, facts):
        try:
            step()
        except Exception as error:
            log.error("the end of the run: %s", error, exc_info=is_bug(error))
            faults.append(error)
    if faults:
        raise faults[0]
    server.record.close("finished")
    server.enter(Stage.FINISHED, selected=selected)


def _collect_spent(server: Server) -> dict[str, Spent]:
    """Return the newest statement of each site on what it has released: of its last answer that had one."""
    history = read_history(server.record.folder)
    stated = {site: one.spent for line in history for site, one in line.sites.items() if one.spent}
    return stated | {site: line.spent for site, line in server.collector.lines.items() if line.spent}


def _export(server: Server, model: GlobalModel) -> None:
    if server.plan.method.sharing.personal == "nothing":
        facts = {"round": server.selected_round, "job": server.record.run.get("job")}
        facts |= {"decisions": asdict(server.fitted.decisions)} if server.fitted else {}
        codes = codes_of(model.labels, server.registry.codes)
        facts["codes"] = {name: [asdict(code) for code in found] for name, found in codes.items()}
        called = replace(server.registry, members=server.reported_sites).names
        facts["site_names"] = {
            own: name for own, name in called.items() if own != name and name in model.labels
        }
        network = classifier(model, server.plan)
        if server.schedule.coherent != "none":
            below = classes_below(network.labels, server.schedule.relations)
            facts |= {"coherent": server.schedule.coherent, "below": below}
        save_model(network, server.plan.model, server.record.folder / "model", facts)


def _write_metrics(server: Server, model: GlobalModel, tested: Mapping[str, Metrics]) -> None:
    """Write metrics.json; where the evaluation fails, it says that no class has figures."""
    nothing = Metrics(server.selected_round, "test", 0, None, {})
    joined = [name for name in server.registry.labels if name not in model.labels]
    results = Results(server.registry.labels, _owners(server), nothing, "sites' test data", joined=joined)
    try:
        results = replace(_results(server, model, tested), joined=joined)
    finally:
        server.record.metrics(results.to_dict())


def _results(server: Server, model: GlobalModel, tested: Mapping[str, Metrics]) -> Results:
    history = read_history(server.record.folder)
    selected, held_out = server.selected_round, server.held_out
    source: _Source = "sites' test data"
    by_site = {site: server.registry.rename_keys(site, m.classes) for site, m in sorted(tested.items())}
    if held_out and held_out.has("test") and server.plan.method.sharing.personal == "nothing":
        source = AT_SERVER
        measured, interval = held_out.test(model, selected, _BOOTSTRAP)
    else:
        measured, interval = mean_over_sites(server.registry, tested, selected), interval_of_mean(by_site)
    return Results(
        server.registry.labels,
        _owners(server),
        measured,
        source,
        by_site,
        interval,
        held_out.groups if held_out else {},
        {
            site: (plain(condense(tested[site])), plain(condense(own)))
            for site, reply in sorted(server.collector.replies(Evaluation).items())
            if (own := reply.local) and own.n
        },
        weighting({site: m.n.get("train") for site, m in server.reported_sites.items()}, history),
        _decisions(server, tested),
    )


def _decisions(server: Server, tested: Mapping[str, Metrics]) -> dict[str, Any]:
    """Return the operating points, and how well each site's test images are decided."""
    if server.fitted is None:
        return {}
    measured: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[str, Any]] = {}
    for site, metrics in sorted(tested.items()):
        decided = server.registry.rename_keys(site, metrics.decided)
        scores = server.registry.rename_keys(site, metrics.classes)
        measured[site] = {name: asdict(one) for name, one in decided.items()}
        counts[site] = {n: pair for n, s in scores.items() if n in decided and (pair := counts_of(s))}
    fitted = asdict(server.fitted)
    return {**fitted.pop("decisions"), "measured": measured, "counts": counts, **fitted}


def _owners(server: Server) -> dict[str, tuple[str, ...]]:
    """Return the sites that annotate each class, those that have left included."""
    return replace(server.registry, members=server.reported_sites).owners()


@dataclass(frozen=True)
class Results:
    """What is known of the selected model at the end of a run.

    Attributes:
        labels: the classes of the federation.
        owners: the sites that annotate each class; a class of one site is "unique", of several "shared".
        measured: the metrics of the selected round's model by the federation's names of the classes; a class
            that is missing was not evaluated.
        source: where the test data of `measured` lie.
        sites: scores of the classes evaluated at each site.
        mean_interval: 95 % interval of the mean AUROC; over the sites' data see `interval_of_mean`.
        frequency: names of the common, medium and rare classes; see `by_frequency`.
        local: figures of the global model and of the site's own model at each site; see `local_and_global`.
        weighting: see `suture.federation.server.selection.weighting`.
        decisions: operating points, and how well sites decide by them; {} without.
        joined: the classes that the model lacks, because they joined after its round.

    Raises:
        LabelError: a score names a class that is not among `labels`.
    """

    labels: Sequence[str]
    owners: Mapping[str, Sequence[str]]
    measured: Metrics
    source: _Source
    sites: Mapping[str, Mapping[str, ClassScore]] = field(default_factory=dict)
    mean_interval: tuple[float, float] | None = None
    frequency: Mapping[str, Sequence[str]] = field(default_factory=dict)
    local: Mapping[str, tuple[Plain, Plain]] = field(default_factory=dict)
    weighting: Mapping[str, Any] = field(default_factory=dict)
    decisions: Mapping[str, Any] = field(default_factory=dict)
    joined: Collection[str] = ()

    def __post_init__(self) -> None:
        _check_classes("the scores", self.measured.classes, self.labels)
        for site, scores in self.sites.items():
            _check_classes(f"site {site!r}", scores, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of metrics.json.

        What does not apply is empty. ``undefined`` gives the reason for every class without an AUROC. Means
        are over the classes whose AUROC is defined.
        """
        measured, scores = self.measured, self.measured.classes
        areas = {name: scores[name].auroc if name in scores else None for name in self.labels}
        recall = {name: scores[name].recall for name in self.labels if name in scores}
        of_sites = {site: found for site, at in self.sites.items() if (found := _steps(at))}
        steps: dict[str, Any] = {"steps": _steps(scores), "loss_step": measured.loss_step}
        steps["site_steps"] = of_sites
        return {
            "mean_auroc": mean_defined(areas.values()),
            "mean_interval": None if self.mean_interval is None else list(self.mean_interval),
            "loss": measured.loss,
            "auroc": areas,
            "intervals": {name: _interval(scores.get(name)) for name in self.labels},
            "counts": {name: _counts(scores.get(name)) for name in self.labels},
            "recall": {name: value for name, value in recall.items() if value is not None},
            "groups": {"shared": self._mean(areas, shared=True), "unique": self._mean(areas, shared=False)},
            "sites": {site: {name: s.auroc for name, s in at.items()} for site, at in self.sites.items()},
            "site_counts": {
                site: {name: pair for name, s in at.items() if (pair := counts_of(s))}
                for site, at in self.sites.items()
            },
            "n": measured.n,
            "source": self.source,
            "selected_round": measured.round,
            "undefined": {n: asdict(self._reason(n)) for n in self.labels if areas[n] is None},
            "overall": dict(measured.overall),
            "long_tail": by_frequency(self.frequency, recall),
            "attributes": by_attribute({value: plain(part) for value, part in measured.attributes.items()}),
            "local_models": local_and_global(self.local),
            "weighting": dict(self.weighting),
            "decisions": dict(self.decisions),
            **{key: value for key, value in steps.items() if value},
        }

    def _reason(self, name: str) -> Note:
        """Return why a class has no AUROC; "" stands for the server's test set."""
        if name in self.joined:
            return Note("joined", {"round": self.measured.round})
        at = {site: scores[name] for site, scores in self.sites.items() if name in scores}
        if (self.source == AT_SERVER or not at) and name in self.measured.classes:
            at = {"": self.measured.classes[name]}
        counts = {site: [score.positives, score.negatives] for site, score in at.items()}
        return Note("unmeasured", {"counts": counts}) if counts else Note("not_evaluated")

    def _mean(self, areas: Mapping[str, float | None], *, shared: bool) -> float | None:
        """Return the mean AUROC of the classes of several sites, or of one site."""
        owners = {name: len(self.owners.get(name, ())) for name in self.labels}
        return mean_defined(areas[name] for name, n in owners.items() if (n > 1 if shared else n == 1))


def _check_classes(where: str, named: Iterable[str], labels: Sequence[str]) -> None:
    known = set(labels)
    if foreign := [name for name in named if name not in known]:
        raise LabelError(f"{where}: class {foreign[0]!r} is not one of {', '.join(labels)}")


def _interval(score: ClassScore | None) -> list[float] | None:
    return None if score is None or score.low is None or score.high is None else [score.low, score.high]


def _steps(scores: Mapping[str, ClassScore]) -> dict[str, float]:
    return {name: score.step for name, score in scores.items() if score.step is not None}


def _counts(score: ClassScore | None) -> list[int | None]:
    return [None, None] if score is None else [score.positives, score.negatives]
