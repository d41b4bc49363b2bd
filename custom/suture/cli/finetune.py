"""`suture finetune`: a trained model fine-tuned on a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Model, console, print_line


def finetune(
    model: Model,
    data: Annotated[Path, typer.Argument(help="The suture.toml of the data.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for tuned.json and the model.")],
    target: Annotated[str | None, typer.Option(help="Class to train; by default [data] target.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    runs: Annotated[int, typer.Option(min=1, help="Random splits of the data; each trains a model.")] = 5,
    examples: Annotated[int | None, typer.Option(min=4, help="Maximum number of training examples.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights, for comparison.")
    ] = False,
    seed: int = 1,
) -> None:
    """Fine-tune a trained model on a task of your own, and test it.

    The model of the first run is saved in OUT/model. Learning rate, batch size, device, threads and
    precision are those of [training] in the suture.toml.
    """
    from suture.learning.finetuning import FILE
    from suture.reports.finetuning_results import finetuning_table
    from suture.simulation import actions

    tuned = actions.finetune(model, data, out, target, epochs, runs, examples, fresh, seed)
    console.print(finetuning_table(tuned))
    print_line(f"written: {out / FILE}")
