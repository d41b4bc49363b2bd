"""The end of a run: the model, the figures and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from suture.evaluation.metrics import ClassScore
from suture.evaluation.summary import Source, across_sites, summarise
from suture.messages import Metrics
from suture.models.classifier import Layout
from suture.plan import Plan
from suture.server.global_model import export
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
    personal = server.plan.method.personal != "nothing"
    if server.held_out and server.held_out.has("test") and not personal:
        scores, source = server.held_out.scores(model, "test", _BOOTSTRAP), "server test set"
        n = server.held_out.count("test")
    else:
        scores, source = across_sites(sites), "sites' test data"
        n = sum(metrics.n for metrics in tested.values())
    owners = replace(server.roster, members=server.known).owners()
    if not personal:
        facts = {"round": selected, "job": server.record.run.get("job")}
        export(model, server.plan, server.record.folder / "model", facts)
    server.record.metrics(summarise(model.labels, owners, scores, sites, n, source, selected))
    server.record.update(selected_round=selected, selection=server.schedule.selection)
    server.record.close("finished")
    server.record.event("finished", selected=selected)


def declared(plan: Plan) -> list[dict[str, str]]:
    """What leaves a site, for the report."""
    egress = plan.method.egress(Layout({}, {}))
    shapes = {
        "shared": "the model's tensors",
        "head": "one row per class of the site",
        "weight": f"a number in [{egress.weight[0]:g}, {egress.weight[1]:g}]",
        "class_weights": "a number per class of the site",
        "train_loss": "a number",
        "metrics": "loss, AUROC and counts of the site's classes",
    }
    return [{"field": f, "shape": shapes.get(f, ""), "why": why} for f, why in egress.why.items()]
