"""The end of a run: the model, the figures and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from suture.evaluation.metrics import ClassScore, mean_defined
from suture.evaluation.summary import Source, across_sites, summarise
from suture.messages import Metrics
from suture.server.global_model import export
from suture.server.protection import spent
from suture.server.server import Server

_BOOTSTRAP = 1000


def finish(server: Server, tested: Mapping[str, Metrics]) -> None:
    """Writes model/, metrics.json and report.html, and closes the run.

    Args:
        tested: what each site measured on its own test data. It makes the figures where the server holds no
            labelled test set.
    """
    model, selected = server.selected(), server.selected_round
    sites = {site: server.roster.classes_from_site(site, metrics) for site, metrics in sorted(tested.items())}
    scores: Mapping[str, ClassScore]
    source: Source
    overall: Mapping[str, float | None]
    personal = server.plan.method.personal != "nothing"
    if server.held_out and server.held_out.has("test") and not personal:
        scores, source = server.held_out.scores(model, "test", _BOOTSTRAP), "server test set"
        overall = server.held_out.overall(model, "test")
        n = server.held_out.count("test")
    else:
        scores, source = across_sites(sites), "sites' test data"
        overall = across_sites_overall(tested)
        n = sum(metrics.n for metrics in tested.values())
    owners = replace(server.roster, members=server.known).owners()
    if not personal:
        facts = {"round": selected, "job": server.record.run.get("job")}
        export(model, server.plan, server.record.folder / "model", facts)
    server.record.metrics(
        summarise(model.labels, owners, scores, sites, n, source, selected, overall=overall)
    )
    notes = spent(server.record.folder, server.record.run.get("protection", {}))
    server.record.update(
        selected_round=selected,
        selection=server.schedule.selection,
        notes=[*server.record.run.get("notes", []), *notes],
    )
    server.record.close("finished")
    server.record.event("finished", selected=selected)


def across_sites_overall(tested: Mapping[str, Metrics]) -> Mapping[str, float | None]:
    """Accuracy and its like: the unweighted mean over the sites where it is defined."""
    names = dict.fromkeys(name for metrics in tested.values() for name in metrics.overall)
    return {name: mean_defined(m.overall.get(name) for m in tested.values()) for name in names}
