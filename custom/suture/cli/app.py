"""The `suture` command with all its commands."""

from __future__ import annotations

import io
import os
import platform
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.markup import escape
from typer.core import TyperGroup

from suture.cli.common import Json, command_of, console, emit, guard, literal, plain_table, print_line
from suture.cli.run import demo, export, run
from suture.core import VERSION
from suture.core.entry_points import find_entry_points
from suture.core.errors import ConfigError, unknown
from suture.core.escaping import clean_warnings, printable, rich
from suture.core.processes import keep_memory

PANELS = {
    "Start": ("demo", "init", "check", "labels", "list"),
    "Run": ("run", "watch", "report", "track", "export", "status", "results", "resume"),
    "Use a model": ("predict", "evaluate", "compare", "decide", "explain", "finetune", "model"),
    "Research": ("plot", "vocab"),
    "Site and server": ("doctor", "policy", "clean", "ledger", "egress", "forget", "data", "poc"),
}
"""The words of commands as the help and the reference group them; all others are Research."""

_PANEL_OF = {word: panel for panel, words in PANELS.items() for word in words}


class Commands(TyperGroup):
    """The command line, with the commands of other packages.

    A package's command is imported when it is called or its help is shown, not at each start.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a wrong value of an option is reported without the validator's own words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from suture.core.validation import in_words

            error.message = in_words({"msg": error.message})
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the words of all commands; no package replaces one of Suture's own."""
        every = {*super().list_commands(ctx), *find_entry_points("suture.commands")}
        return [*(word for word in _PANEL_OF if word in every), *sorted(every - _PANEL_OF.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none of that word."""
        own, points = super().get_command(ctx, cmd_name), find_entry_points("suture.commands").get(cmd_name)
        return own or (points and _in_its_panel(cmd_name, literal(command_of(points[0]))))


def _in_its_panel(word: str, command: Any) -> Any:
    command.name, command.rich_help_panel = word, _PANEL_OF.get(word, "Research")
    return command


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        others = (f"{package} {version(package)}" for package in ("nvflare", "torch"))
        print_line(f"suture {VERSION}, {', '.join(others)}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    versions: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the versions and exit."),
    ] = False,
) -> None:
    """Train one model over sites that annotate different labels."""


Kind = Literal["methods", "models", "priors", "datasets", "simulations", "jobs", "tables", "runs"]
"""A kind of thing that can be listed alone."""


def _kind(word: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if word == kind:
            return kind
    raise unknown("kind of list", word, kinds)


def list_(
    kind: Annotated[
        Kind | None,
        typer.Argument(
            help="List only these; methods by the question that they answer.",
            parser=_kind,
            metavar=f"[{'|'.join(get_args(Kind))}]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            help="With models: describe this one, such as timm:resnet50, or search, such as timm:vit. With "
            "runs: the folder that they are in, by default runs."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List methods, models, priors, data sets, simulations, jobs, tables and runs."""
    if kind == "runs":
        _list_runs(Path(name or "runs"), as_json=as_json)
        return
    if name is not None:
        _describe(kind, name, as_json=as_json)
        return
    if kind == "methods" and not as_json:
        _list_methods()
        return
    from suture.execution.catalogue import rows

    found: dict[str, dict[str, str]] = {}
    for of, name_of, text in rows():
        # Of a name that another package uses too, the first is ours, and the second why theirs is refused.
        found.setdefault(f"{of.replace(' ', '')}s", {}).setdefault(name_of, text)
    if as_json:
        emit("list", found if kind is None else found.get(kind, {}))
        return
    if kind is not None:
        table = plain_table("name", "description")
        for one in found.get(kind, {}).items():
            table.add_row(*map(escape, one))  # "suture[lite]" is no markup
        console.print(table)
        return
    table = plain_table("kind", "number", "names")
    for word, entries in found.items():
        table.add_row(word, str(len(entries)), escape(", ".join(entries)))
    console.print(table)
    print_line("suture list KIND describes them")


def _list_runs(folder: Path, *, as_json: bool) -> None:
    """Print the runs below a folder."""
    from suture.execution.catalogue import runs_below

    found = runs_below(folder)
    if as_json:
        emit("list", found)
        return
    table = plain_table("run", "job", "method", "status", "rounds", "mean AUROC")
    for one in found:
        mean = "" if one.mean_auroc is None else f"{one.mean_auroc:.3f}"
        words = (str(one.folder), one.job, one.method, one.status, str(one.rounds), mean)
        table.add_row(*(rich(printable(word)) for word in words))
    console.print(table)


def _describe(kind: Kind | None, name: str, *, as_json: bool) -> None:
    """Print the input, the size and the weights of a model."""
    if kind != "models":
        raise ConfigError(f"{name}: only a model is described; write suture list models NAME")
    from suture.execution.catalogue import model_facts

    if as_json:
        emit("list", dict(model_facts(name)))
        return
    table = plain_table("", "")
    table.show_header = False
    for row in model_facts(name):
        table.add_row(*map(escape, row))
    console.print(table)


def _list_methods() -> None:
    """Print the methods by question: paper, labels, what a site sends and what a round costs."""
    from suture.execution.catalogue import by_question, rows

    table = plain_table("method", "paper", "labels an image", "a site sends", "cost")
    listed = set()
    for question, methods in by_question().items():
        table.add_section()
        table.add_row(f"[bold]{question}[/bold]")
        for name, entry in methods.items():
            cost = "" if entry["cost"] is None else f"{entry['cost']:.1f}"
            about = escape(f"{entry['title']}, {entry['paper']}")
            table.add_row(escape(name), about, entry["labels"], entry["sends"], cost)
            listed.add(name)
    every = [(name, text) for of, name, text in rows() if of == "method"]
    if others := every[len(listed) :]:  # a package may even use a name of ours, which is refused here
        table.add_section()
        table.add_row("[bold]of other packages[/bold]")
        for row in others:
            table.add_row(*map(escape, row))
    console.print(table)
    console.print(
        "cost: a round relative to FedAvg's on the same labels; docs/reference/methods.md", style="dim"
    )


def documented() -> dict[str, Any]:
    """Return the commands of this distribution, by their words."""
    group: Any = typer.main.get_command(app)  # a new one: the help texts of the one in use are escaped
    beside = find_entry_points("suture.commands", ours=True)
    every = {word: command_of(points[0]) for word, points in beside.items()}
    commands = {word: typer.main.get_command(command) for word, command in every.items()} | group.commands
    return {
        word: _in_its_panel(word, commands[word]) for word in group.list_commands(None) if word in commands
    }


for command in (demo, list_, run, export):
    word = command.__name__.strip("_")
    app.command(word, rich_help_panel=_PANEL_OF[word])(command)


def main() -> None:
    """Run the command line; the entry point of `suture`."""
    keep_memory()
    clean_warnings()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # a process that is started takes no module of this folder
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal in Latin-1 has no en dash
    guard(partial(literal(app), prog_name="suture"))
