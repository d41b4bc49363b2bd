"""`suture doctor`, `policy`, `clean`, `ledger` and `egress`: for the administrator of one site or server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Json, console, print_line
from suture.core.escaping import printable, rich
from suture.core.files import atomic_write

Workspace = Annotated[
    Path, typer.Argument(help="The party's FLARE workspace: the folder with startup/ and local/.")
]
_MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


def doctor(
    workspace: Workspace = Path("."),
    as_json: Json = False,
) -> None:
    """Check this site or server: versions, certificates, connection, policy, data, disk, GPU."""
    from suture_admin.doctor import examine

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
    loose: Annotated[
        bool,
        typer.Option(
            "--loose",
            help="Only add Suture's classes to FLARE's list; jobs may bring code and use FLARE's other "
            "classes.",
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="PACKAGE.",
            help="Allow the methods of an installed package, or one class by its dotted path. Repeatable.",
        ),
    ] = None,
) -> None:
    """Allow only Suture's jobs at this site or server: no code from jobs, no other classes, no log upload.

    A site also filters each of its answers. Both restart when their process ends.
    """
    from suture.flare.kit import read_kit
    from suture_admin import policy as own

    kit = read_kit(workspace)
    own.check_entries(allow or ())  # first, as is the strict policy: both may refuse, and then change nothing
    changed = [own.allow_classes(kit), own.plain_json(kit)] if loose else own.make_strict(kit)
    changed += [own.allow_packages(kit, allow or ()), own.survive(kit)]
    for path in dict.fromkeys(changed):
        print_line(f"{path}")
    console.print(f"restart {kit.name} for the change to take effect")


def clean(
    workspace: Annotated[
        Path | None,
        typer.Argument(
            help="The party's FLARE workspace; without it, the features that your runs on this machine share."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Leave what was used in the last DAYS.")] = 30,
    yes: Annotated[bool, typer.Option("--yes", help="Delete what is listed.")] = False,
) -> None:
    """List what finished work has left on the disk, and delete it with --yes.

    At a site or server: folders of ended jobs, and states of finished experiments, which then cannot be
    continued. Results, logs and ledgers stay.
    """
    from suture_admin.cleaning import leftovers, remove

    total = 0.0
    for one in leftovers(workspace, days):
        megabytes = one.size / 1e6
        if yes and not remove(one):
            print_line(f"in use: {one.what}")
            continue
        total += megabytes
        print_line(f"{'deleted: ' if yes else ''}{one.what}, {megabytes:.1f} MB")
    print_line(f"{total:.1f} MB {'deleted' if yes else 'can be deleted: add --yes'}")


def forget(
    site: Annotated[str, typer.Argument(metavar="SITE", help="Name of the site.")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The experiment's folder at the server, or a run on this machine."
        ),
    ],
) -> None:
    """Remove a site from a model exactly, as if it had never taken part (afl); other methods say why not."""
    from suture_admin.removal import forget as remove

    for path in remove(folder, site):
        print_line(f"deleted: {path}")
    print_line(f"written: {folder / 'model'}, the model without {site}; fit its thresholds again")
    console.print(
        f"still there: {site}'s name and figures in {folder} (run.json, metrics.json, *.jsonl, reports); "
        "copies, exports and backups of the former model and of the deleted files; at the site the folder of "
        "the experiment in its [storage] state, with its kept answer; and its ledger, which stays",
        markup=False,
    )


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
    as_json: Json = False,
) -> None:
    """Show what this site has released by experiment (answers, ε, figures) and its remaining budgets."""
    from suture_admin.ledger import ledger_tables, ledger_totals, statement_of

    found = statement_of(folder, accept)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False, allow_nan=False))
        return
    for table in ledger_tables(found):
        console.print(table)
    for line in ledger_totals(found):
        print_line(line)


def egress(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Markdown file to write.")] = None,
) -> None:
    """Show what each method may send from a site: the allow-list of the site's filter."""
    from suture_admin.egress_page import page

    if out is None:
        typer.echo(page(), nl=False)
    else:
        atomic_write(out, page().encode())
