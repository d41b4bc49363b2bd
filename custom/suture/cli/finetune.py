"""`suture finetune`: a trained model fine-tuned on a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    from suture.core.errors import ConfigError
    from suture.core.validation import parse
    from suture.data.config import load_site_config
    from suture.learning.finetuning import FILE, FineTuning, tune_own
    from suture.reports.finetuning_results import finetuning_table, read_finetuning_results

    if (out / FILE).exists():
        raise ConfigError(f"{out} already holds a fine-tuned model; choose another --out")
    config = load_site_config(data)
    if target is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"target": target})})
    steps = {"lr": config.training.lr, "batch_size": config.training.batch_size}
    settings: dict[str, Any] = {"runs": runs, "epochs": epochs, "examples": examples}
    settings |= {"start": "fresh" if fresh else "model"}
    settings |= {key: value for key, value in steps.items() if value is not None}
    tune_own(model, config, parse(FineTuning, settings, "suture finetune"), seed, out)
    tuned = read_finetuning_results(out)
    assert tuned is not None
    console.print(finetuning_table(tuned))
    print_line(f"written: {out / FILE}")
