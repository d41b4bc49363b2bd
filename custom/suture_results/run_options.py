"""What commands on runs and models share: their arguments and options, and the folders that these name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from suture.core.errors import ConfigError

if TYPE_CHECKING:
    from suture.data.config import SiteConfig


def model_folder(path: str | Path) -> Path:
    """Return the folder of a saved model: the one that is given, or model/ of a run."""
    folder = Path(path).expanduser()
    inside = folder / "model"
    return inside if not (folder / "model.json").exists() and inside.is_dir() else folder


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run: the one that is given, or that of its model/."""
    folder = Path(path).expanduser()
    return folder.absolute().parent if (folder / "model.json").exists() else folder


Part = Literal["train", "validation", "test"]
"""A split of a data set."""


Model = Annotated[Path, typer.Argument(help="A run, or its model/ folder.", callback=model_folder)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", callback=run_folder)]
MaxFailed = Annotated[
    int, typer.Option(min=0, help="Unusable inputs to accept; with more, the exit code is 1.")
]


def figures_table(title: str, *figures: str) -> Table:
    """Return a table of figures of classes, a row each."""
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("Class")
    for head in figures:
        table.add_column(head, justify="right")
    return table


def load_sources(paths: Iterable[Path]) -> dict[str, SiteConfig]:
    """Return the configuration of each data set by name: that of the file, or of a suture.toml's folder.

    A folder stands for the suture.toml in it, or for those of its sites.

    Raises:
        ConfigError: two data sets have the same name, or a configuration cannot be read.
    """
    from suture.data.config import load_site_config, site_files

    found: dict[str, Path] = {}
    files = [file for path in paths for file in site_files(path) or [path]]
    for path in files:
        name = path.stem if path.stem != "suture" else path.resolve().parent.name
        if name in found:
            raise ConfigError(
                f"{found[name]} and {path} would both be called {name!r} in the figure; rename one of "
                "the files (of a suture.toml, its folder)"
            )
        found[name] = path
    return {name: load_site_config(path) for name, path in found.items()}


def parse_number_map(prevalence: Iterable[str]) -> dict[str, float]:
    """Read 'CLASS=SHARE' of each --prevalence; a name may hold an equals sign."""
    found = {}
    for text in prevalence:
        label, _, share = text.rpartition("=")
        try:
            found[label.strip()] = float(share)
        except ValueError:
            raise ConfigError(f"--prevalence {text!r}: write for example 'CLASS=0.02'") from None
    return found
