"""`suture doctor`, `suture policy` and `suture egress`: for the administrator of one site or server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from suture.cli.common import console, print_line

Workspace = Annotated[
    Path, typer.Argument(help="The party's FLARE workspace: the folder with startup/ and local/.")
]
Loose = Annotated[
    bool,
    typer.Option(
        "--loose",
        help="Only add suture's classes to FLARE's list: jobs may bring code and name FLARE's other classes.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PACKAGE.",
        help="Allow the methods of an installed package, or one class by its dotted path; repeatable.",
    ),
]
_MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


def doctor(
    workspace: Workspace = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine this site or server: versions, certificates, connection, policy, data, disk, GPU."""
    from suture.flare.admin.doctor import examine

    findings = examine(workspace)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print_line(f"{_MARKS[finding.status]} {finding.about}: {escape(finding.text)}")
            if finding.remedy:
                remedy = f"        {escape(finding.remedy)}"
                console.print(remedy, soft_wrap=True, highlight=False, style="dim")
    if any(finding.status == "error" for finding in findings):
        raise typer.Exit(1)


def policy(
    workspace: Workspace,
    loose: Loose = False,
    allow: Allow = None,
    former: Annotated[
        bool,
        typer.Option("--strict", "--refuse-code", "--keep-logs", "--survive", hidden=True),
    ] = False,
) -> None:
    """Let this site or server run suture's jobs alone: no code of jobs, no other class, logs kept.

    A site also filters every answer itself. Both restart after the death of a process.
    """
    from suture.flare.admin import policy as own
    from suture.flare.admin.kit import read_kit

    if loose and former:
        raise typer.BadParameter("--loose leaves open what the other options close")
    kit = read_kit(workspace)
    own.check_entries(allow or ())  # first, as is the strict policy: both may refuse, and then change nothing
    changed = [own.allow_classes(kit), own.plain_json(kit)] if loose else own.make_strict(kit)
    changed += [own.allow_packages(kit, allow or ()), own.survive(kit)]
    for path in dict.fromkeys(changed):
        print_line(f"{path}")
    console.print(f"restart {kit.name} for the change to take effect")


def egress(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Markdown file to write.")] = None,
) -> None:
    """Show everything that leaves a site, by method: the allow-list of the site's filter."""
    from suture.core.files import atomic_write
    from suture.reports.egress_page import page

    if out is None:
        typer.echo(page(), nl=False)
    else:
        atomic_write(out, page().encode())
