"""What several commands share: options, printing, the data sets of a command line, and how errors end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suture.core import VERSION
from suture.core.entry_points import load
from suture.core.errors import FULL, LOCKED, MISPLACED, ConfigError, DiskError, SutureError
from suture.core.escaping import printable_lines

if TYPE_CHECKING:
    from suture.execution.job import Job

console = Console(emoji=False)  # a name such as ":x:" is none


def known_names(incomplete: str) -> list[str]:
    """Return the jobs that a word may become: those of jobs/, and the studies of the working directory."""
    from suture.execution.job_files import known_jobs

    names = {*known_jobs(), *(path.parent.name for path in Path().glob("*/job.toml"))}
    return sorted(name for name in names if name.startswith(incomplete))


JobName = Annotated[str, typer.Argument(help="A name in jobs/, or a path.", autocompletion=known_names)]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the job.py of a folder. It is code: read it first.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: key=value. Repeatable.")]
StartupKit = Annotated[
    Path | None,
    typer.Option(help="Startup kit of a user, for --env poc and prod; by default the kit of the POC's lead."),
]
FlareStudy = Annotated[
    str, typer.Option("--study", help="FLARE's study in which the user acts, for --env poc and prod.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return at once; `suture results` fetches the results later.")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device of simulated sites: cpu, cuda, or several that sites share in turn, cuda:0,cuda:1; by "
        "default SUTURE_DEVICE."
    ),
]
ModelDevice = Annotated[
    str | None,
    typer.Option("--device", help="Device of the model: cpu, cuda, cuda:1; by default SUTURE_DEVICE."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SiteThreads = Annotated[int | None, typer.Option(min=1, help="Torch threads of a simulated site.")]
Amp = Annotated[bool, typer.Option("--amp", help="Simulated sites train in mixed precision.")]


def print_line(text: str, style: str = "") -> None:
    """Print text as it is: neither wrapped nor coloured, and no character that the terminal would obey."""
    console.print(printable_lines(text), style=style, soft_wrap=True, highlight=False, markup=False)


def emit(command: str, value: Any) -> None:
    """Print the result of a command as a line of JSON."""
    typer.echo(json.dumps({"suture": VERSION, "command": command, "result": plain(value)}, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN becomes null, and fields that a repr leaves out are left out."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.repr}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def plain_table(*columns: str) -> Table:
    """Return a table without lines; the words of commands in its first column are not broken."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("kind", "method"), overflow="fold")
    return table


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show what is done and the time that is left: a line that is rewritten, or a line for each new name."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not shown or not console.is_terminal:
        names = {""}

        def take(_done: int, _total: int, name: str = "") -> None:
            if shown and name not in names:
                names.add(name)
                print_line(name)

        yield take
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", total=None)
        yield lambda done, total, name="": live.update(
            task, completed=done, total=total, description=escape(name)
        )


def job_with(name: str, settings: list[str] | None, trust: bool = False) -> Job:
    """Return the job of a name or path with settings of the command line; `trust` is as in `load_job`.

    Raises:
        ConfigError: there is no such job, it is code that may not be run, or a setting does not fit.
    """
    from suture.execution.catalogue import check_names

    check_names(name, settings or [], trust)  # first: the next line imports torch, which takes seconds
    from suture.execution.job import load_job, with_settings

    return with_settings(load_job(name, trust=trust), settings or [])


def device_of(option: str | None) -> str:
    """Return the device that an option or the environment names, by default the CPU.

    Raises:
        ConfigError: torch does not know it, or cannot use it here, or there are several for one model.
    """
    from suture.execution.sites import compute_on, this_machine

    if option and "," in option:
        raise ConfigError(f"--device {option}: give one device; several are for simulated sites only")
    compute_on(option)
    return this_machine().device


def literal(app: typer.Typer) -> Any:
    """Return the command of an app with help texts as they are written: `[data]` is no style of rich."""
    commands: list[Any] = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for part in (command, *command.params):
            if getattr(part, "help", None):
                part.help = escape(part.help)
    return commands[0]


def command_of(point: EntryPoint) -> typer.Typer:
    """Return an app of the command that a package adds; where it cannot be used, of one that says so."""
    try:
        command: Callable[..., None] | typer.Typer = load(point, "command", "a function")
    except ConfigError as error:
        why = error

        def command() -> None:
            raise why

        command.__doc__ = f"Not usable: {why}"

    if isinstance(command, typer.Typer):
        return command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(point.name)(command)
    return app


def _print_error(error: SutureError) -> None:
    Console(stderr=True, emoji=False).print(
        printable_lines(f"error: {error}"), style="red", markup=False, highlight=False, soft_wrap=True
    )


_AROUND = 30
"""Characters of a text that are shown on either side of one that cannot be written."""


def guard(command: Callable[[], Any]) -> None:
    """Call a command: exit code 2 for a wrong setting, 1 for another expected error, 130 for Ctrl-C."""
    try:
        command()
    except SutureError as error:
        _print_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        if error.errno not in (*FULL, *LOCKED, *MISPLACED):
            raise
        _print_error(DiskError(error.errno, error.strerror, str(error.filename or "a file of this command")))
        sys.exit(1)
    except UnicodeEncodeError as error:
        around = error.object[max(error.start - _AROUND, 0) : error.end + _AROUND]
        what = f"{around!r} contains bytes that are not {error.encoding}"
        _print_error(
            ConfigError(f"{what}; rename that folder or file, or set LC_ALL=C.UTF-8 if its name is right")
        )
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="yellow")  # before a command has begun
        sys.exit(130)
