"""A run as one page: report.html, which needs no other file and prints well."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from suture.core.errors import SutureError
from suture.core.files import atomic_write
from suture.data.long_tail import HEAD, TAIL
from suture.learning.metrics import mean_defined
from suture.protocol.records import (
    Diagnostic,
    Metrics,
    Round,
    Run,
    SiteRound,
    read_diagnostics,
    read_history,
    read_metrics,
    read_run,
)
from suture.reports import formatting as formats
from suture.reports.charts import Chart, Scale, Series, Tick, bar_chart, line_chart
from suture.reports.divergence import divergence_charts
from suture.reports.fine_tuned import nothing_measured, read_fine_tuned, section
from suture.reports.pseudo_labels import (
    checked_pseudo_labels,
    pseudo_label_charts,
    row_share_charts,
    row_shares,
    total,
)
from suture.reports.rows import UNIQUE, class_groups, kind, overall, shown
from suture.reports.weighting import weight_charts, what_weights_are

log = logging.getLogger(__name__)

FORMATS = ("area", "interval", "count", "size", "duration", "moment", "percent", "setting", "leaves")


def write_report(run_dir: Path) -> Path:
    """Writes report.html beside run.json and returns its path.

    history.jsonl and metrics.json may be absent, as they are when a run has failed; the page says so.
    diagnostics.jsonl, which only a simulation has, adds how good the pseudo-labels were, and tuned.json what
    the model became on other tasks: alone, where the run has measured nothing by itself.

    Raises:
        DataError: run.json is absent, or a file cannot be read.
        OSError: the folder cannot be written to.
    """
    run, history, metrics = read_run(run_dir), read_history(run_dir), read_metrics(run_dir)
    tuned = read_fine_tuned(run_dir)
    if tuned and nothing_measured(metrics):
        metrics = None
    content = _content(run, history, metrics) | section(tuned)
    content |= _by_method(run, history, read_diagnostics(run_dir))
    page = _environment().get_template("report.html").render(**content)
    path = run_dir / "report.html"
    atomic_write(path, page.encode())
    return path


def try_report(run_dir: Path) -> None:
    """As `write_report`, as far as disk and files permit: they may be what has failed."""
    try:
        write_report(run_dir)
    except (SutureError, OSError) as error:
        log.error("%s: the report could not be written: %s", run_dir, error)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formats, name) for name in FORMATS}
    return environment


def _content(run: Run, history: list[Round], metrics: Metrics | None) -> dict[str, Any]:
    """What the template is given."""
    return {
        "run": run,
        "metrics": metrics,
        "history": history,
        "seconds": (run.finished - run.started).total_seconds() if run.finished else None,
        "unique": [label for label in run.labels if kind(run, label) == UNIQUE],
        "groups": class_groups(run, metrics) if metrics else [],
        "overall": overall(metrics) if metrics else {},
        "axis": _axis(metrics) if metrics else None,
        "head_above": HEAD,
        "tail_below": TAIL,
        "attribute_figures": shown(metrics.attributes.values.values()) if metrics else {},
        "local_figures": _local_figures(metrics) if metrics else {},
        "site_means": {s: mean_defined(v.values()) for s, v in metrics.sites.items()} if metrics else {},
        "phases": _phases(history),
        "curves": _curves(run, history),
        "costs": _costs(history),
        "totals": _totals(history),
        "events": _events(history),
    }


def _by_method(run: Run, history: list[Round], diagnostics: list[Diagnostic]) -> dict[str, Any]:
    """What the template is given of methods that weigh sites, or make labels; empty values of any other."""
    checked = checked_pseudo_labels(run.labels, diagnostics)
    return {
        "pseudo_labels": pseudo_label_charts(run, history, _phase_starts(history)),
        "checked": {site: [*rows, total(rows)] for site, rows in checked.items()},
        "row_shares": row_shares(run, history),
        "row_share_charts": row_share_charts(run, history, _phase_starts(history)),
        "weights": weight_charts(run, history, _phase_starts(history)),
        "weight_is": what_weights_are(run),
        "divergence": divergence_charts(run, diagnostics),
    }


def _local_figures(metrics: Metrics) -> dict[str, str]:
    """The few figures by which the global model and the sites' own are compared."""
    return shown((part for models in metrics.local_models.sites.values() for part in models.values()), most=3)


