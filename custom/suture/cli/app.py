"""The `suture` command, assembled."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suture.cli.data import data_app
from suture.cli.doctor import doctor, policy
from suture.cli.egress import egress
from suture.cli.finetune import finetune
from suture.cli.guarded import guarded
from suture.cli.jobs import report, results, resume, status
from suture.cli.poc import poc_app
from suture.cli.pretrain import pretrain
from suture.cli.research import compare, evaluate, experiment, latent, predict, relate
from suture.cli.run import demo, export, run
from suture.cli.text import vocab

app = typer.Typer(
    help="Train one model over sites that annotate different labels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()


def list_() -> None:
    """List methods, models, priors, data sets, jobs and experiments."""
    from suture.data.readers import DATASETS
    from suture.experiments.loading import known_experiments, load_experiment
    from suture.methods import METHODS
    from suture.models import MODELS
    from suture.models.priors import PRIORS
    from suture.simulation.job import known_jobs, load_job

    rows = [("method", m.name, f"{m.title} ({m.paper})") for m in METHODS.values()]
    rows += [("model", name, backbone.text) for name, backbone in MODELS.items()]
    rows += [("prior", name, str(prior)) for name, prior in PRIORS.items()]
    rows += [("data set", name, entry.description) for name, entry in DATASETS.items()]
    rows += [("job", name, load_job(str(path)).title) for name, path in known_jobs().items()]
    for name, path in known_experiments().items():
        found = load_experiment(str(path))
        rows.append(("experiment", name, f"{found.title}; presets {', '.join(found.presets)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "name", "what it is"):
        table.add_column(column)
    for row in rows:
        table.add_row(*map(escape, row))  # "suture[lite]" is no markup
    console.print(table)


COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, run, export, status, results, resume, report),
    *(predict, evaluate, compare, relate, latent, experiment, pretrain, finetune, vocab),
    *(doctor, policy, egress),
)
for command in COMMANDS:
    app.command()(command)
app.command("list")(list_)
app.add_typer(data_app, name="data")
app.add_typer(poc_app, name="poc")


def main() -> None:
    """Entry point."""
    guarded(app)
