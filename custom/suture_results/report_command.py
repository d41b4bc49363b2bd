"""`suture report`, and the table of a run that ends a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import console, print_line
from suture_results.run_options import RunFolder, parse_number_map


def show_run(folder: Path) -> None:
    """Show the table of a run, and the path of its report."""
    from suture_results.frames import open_results

    results = open_results(folder)
    for table in results.tables():
        console.print(table)
    said = results.sentences
    print_line(said.kept)
    for word, sentences in (("warning", said.left_out), ("caution", said.cautions)):
        for sentence in sentences:
            print_line(f"{word}: {sentence}", style="yellow")
    if exact := results.info.without_limits:
        here, changes, _ = exact.partition("With the sites' limits")  # a line for each site and split
        in_short = "In a federation (or with --limits) the sites' limits change some; the report lists them."
        print_line(f"{here}{in_short if changes else ''}")
    print_line(f"report: {folder / 'report.html'}")


def report(
    directory: RunFolder,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="Also write report_with_examples.html, with test images of each class if they are on this "
            "machine.",
        ),
    ] = False,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(help="'CLASS=0.02': show PPV and NPV of the class at this prevalence. Repeatable."),
    ] = None,
) -> None:
    """Render the report of a run again, and show its table."""
    from suture_results.report import write_report, write_report_with_examples

    write_report(directory, parse_number_map(prevalence or ()))
    show_run(directory)
    if examples:
        from suture_results.example_images import example_images

        path = write_report_with_examples(directory, example_images(directory))
        print_line(f"with images of patients (do not pass it on): {path}", style="yellow")
