"""`suture watch`: a run while it works, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import print_line
from suture_results.run_options import RunFolder


def watch(
    run: RunFolder,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; by default 6016, or a free one.")
    ] = None,
) -> None:
    """Serve the live report of a run to browsers on this machine only; Ctrl-C ends it."""
    from suture_results.watch import serve, states

    try:
        with serve(run, port) as page:
            print_line(f"{page.url} shows {run}; Ctrl-C ends it")
            for line in states(run):
                print_line(line)
    except KeyboardInterrupt:
        print_line("the page is no longer served; the run continues")


@contextmanager
def accompany(folder: Path) -> Iterator[None]:
    """Serve the page of a run while the block runs it; it never fails the run."""
    from suture_results.watch import serve

    with ExitStack() as stack:
        try:
            print_line(f"watch it at {stack.enter_context(serve(folder)).url}")
        except OSError as error:
            print_line(f"its page cannot be served: {error.strerror}", style="yellow")
        yield
