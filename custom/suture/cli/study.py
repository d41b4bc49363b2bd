"""`suture init` and `suture check`: a study of one's own hospitals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from suture.cli.common import console, print_line
from suture.core.errors import ConfigError, SutureError

Study = Annotated[Path, typer.Argument(help="Folder of the study.")]


def init(
    study: Study,
    site: Annotated[
        list[str], typer.Option("--site", help="name=PATH of a site's folder or table. Repeatable.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written.")] = False,
) -> None:
    """Look at the data of some hospitals and write a suture.toml for each, and a job."""
    from suture.simulation.new_study import as_toml, look, write_study

    found = look(_sites(site))
    for name, guess in found.items():
        console.print(f"[bold]{escape(name)}[/]")
        print_line(as_toml(guess))
    if dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here; write --yes, or --dry-run to look only")
    if not yes:
        typer.confirm("write these files?", default=True, abort=True)
    for path in write_study(study, found):
        print_line(f"written: {path}")
    print_line(f"next: suture check {study}")
    print_line(f"then: suture run {study} --env local")


def _sites(given: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not separator or not path:
            raise ConfigError(f"--site {text!r} has no path; write name=PATH")
        if name in found:
            raise ConfigError(f"--site {name} is given twice; name the sites differently")
        found[name] = Path(path)
    return found


def check(study: Study) -> None:
    """Check the data of all sites of a study together: counts, names that look alike, faults.

    Also writes check.html, a page with a few images of each site as the model sees them.
    """
    from suture.data.quality import check as check_data
    from suture.data.quality import render
    from suture.simulation.study import StudySites
    from suture.simulation.study_check import compare, render_matrix
    from suture.simulation.study_page import image_size, write_page

    configs = StudySites(str(study)).configs()
    size, job_fault = image_size(study)
    findings = {name: check_data(config) for name, config in configs.items()}
    for name, found in findings.items():
        console.rule(f"[bold]{escape(name)}")
        console.print(render(found))
    console.rule("[bold]all sites")
    together = compare(configs, findings, job_fault)
    console.print(render_matrix(findings, together))
    page = write_page(study, size, configs, findings, together)
    print_line(f"page: {page} (images of patients: it stays on this machine)")
    problems = sum(len(found.problems) for found in findings.values()) + len(together.problems)
    if problems:
        raise SutureError(f"{study}: {problems} problems; correct them before you run it")
    print_line(f"next: suture run {study} --env local")
