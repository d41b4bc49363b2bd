"""The report of a run: report.html, one page that needs no other file and prints well.

The settings of a run for its page: those that were set and those that matter first, the rest apart.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from suture.core.errors import SutureError, is_bug
from suture.core.escaping import escape_text
from suture.core.files import atomic_write, read_json
from suture.core.ontology import Relations
from suture.data.batch import Augmentation
from suture.data.split import HEAD, TAIL
from suture.learning.metrics import mean_defined
from suture.methods import method_class
from suture.models import ModelSpec
from suture.privacy.robust import LONG, OPPOSED
from suture.protocol.records import (
    Metrics,
    Round,
    Run,
    SiteRound,
    parse,
    read_diagnostics,
    read_history,
    read_metrics,
    read_run,
)
from suture_results import formatting as formats
from suture_results.charts import COLOURS, Chart, Scale, Series, Tick, bar_chart, phases_of, round_charts
from suture_results.class_tree import related_classes
from suture_results.decision_section import decision_section
from suture_results.finetuning_results import nothing_measured, read_finetuning_results, section
from suture_results.formatting import leaves
from suture_results.method_sections import TITLES, method_sections
from suture_results.notes import rejected_sites, sentences, site_updates
from suture_results.tables import UNIQUE, class_groups, kind, overall, shown

log = logging.getLogger(__name__)


_MATTER = frozenset({"local.lr", "local.epochs", "local.batch_size", "name", "size"})
"""Settings that a reader looks for, whether or not they were changed."""


@dataclass(frozen=True)
class Settings:
    """The settings of one part of a run.

    Attributes:
        title: of the part.
        shown: those that differ from their defaults, and those of `_MATTER`.
        rest: those left at their defaults.
    """

    title: str
    shown: tuple[tuple[str, Any], ...]
    rest: tuple[tuple[str, Any], ...]


def configuration(run: Run) -> list[Settings]:
    """Return the settings of method, model, augmentation and merge; an empty part is left out.

    Where a method's defaults are not known here, as its package is not installed, all of it was set.
    """
    parts = [
        (f"Method: {run.method.name}", run.method.hyperparameters, lambda: method_class(run.method.name)()),
        ("Model", run.model, lambda: ModelSpec(run.model["name"])),
        ("Augmentation", run.augmentation, Augmentation),
        ("Robust merge", run.robust, dict),
        ("Secure aggregation (experimental)", run.secure_aggregation, dict),
    ]
    return [_part(title, values, default) for title, values, default in parts if values]


def _part(title: str, values: Mapping[str, Any], default: Callable[[], Any]) -> Settings:
    try:
        usual = dict(leaves(json.loads(json.dumps(asdict(default())))))
    except (SutureError, TypeError, KeyError, ValueError):  # a method unknown here, or one without defaults
        usual = {}
    given = leaves(values)
    shown = [(k, v) for k, v in given if k in _MATTER or k not in usual or usual[k] != v]
    return Settings(title, tuple(shown), tuple(pair for pair in given if pair not in shown))


@dataclass(frozen=True)
class Live:
    """What only a page that is served while the run works shows.

    Attributes:
        version: of the run's files; the page loads itself again when another one is served.
        now: what the run does.
        lines: what happened last.
        at: time of the last event; None before the first.
        sites: what each one does in this round, or how its answer was taken.
    """

    version: str
    now: str
    lines: Sequence[str] = ()
    at: datetime | None = None
    sites: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """An image and what the model says of a class.

    Attributes:
        site: that has the image.
        source, map: the image as the model sees it, and with what speaks for the class over it, as URIs that
            hold a PNG.
        probability, threshold: that the model gives the class, and from which on the image is positive.
        present: whether the image is labelled with the class.
    """

    site: str
    source: str
    map: str
    probability: float
    threshold: float
    present: bool


_WORDS = {"train_loss": "Training loss"}
"""What a number of a site is called, where its name does not say it."""

ALONE = "individual"
"""The method by which each site trains on its own data only."""

_Bounded = tuple[float, float, float]


@dataclass(frozen=True)
class _Method:
    mean: _Bounded


@dataclass(frozen=True)
class _Comparison:
    """comparison.json of `suture run --compare`: mean AUROC of each method, with its 95 % interval."""

    methods: dict[str, _Method]


_SENT = {
    "shared": "model weights",
    "head": "model weights",
    "weight": "merge weights",
    "class_weights": "merge weights",
    "train_loss": "training loss",
}
"""What a field that sites send is called, where its name does not say it."""

Examples = Mapping[str, Mapping[str, Sequence[Example]]]
"""Images of each class, by its name and by how the model decides them."""


def write_report(run_dir: Path, prevalence: Mapping[str, float] | None = None) -> Path:
    """Write report.html beside run.json and return its path; see `render_report`.

    Raises:
        ConfigError, DataError: as `render_report`.
        OSError: the folder cannot be written to.
    """
    page = render_report(run_dir, prevalence=prevalence)
    atomic_write(run_dir / "report.html", page.encode())
    return run_dir / "report.html"


def write_report_with_examples(run_dir: Path, examples: Examples) -> Path:
    """Write report_with_examples.html, which holds images of patients, and return its path.

    report.html is left as it is, so that a page that may be passed on never becomes one that may not.

    Raises:
        DataError, OSError: as `write_report`.
    """
    path = run_dir / "report_with_examples.html"
    atomic_write(path, render_report(run_dir, examples=examples).encode(), private=True)
    return path


def render_report(
    run_dir: Path,
    live: Live | None = None,
    examples: Examples | None = None,
    prevalence: Mapping[str, float] | None = None,
) -> str:
    """Return the page of a run, which may still work.

    history.jsonl and metrics.json may be absent, as they are when a run has failed; the page then states it.
    diagnostics.jsonl, which only a simulation has, adds the quality of pseudo-labels; tuned.json adds the
    results of fine-tuning, which replace the run's own figures where all of those are undefined.

    Args:
        live: what the run does now, for a page that is served while it works.
        examples: images of patients, which the page then holds.
        prevalence: of classes, at which their PPV and NPV are shown.

    Raises:
        ConfigError: a prevalence is none, or of a class that is not decided.
        DataError: run.json is absent, or a file cannot be read.
    """
    run, history = read_run(run_dir), read_history(run_dir)
    # Those of a run that is continued are of an earlier model.
    metrics = None if run.status == "running" else read_metrics(run_dir)
    tuned = read_finetuning_results(run_dir)
    if tuned and nothing_measured(metrics):
        metrics = None
    content = _content(run, history, metrics)
    content["tuned"] = section(tuned) if tuned else None
    content["alone"] = _alone(run_dir.resolve(), run.job, run.method.name)
    content["decisions"] = decision_section(metrics, run, prevalence)
    content |= method_sections(run, history, read_diagnostics(run_dir))
    ranked = [row.name for group in content["groups"] for row in group.rows] or run.labels
    content["examples"] = {name: examples[name] for name in ranked if name in examples} if examples else {}
    return templates().get_template("report.html").render(**content, live=live)


def render_waiting(live: Live) -> str:
    """Return the page that is served before there is a run to show."""
    return templates().get_template("waiting.html").render(live=live)


def try_report(run_dir: Path) -> None:
    """Call `write_report`, but log any error: a run's model is not lost to its report."""
    try:
        write_report(run_dir)
    except Exception as error:
        log.error("%s: the report could not be written: %s", run_dir, error, exc_info=is_bug(error))