def _axis(metrics: Metrics) -> tuple[Scale, list[Tick]]:
    """The AUROC axis, in per cent of its width: from 0.5, or lower where a class needs it, to 1."""
    areas = [v for v in metrics.auroc.values() if v is not None]
    bounds = [v[0] for v in metrics.intervals.values() if v is not None]
    low = math.floor(10 * min([0.5, *areas, *bounds])) / 10
    scale = Scale(low, 1.0, 3.0, 97.0)
    return scale, [Tick(scale(k / 10), f"{k / 10:.1f}") for k in range(round(10 * low), 11)]


def _curves(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Validation loss and AUROC of each round's model, and each site's training loss."""
    if not history:
        return []
    rounds = [r.round for r in history]
    starts = _phase_starts(history)
    drawn = {
        "Validation loss, mean over sites": [Series("loss", [r.validation.loss for r in history])],
        "Validation AUROC, mean over sites": [Series("AUROC", [r.validation.auroc for r in history])],
        "Validation AUROC, at the server": [Series("AUROC", [r.validation.server_auroc for r in history])],
        "Validation balanced accuracy, at the server": [
            Series("balanced accuracy", [r.validation.server_balanced_accuracy for r in history])
        ],
        "Training loss, per site": _of_sites(run, history, lambda site: site.train_loss),
        "Query loss, per site": _of_sites(run, history, lambda site: site.scalars.get("query_loss")),
    }
    charts = [line_chart(title, rounds, s, starts, run.selected_round) for title, s in drawn.items()]
    return [chart for chart in charts if chart]


def _of_sites(run: Run, history: Sequence[Round], value: Callable[[SiteRound], float | None]) -> list[Series]:
    """A line for each site; a gap where it did not take part, or withheld the number."""
    return [
        Series(site, [value(r.sites[site]) if site in r.sites else None for r in history])
        for site in run.sites
    ]


def _phases(history: Sequence[Round]) -> list[tuple[int, str]]:
    """The first round and the name of each phase."""
    runs = itertools.groupby(history, key=lambda r: r.phase)
    return [(next(rounds).round, name) for name, rounds in runs]


def _phase_starts(history: Sequence[Round]) -> list[int]:
    """The first round of each phase after the first."""
    return [first for first, _ in _phases(history)[1:]]


def _costs(history: Sequence[Round]) -> list[Chart]:
    """Seconds and bytes of each round."""
    if not history:
        return []
    rounds = [r.round for r in history]
    factor, unit = formats.byte_unit(max(max(r.bytes_down, r.bytes_up) for r in history))
    traffic = [
        Series("to the sites", [r.bytes_down / factor for r in history]),
        Series("from the sites", [r.bytes_up / factor for r in history]),
    ]
    charts = [
        bar_chart(f"Traffic per round, {unit}", rounds, traffic),
        bar_chart("Time per round, s", rounds, [Series("seconds", [r.seconds for r in history])]),
    ]
    return [chart for chart in charts if chart]


def _totals(history: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Of each site over all rounds: updates accepted, bytes either way, seconds at work."""
    sites = dict.fromkeys(name for r in history for name in r.sites)
    return {name: _total([r.sites[name] for r in history if name in r.sites]) for name in sites}


def _total(site: Sequence[SiteRound]) -> dict[str, Any]:
    return {
        "rounds": len(site),
        "accepted": sum(r.status == "accepted" for r in site),
        "down": sum(r.bytes_down for r in site),
        "up": sum(r.bytes_up for r in site),
        "seconds": math.fsum(r.seconds or 0.0 for r in site),
    }


def _events(history: Sequence[Round]) -> list[dict[str, str]]:
    """What did not go as planned, equal events of several rounds as one."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for r in history:
        if r.status == "unchanged":
            rounds.setdefault(("the federation", "unchanged", "the global model was kept"), []).append(
                r.round
            )
        for name, site in r.sites.items():
            if site.status != "accepted":
                event = (name, site.status, site.reason or "no reason was given")
                rounds.setdefault(event, []).append(r.round)
    return [
        {"who": who, "what": what, "why": why, "rounds": formats.spans(numbers)}
        for (who, what, why), numbers in rounds.items()
    ]
