"""`suture plot`: labels of data sets, predictions and features of a model, as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from suture.cli.common import ModelDevice, device_of, print_line
from suture.core.errors import ConfigError
from suture.core.files import atomic_write
from suture_results.run_options import Model, Part, load_sources

plot_app = typer.Typer(name="plot", help="Figures of labels, predictions and features.", no_args_is_help=True)


@plot_app.command()
def labels(
    configs: Annotated[
        list[Path],
        typer.Argument(help="The suture.toml of each data set, or a file named after it: nih.toml."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    per: Annotated[
        Literal["patient", "image"], typer.Option(help="Unit in which classes occur together.")
    ] = "patient",
) -> None:
    """Plot how often each class occurs in some data sets, and which classes occur together in each."""
    from suture.data.readers import load_table
    from suture_results.cooccurrence import cooccurrence, frequencies, unit_of
    from suture_results.plots import plot_cooccurrence, plot_frequencies

    tables = {name: load_table(config.data) for name, config in load_sources(configs).items()}
    plots = {"frequencies.svg": plot_frequencies({name: frequencies(t) for name, t in tables.items()})}
    for name, table in tables.items():
        unit = per if per == "image" else unit_of(table)
        shares = cooccurrence(table, per=unit)
        plots[f"cooccurrence-{name}.svg"] = plot_cooccurrence(table.labels.names, shares, name, unit)
    for file, content in plots.items():
        atomic_write(out / file, content)
        print_line(f"written: {out / file}")


@plot_app.command()
def predictions(
    model: Model,
    data: Annotated[
        list[Path],
        typer.Argument(
            help="The suture.toml of the images; more for thresholds of classes that it does not label."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="SVG to write.")],
    pair: Annotated[
        list[str] | None, typer.Option(help="Two classes, 'Mass:Lung Lesion'; by default those of the paper.")
    ] = None,
    split: Annotated[Part, typer.Option(help="Which images.")] = "test",
    device: ModelDevice = None,
) -> None:
    """Plot how the predictions of a model for related classes occur together."""
    from suture.data.config import load_site_config, site_files
    from suture_results.cooccurrence import RELATED, predicted_together
    from suture_results.plots import plot_contingencies

    for text in pair or ():
        if text.count(":") != 1:
            raise ConfigError(f"--pair {text!r} must name two classes: 'First Class:Second Class'")
    pairs = [(a.strip(), b.strip()) for a, b in (text.split(":") for text in pair or ())] or RELATED
    configs = [load_site_config(file) for path in data for file in site_files(path) or [path]]
    found = predicted_together(model, configs, split, pairs, device_of(device))
    for one in found:
        print_line(f"P({one.second} | {one.first}) = {one.second_given_first:.2f}")
        print_line(f"P({one.first} | {one.second}) = {one.first_given_second:.2f}")
        if one.why:
            print_line(one.why, style="yellow")
    atomic_write(out, plot_contingencies(found))
    print_line(f"written: {out}")


@plot_app.command()
def features(
    model: Model,
    data: Annotated[
        list[Path], typer.Argument(help="The suture.toml of each source, or a file named after it: nih.toml.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="SVG to write.")],
    images: Annotated[int, typer.Option(min=3, help="Maximum number of images of each source.")] = 500,
    split: Annotated[Part, typer.Option(help="Which images.")] = "test",
    seed: int = 1,
    device: ModelDevice = None,
) -> None:
    """Plot a model's features of images from several sources in two dimensions (t-SNE)."""
    from suture_results.plots import plot_features

    atomic_write(out, plot_features(model, load_sources(data), split, images, seed, device_of(device)))
    print_line(f"written: {out}")
