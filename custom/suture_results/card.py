"""The card of a model: README.md of its folder by Hugging Face's template, with its metadata, and a page."""

from __future__ import annotations

import hashlib
import logging
import re
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markdown_it import MarkdownIt
from markupsafe import Markup

from suture.core import VERSION
from suture.core.errors import DataError, is_bug
from suture.core.escaping import markdown, printable
from suture.core.files import atomic_write, read_json, read_regular
from suture.core.validation import parse
from suture.learning.metrics import Estimate
from suture.models import encoder_of
from suture.models.saved import load_spec, weights_digest
from suture.protocol.decisions import Decisions
from suture.protocol.records import Metrics, Run, read_history, read_metrics, read_run
from suture_results.decision_section import decision_section
from suture_results.formatting import DASH, area, interval, step_path
from suture_results.notes import sentences
from suture_results.report import templates, write_report
from suture_results.sentences import sentence
from suture_results.tables import class_groups, shown

log = logging.getLogger(__name__)

PAGE = "model_card.html"


def write_card(run_dir: Path, licence: str | None = None) -> Path:
    """Write model/README.md of a finished run and return its path; every figure is one of the run's files.

    The same as a page is model_card.html beside it.

    Args:
        licence: of the model, as Hugging Face names it; None is "not stated".

    Raises:
        ConfigError: the run has no model, as one whose method leaves a part at the sites.
        DataError: it is no run, one that has not finished, or the weights are missing.
    """
    run, model = read_run(run_dir), run_dir / "model"
    if run.status != "finished":
        raise DataError(f"{run_dir} is {run.status}; a card describes a finished run")
    spec, metrics = load_spec(model), read_metrics(run_dir)
    described = read_json(model / "model.json")
    if not (model / "model.safetensors").is_file():
        raise DataError(f"{model} has no model.safetensors; restore it from a backup")
    job = run_dir / "job.json"
    history = read_history(run_dir)
    text = _template().render(
        run=run,
        said=sentences(run, history, metrics),
        metrics=metrics,
        groups=class_groups(run, metrics) if metrics else [],
        attribute_figures=shown(metrics.attributes.values.values()) if metrics else {},
        decisions=decision_section(metrics, run),
        fitted=parse(Decisions, found, "decisions") if (found := described.get("decisions")) else None,
        fitted_on=described.get("decided_on"),
        # Where a site has stated what its updates have spent, the run's notes tell it, with its δ.
        budget=any(site.spent for r in history for site in r.sites.values()),
        job_digest=hashlib.sha256(read_regular(job)).hexdigest() if job.is_file() else None,
        digest=weights_digest(model),
        licence=licence,
        reads=(reads := encoder_of(spec).reads),
        version=VERSION,
    )
    facts = _front_matter(run, metrics, reads, licence)
    front = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    atomic_write(model / "README.md", f"---\n{front}---\n\n{text}".encode())
    atomic_write(model / PAGE, _page(run.title, text).encode())
    return model / "README.md"


def write_pages(run_dir: Path) -> None:
    """Write the report of a run that has finished, and the card of its model."""
    write_report(run_dir)
    try_card(run_dir)


def try_card(run_dir: Path) -> None:
    """Call `write_card` if a finished run has a model, but log any error: it is not lost to its card."""
    try:
        if read_run(run_dir).status == "finished" and (run_dir / "model" / "model.json").is_file():
            write_card(run_dir)
    except Exception as error:
        log.error("%s has no card: %s", run_dir, error, exc_info=is_bug(error))


def _page(title: str, text: str) -> str:
    # What other parties wrote is no markup here either: `md` has escaped it, and `html` is off.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text.partition("\n")[2])
    number = count(1)
    body = re.sub("<table>", lambda _: f'{_SCROLLED} aria-label="Table {next(number)}"><table>', body)
    body = Markup(body.replace("</table>", "</table></div>"))
    return templates().get_template("card.html").render(title=title, body=body)


_SCROLLED = '<div class="scroll" role="region" tabindex="0"'


def rounded(number: int | None) -> str:
    """Return a count in two significant digits; below 10 it is not told."""
    if number is None:
        return DASH
    return "< 10" if number < 10 else str(round(number, 2 - len(str(number))))


def rate(found: Estimate | None) -> str:
    """Return a share, or a gap, with its interval, where the number of its images is known."""
    if found is None:
        return DASH
    bounds = f"{area(found.low)} to {area(found.high)}".replace("-", "−")
    return area(found.value) + (f" ({bounds})" if found.high - found.low < 1 else "")


@cache
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    # No HTML is made, so that nothing is escaped for it; `md` is applied to what other parties wrote.
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = (rounded, area, step_path, interval, rate)
    environment.globals["sentence"] = sentence
    environment.filters |= {"md": markdown, **{function.__name__: function for function in filters}}
    return environment.get_template("card.md")


def _front_matter(run: Run, metrics: Metrics | None, reads: str, licence: str | None) -> dict[str, Any]:
    task = "text-classification" if reads == "text" else "image-classification"
    facts: dict[str, Any] = {"license": licence} if licence else {}
    facts |= {
        "library_name": "suture",
        "pipeline_tag": task,
        "tags": ["federated-learning", "synthetic" if run.synthetic else "medical", run.label_type],
        "metrics": ["roc_auc"],
    }
    if metrics and metrics.mean_auroc is not None:
        value = {"type": "roc_auc", "name": "mean AUROC", "value": round(metrics.mean_auroc, 3)}
        kind = "synthetic" if run.synthetic else "private"
        name = f"{metrics.source}, synthetic images" if run.synthetic else metrics.source
        data = {"type": kind, "name": printable(name)}
        result = {"task": {"type": task}, "dataset": data, "metrics": [value]}
        facts["model-index"] = [{"name": printable(run.title), "results": [result]}]
    return facts