@cache  # to compile them takes longer than to train a small network
def templates(*folders: Path) -> Environment:
    """Return the templates of this folder, its style and macros among them, and of further folders."""
    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in (*formats.FORMATS, contents)}
    environment.globals["colours"] = COLOURS
    return environment


def contents(main: str) -> Markup:
    """Return the sections of a page, each with an anchor, below a list of links to them."""
    links: dict[str, str] = {}

    def anchored(heading: re.Match[str]) -> str:
        name = re.sub(r"\W+", "-", heading[1].lower())
        name += f"-{len(links)}" if name in links else ""
        links[name] = f'<a href="#{name}">{heading[1]}</a>'
        return f'<h2 id="{name}">{heading[1]}</h2>'

    sections = re.sub("<h2>(.+?)</h2>", anchored, main)
    nav = f'<nav class="contents" aria-label="Contents">{" ".join(links.values())}</nav>\n'
    return Markup(nav * (len(links) > 2) + sections)


def _visible(value: Any) -> Any:
    """Return what a page shows: of text, control characters and those that turn the direction as escapes."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(c if c == "\n" or unicodedata.category(c) == "Zs" else escape_text(c) for c in value)


def _content(run: Run, history: list[Round], metrics: Metrics | None) -> dict[str, Any]:
    """Return the values of the template that every run has."""
    sites = metrics.sites if metrics else {}
    groups = class_groups(run, metrics) if metrics else []
    rows = [row for group in groups for row in group.rows if row.auroc is not None and not row.few]
    ranked = sorted(rows, key=lambda row: -(row.auroc or 0.0))
    # Sites do not annotate the same classes: a mean over different ones would rank them by their classes.
    common = [c for c in run.labels if sites and all(at.get(c) is not None for at in sites.values())]
    local = metrics.local_models.sites.values() if metrics else ()
    return {
        "run": run,
        "said": sentences(run, history, metrics),
        "configuration": configuration(run),
        "metrics": metrics,
        "history": history,
        "seconds": (run.finished - run.started).total_seconds() if run.finished else None,
        "unique": [label for label in run.labels if kind(run, label) == UNIQUE],
        "groups": groups,
        "extremes": [*ranked[:1], *ranked[1:][-1:]],
        "train_alone": _train_alone(run),
        "sent": _sent(run),
        "traffic": sum(r.bytes_down + r.bytes_up for r in history) / max(1, len(run.sites)),
        "tree": related_classes(run.labels, Relations(run.parents)),
        "figures_of": {row.name: row for group in groups for row in group.rows},
        "overall": overall(metrics) if metrics else {},
        "few_note": formats.FEW_NOTE if any(row.few for group in groups for row in group.rows) else "",
        "axis": _axis(metrics) if metrics else None,
        "head_above": HEAD,
        "tail_below": TAIL,
        "attribute_figures": shown(metrics.attributes.values.values()) if metrics else {},
        "local_figures": shown((part for models in local for part in models.values()), most=3),
        "common": common,
        "site_means": {s: mean_defined(v[c] for c in common) for s, v in sites.items()} if common else {},
        "phases": phases_of(history),
        "curves": _curves(run, history),
        "costs": _costs(history),
        "totals": _totals(history),
        "events": _events(history),
        "rejected": rejected_sites(history),
        "updates": site_updates(history),
        "update_charts": _update_charts(run, history),
        "opposed": OPPOSED,
        "long": LONG,
    }


def _alone(folder: Path, job: str, method: str) -> tuple[_Bounded, _Bounded] | None:
    """Return the means of each site alone and of a method, by a comparison around the run or beside it.

    Raises:
        DataError: the comparison cannot be read.
    """
    for path in (folder.parent.parent, folder.parent / f"{job}-comparison"):
        if method != ALONE and (file := path / "comparison.json").is_file():
            methods = parse(_Comparison, read_json(file), str(file)).methods
            if {ALONE, method} <= methods.keys():
                return methods[ALONE].mean, methods[method].mean
    return None


def _train_alone(run: Run) -> str | None:
    """Return the command that trains each site alone; None where the sites are not on one machine."""
    if run.command is None or run.method.name == ALONE:
        return None
    words = shlex.split(run.command)[:3]
    more = ("--set", f"method={ALONE}") if words[-1] == run.job else ("--compare", run.method.name)
    return shlex.join([*words, *more])


def _sent(run: Run) -> list[str]:
    """Return what the method declares that sites send, in words; nothing where their data are pooled."""
    fields = [] if run.method.pooled else [one.field for one in run.egress]
    return list(dict.fromkeys(_SENT.get(name, name.replace("_", " ")) for name in fields))


def _axis(metrics: Metrics) -> tuple[Scale, list[Tick]]:
    """Return the AUROC axis, in per cent of its width: from 0.5, or lower where a class needs it, to 1."""
    areas = [v for v in metrics.auroc.values() if v is not None]
    bounds = [v[0] for v in metrics.intervals.values() if v is not None]
    low = math.floor(10 * min([0.5, *areas, *bounds])) / 10
    scale = Scale(low, 1.0, 3.0, 97.0)
    step = 1 if low >= 0.4 else 2  # of a long axis every second number, 0.5 among them
    numbers = {k: f"{k / 10:.1f}" if (k + 1) % step == 0 else "" for k in range(round(10 * low), 11)}
    return scale, [Tick(scale(k / 10), text) for k, text in numbers.items()]


def _curves(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Return the charts of validation loss and AUROC of each round, and of each number that sites send."""
    series = {
        "Validation loss, mean over sites": [Series("loss", [r.validation.loss for r in history])],
        "Validation AUROC, mean over sites": [Series("AUROC", [r.validation.auroc for r in history])],
        "Validation AUROC, at the server": [Series("AUROC", [r.validation.server_auroc for r in history])],
        "Validation balanced accuracy, at the server": [
            Series("balanced accuracy", [r.validation.server_balanced_accuracy for r in history])
        ],
    }
    for name in dict.fromkeys(name for r in history for site in r.sites.values() for name in site.numbers):
        if name not in TITLES:
            words = _WORDS.get(name, name.replace("_", " ").capitalize())
            series[f"{words}, per site"] = _of_sites(run, history, partial(_number, name))
    return round_charts(run, history, series)


