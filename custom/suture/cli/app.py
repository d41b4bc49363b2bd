"""The `suture` command with all its commands."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.markup import escape
from rich.table import Table

from suture.cli.common import console, guarded
from suture.cli.data import data_app, vocab
from suture.cli.finetune import finetune
from suture.cli.jobs import report, results, resume, status
from suture.cli.live import track, watch
from suture.cli.party import doctor, egress, ledger, policy
from suture.cli.poc import poc_app
from suture.cli.pretrain import pretrain
from suture.cli.reference import reference
from suture.cli.research import compare, evaluate, experiment, latent, predict, relate
from suture.cli.run import demo, export, run
from suture.cli.study import check, init
from suture.core.errors import ConfigError

app = typer.Typer(
    help="Train one model over sites that annotate different labels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def list_() -> None:
    """List methods, models, priors, data sets, jobs and experiments."""
    from suture.data.readers import DATASETS
    from suture.experiments.loading import known_experiments, load_experiment
    from suture.methods import METHODS, outside
    from suture.models import MODELS
    from suture.models.priors import PRIORS
    from suture.simulation.job import known_jobs, load_job

    rows = [("method", name, _described(name)) for name in sorted({*METHODS, *outside()})]
    rows += [("model", name, backbone.text) for name, backbone in MODELS.items()]
    rows += [("prior", name, str(prior)) for name, prior in PRIORS.items()]
    rows += [("data set", name, entry.description) for name, entry in DATASETS.items()]
    rows += [("job", name, load_job(path).title) for name, path in known_jobs().items()]
    for name, path in known_experiments().items():
        found = load_experiment(str(path))
        rows.append(("experiment", name, f"{found.title}; presets {', '.join(found.presets)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "name", "description"):
        table.add_column(column)
    for row in rows:
        table.add_row(*map(escape, row))  # "suture[lite]" is no markup
    console.print(table)


def _described(method: str) -> str:
    """Return title and paper of a method, or why another package's method cannot be used."""
    from suture.methods import method_class

    try:
        about = method_class(method).about
    except ConfigError as error:
        return f"not usable: {error}"
    return f"{about.title} ({about.paper})"


COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, init, check, run, export, status, results, resume, report, watch, track),
    *(predict, evaluate, compare, relate, latent, experiment, pretrain, finetune, vocab),
    *(doctor, policy, ledger, egress, reference),
)
for command in COMMANDS:
    app.command()(command)
app.command("list")(list_)
app.add_typer(data_app, name="data")
app.add_typer(poc_app, name="poc")


def main() -> None:
    """Run the command line; the entry point of `suture`."""
    guarded(app)
