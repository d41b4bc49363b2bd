"""`suture doctor`, `policy`, `ledger` and `egress`: for the administrator of one site or server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from suture.cli.common import console, print_line
from suture.core.targets import rich

if TYPE_CHECKING:
    from suture.federation.site.statement import Statement

Workspace = Annotated[
    Path, typer.Argument(help="The party's FLARE workspace: the folder with startup/ and local/.")
]
Loose = Annotated[
    bool,
    typer.Option(
        "--loose",
        help="Only add Suture's classes to FLARE's list; jobs may bring code and use FLARE's other classes.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PACKAGE.",
        help="Allow the methods of an installed package, or one class by its dotted path. Repeatable.",
    ),
]
_MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


def doctor(
    workspace: Workspace = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this site or server: versions, certificates, connection, policy, data, disk, GPU."""
    from suture.core.printable import printable
    from suture.flare.admin.doctor import examine

    findings = examine(workspace)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            line = rich(f"{finding.about}: {finding.text}")
            console.print(f"{_MARKS[finding.status]} {line}", soft_wrap=True, highlight=False)
            if finding.remedy:
                remedy = f"        {rich(printable(finding.remedy))}"
                console.print(remedy, soft_wrap=True, highlight=False, style="dim")
    if any(finding.status == "error" for finding in findings):
        raise typer.Exit(1)


def policy(
    workspace: Workspace,
    loose: Loose = False,
    allow: Allow = None,
) -> None:
    """Allow only Suture's jobs at this site or server: no code from jobs, no other classes, no log upload.

    A site also filters each of its answers. Both restart when their process ends.
    """
    from suture.flare.admin import policy as own
    from suture.flare.admin.kit import read_kit

    kit = read_kit(workspace)
    own.check_entries(allow or ())  # first, as is the strict policy: both may refuse, and then change nothing
    changed = [own.allow_classes(kit), own.plain_json(kit)] if loose else own.make_strict(kit)
    changed += [own.allow_packages(kit, allow or ()), own.survive(kit)]
    for path in dict.fromkeys(changed):
        print_line(f"{path}")
    console.print(f"restart {kit.name} for the change to take effect")


def ledger(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[WORKSPACE]", help="The site's FLARE workspace, or its folder of [storage] state."
        ),
    ] = Path("."),
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Record that lines of the ledger are missing or were changed. The site then releases again, "
            "and reports its ε as a lower bound.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this site has released by experiment (answers, ε, figures) and its remaining budgets."""
    from suture.federation.site.statement import find_ledger, read_statement

    if accept:
        find_ledger(folder)[0].accept()
    found = read_statement(folder)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False, allow_nan=False))
        return
    for table in _ledger_tables(found):
        console.print(table)
    for line in _ledger_totals(found):
        print_line(line)


def _ledger_totals(found: Statement) -> Iterator[str]:
    """Yield the totals over all experiments, and what the ledger lacks."""
    spent, bound = found.spent, _number(found.max_epsilon, "none")
    lower = "≥" if spent.epsilon is not None and (found.breaks or found.accepted) else "="
    yield (
        f"all experiments: {spent.updates} updates, {spent.unprotected} of them without noise; "
        f"ε {lower} {_number(spent.epsilon, '∞')} at δ = {found.delta:g}, composed as Gaussian mechanisms "
        f"(max_epsilon: {bound})"
    )
    yield f"experiments: {found.experiments} (max_experiments: {_left(found.max_experiments)})"
    yield from (f"ε is a lower bound: {why}" for why in found.accepted)
    yield from (f"incomplete ledger: {why}" for why in found.breaks)
    if found.breaks:
        yield (
            "The site releases nothing until you restore the newest copy of the ledger, or run the same "
            "command with --accept, which records the gap"
        )


def _ledger_tables(found: Statement) -> Iterator[Table]:
    """Yield the table of the experiments, and that of the classes."""
    heads = ("experiment", "clip", "noise", "answers", "left", "repeats left")
    table = _table(*heads, "updates", "ε", "figures", "other numbers", "last")
    for line in found.lines:
        name = line.experiment
        table.add_row(
            rich(name),
            _number(line.clip, "none"),
            _number(line.noise or None, "none"),
            str(line.answers),
            *map(_left, (found.answers_left[name], found.anew_left[name])),
            str(line.updates),
            _number(line.epsilon, "∞"),
            *map(str, (sum(line.figures.values()), line.numbers, line.last)),
        )
    yield table
    table = _table("class", "figures", "left")
    for name, times in found.figures.items():
        table.add_row(rich(name), str(times), _left(found.figures_left[name]))
    yield table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in ("experiment", "class") else "right")
    return table


def _left(budget: int) -> str:
    """A budget in few columns; that of public data is practically unlimited."""
    return str(budget) if budget < 10**6 else "≥ 10⁶"


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"


def egress(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Markdown file to write.")] = None,
) -> None:
    """Show what each method may send from a site: the allow-list of the site's filter."""
    from suture.core.files import atomic_write
    from suture.reports.egress_page import page

    if out is None:
        typer.echo(page(), nl=False)
    else:
        atomic_write(out, page().encode())