def _update_charts(run: Run, history: Sequence[Round]) -> list[Chart]:
    """Return charts of the sites' updates over the rounds."""
    series = {
        "Cosine to the mean of the other sites, per site": _of_sites(run, history, lambda site: site.cosine),
        "Norm of the update, per site": _of_sites(run, history, lambda site: site.norm),
    }
    return round_charts(run, history, series)


def _number(name: str, site: SiteRound) -> float | None:
    return site.numbers.get(name)


def _of_sites(run: Run, history: Sequence[Round], value: Callable[[SiteRound], float | None]) -> list[Series]:
    """Return a series for each site, with a gap where the site did not take part or withheld the number."""
    return [
        Series(site, [value(r.sites[site]) if site in r.sites else None for r in history])
        for site in run.sites
    ]


def _costs(history: Sequence[Round]) -> list[Chart]:
    """Return charts of the bytes and the seconds of each round."""
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
    """Return, for each site over all rounds: updates accepted, bytes either way, seconds at work."""
    sites: dict[str, list[SiteRound]] = {}
    for r in history:
        for name, site in r.sites.items():
            sites.setdefault(name, []).append(site)
    return {
        name: {
            "rounds": len(rounds),
            "accepted": sum(r.status == "accepted" for r in rounds),
            "down": sum(r.bytes_down for r in rounds),
            "up": sum(r.bytes_up for r in rounds),
            "seconds": math.fsum(r.seconds or 0.0 for r in rounds),
        }
        for name, rounds in sites.items()
    }


def _events(history: Sequence[Round]) -> list[dict[str, str]]:
    """Return rejections, absences and unchanged rounds; equal events of several rounds are one."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for r in history:
        if r.status == "unchanged":
            event = ("the federation", "unchanged", "the global model was kept")
            rounds.setdefault(event, []).append(r.round)
        for name, site in r.sites.items():
            if site.status != "accepted":
                event = (name, site.status, site.reason or "no reason was given")
                rounds.setdefault(event, []).append(r.round)
    return [
        {"who": who, "what": what, "why": why, "rounds": formats.spans(numbers)}
        for (who, what, why), numbers in rounds.items()
    ]
