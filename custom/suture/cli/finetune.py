"""`suture finetune`: a trained model fine-tuned on a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suture.cli.common import Model, console, print_line

if TYPE_CHECKING:
    from suture.data.config import SiteConfig
    from suture.learning.finetuning import FineTuning
    from suture.models.classifier import Classifier


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
    from suture.learning.finetuning import FILE, FineTuning

    if (out / FILE).exists():
        raise ConfigError(f"{out} already holds a fine-tuned model; choose another --out")
    config = _config(data, target)
    steps = {"lr": config.training.lr, "batch_size": config.training.batch_size}
    settings: dict[str, Any] = {"runs": runs, "epochs": epochs, "examples": examples}
    settings |= {"start": "fresh" if fresh else "model"}
    settings |= {key: value for key, value in steps.items() if value is not None}
    _finetune(model, config, parse(FineTuning, settings, "suture finetune"), seed, out)


def _config(data: Path, target: str | None) -> SiteConfig:
    """Return the configuration of the data, with the class of --target where it is given."""
    from suture.data.config import load_site_config

    config = load_site_config(data)
    if target is None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"target": target})})


def _finetune(model: Path, config: SiteConfig, how: FineTuning, seed: int, out: Path) -> None:
    """Fine-tune and test, write tuned.json and the model of the first run into OUT, and show the table."""
    from suture.core.files import write_json
    from suture.learning.finetuning import FILE, task_name, tune_task, written
    from suture.models.saved import load_spec, save_model
    from suture.reports.finetuning_results import finetuning_table, read_finetuning_results

    name = task_name(config)
    first: list[Classifier] = []

    def keep(tuned: Classifier, run: int) -> None:
        if run == 0:
            first.append(tuned)

    found = tune_task(model, config, name, how, seed, keep)
    save_model(first[0], load_spec(model), out / "model", {"begun": str(model)})
    write_json(out / FILE, written(how, seed, {name: found}))
    tuned = read_finetuning_results(out)
    assert tuned is not None
    console.print(finetuning_table(tuned))
    print_line(f"written: {out / FILE}")
