"""`suture doctor` and `suture policy`: for the administrator of one site or of the server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

console = Console()

Workspace = Annotated[
    Path, typer.Argument(help="The party's FLARE workspace: the folder with startup/ and local/.")
]
_MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


def doctor(
    workspace: Workspace = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look over this site or server: versions, certificates, connection, policy, data, disk, GPU."""
    from suture.flare.admin.doctor import examine

    findings = examine(workspace)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            line = f"{_MARKS[finding.status]} {finding.about}: {escape(finding.text)}"
            console.print(line, soft_wrap=True, highlight=False)
            if finding.remedy:
                console.print(
                    f"        {escape(finding.remedy)}", soft_wrap=True, highlight=False, style="dim"
                )
    if any(finding.status == "error" for finding in findings):
        raise typer.Exit(1)


def policy(
    workspace: Workspace,
    no_code: Annotated[
        bool, typer.Option("--refuse-code", help="Refuse jobs that bring code of their own (byoc).")
    ] = False,
    outlive: Annotated[
        bool,
        typer.Option(
            "--survive",
            help="Start a killed job process again (site); forget jobs of before a crash (server).",
        ),
    ] = False,
    no_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Do not send the site's error log to the server.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="A site of suture alone: its own filter for every job, no other class, no code, no logs.",
        ),
    ] = False,
) -> None:
    """Allow suture's classes at this site or server, and nothing else; and refuse more where asked to."""
    from suture.flare.admin.kit import read_kit
    from suture.flare.admin.policy import allow_classes, keep_logs, refuse_code, survive
    from suture.flare.admin.strict import make_strict

    kit = read_kit(workspace)
    changed = make_strict(kit) if strict else []  # first, as it may refuse
    changed += [allow_classes(kit)]
    changed += [refuse_code(kit)] if no_code else []
    changed += [survive(kit)] if outlive else []
    changed += [keep_logs(kit)] if no_logs else []
    for path in dict.fromkeys(changed):
        console.print(f"{path}", soft_wrap=True, highlight=False)
    console.print(f"start {kit.name} anew for the change to hold")
