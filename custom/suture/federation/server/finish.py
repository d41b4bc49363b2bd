"""The end of a run: the model and the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from suture.federation.server import breakdown
from suture.federation.server.global_model import export
from suture.federation.server.protection import spent
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.server import Server
from suture.federation.server.summary import AT_SERVER, Source, across_sites, summarise
from suture.federation.server.weighting import run_away, weighting
from suture.learning.metrics import mean_defined
from suture.methods.base import GlobalModel
from suture.protocol.messages import Figures, Metrics
from suture.protocol.records import Round, read_history

_BOOTSTRAP = 1000


def finish(server: Server, tested: Mapping[str, Metrics]) -> None:
    """Writes model/ and metrics.json, and closes the run.

    Args:
        tested: what each site measured on its own test data. It makes the figures where the server holds no
            labelled test set.
    """
    model, selected = server.selected(), server.selected_round
    history = read_history(server.record.folder)
    if server.plan.method.personal == "nothing":
        facts = {"round": selected, "job": server.record.run.get("job")}
        export(model, server.plan, server.record.folder / "model", facts)
    server.record.metrics(_figures(server, model, tested, history))
    notes = spent(server.record.folder, server.record.run.get("protection", {}))
    if server.plan.method.guesses:
        notes += run_away(history, _owners(server))
    server.record.update(
        selected_round=selected,
        selection=server.schedule.selection,
        notes=[*server.record.run.get("notes", []), *notes],
    )
    server.record.close("finished")
    server.record.event("finished", selected=selected)


def _figures(
    server: Server, model: GlobalModel, tested: Mapping[str, Metrics], history: list[Round]
) -> dict[str, Any]:
    """What metrics.json says of the selected model."""
    selected, held_out = server.selected_round, server.held_out
    personal = server.plan.method.personal != "nothing"
    source: Source
    bounds = None
    if held_out and held_out.has("test") and not personal:
        (found, bounds), source = held_out.tested(model, selected, _BOOTSTRAP), AT_SERVER
    else:
        found, source = together(server.registry, tested, selected), "sites' test data"
    return summarise(
        model.labels,
        _owners(server),
        found.classes,
        {site: server.registry.classes_from_site(site, metrics) for site, metrics in sorted(tested.items())},
        found.n,
        source,
        selected,
        found.overall,
        loss=found.loss,
        mean_interval=bounds,
        frequency=held_out.groups if held_out else None,
        attributes={value: plain(figures) for value, figures in found.attributes.items()},
        local={
            site: (plain(in_few(tested[site])), plain(in_few(own)))
            for site, own in sorted(server.collector.local_metrics().items())
            if own.n
        },
        weighting=weighting(
            {site: member.n.get("train") for site, member in server.known.items()},
            history,
        ),
    )


def _owners(server: Server) -> dict[str, tuple[str, ...]]:
    """The sites that annotate each class, those that have left among them."""
    return replace(server.registry, members=server.known).owners()


def together(registry: SiteRegistry, tested: Mapping[str, Metrics], of_round: int) -> Metrics:
    """What the sites measured as one: each figure the unweighted mean over the sites where it is defined."""
    values = dict.fromkeys(value for metrics in tested.values() for value in metrics.attributes)
    return Metrics(
        of_round,
        "test",
        sum(metrics.n for metrics in tested.values()),
        mean_defined(metrics.loss for metrics in tested.values()),
        across_sites({site: registry.classes_from_site(site, m) for site, m in sorted(tested.items())}),
        breakdown.mean_of(metrics.overall for metrics in tested.values()),
        {
            value: _mean([m.attributes[value] for m in tested.values() if value in m.attributes])
            for value in sorted(values)
        },
    )


def in_few(metrics: Metrics) -> Figures:
    """A site's figures without those of single classes."""
    return Figures(
        metrics.n, mean_defined(score.auroc for score in metrics.classes.values()), metrics.overall
    )


def plain(figures: Figures) -> breakdown.Figures:
    """As they stand in metrics.json."""
    return {"n": figures.n, "auroc": figures.auroc, **figures.overall}


def _mean(parts: list[Figures]) -> Figures:
    overall = breakdown.mean_of(part.overall for part in parts)
    return Figures(sum(part.n for part in parts), mean_defined(part.auroc for part in parts), overall)
