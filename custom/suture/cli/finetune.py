"""`suture finetune`: a trained model put to a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()

_OWN = "; by default that of [training], or else "


def finetune(
    model: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    data: Annotated[Path, typer.Argument(help="The suture.toml of the data.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for tuned.json and the model.")],
    target: Annotated[str | None, typer.Option(help="The class; by default [data] target.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    runs: Annotated[int, typer.Option(min=1, help="Divisions of the data, each trained anew.")] = 5,
    examples: Annotated[int | None, typer.Option(min=4, help="Train on no more than so many.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin at random instead, to compare.")] = False,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of Adam{_OWN}1e-3.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=2, help=f"Images or documents a step{_OWN}64.")
    ] = None,
    seed: int = 1,
) -> None:
    """Fine-tune a trained model on a task of your own, and test it.

    The model of the first run is kept in OUT/model. Device, threads and precision are those of [training].
    """
    from suture.core.errors import ConfigError
    from suture.core.files import write_json
    from suture.core.validation import parse
    from suture.data.config import load_site_config
    from suture.learning.finetuning import FILE, FineTuning, task_name, tune_task, written
    from suture.models.classifier import Classifier
    from suture.models.saved import load_spec, save_model
    from suture.reports.finetuning_results import finetuning_table, read_finetuning_results

    if (out / FILE).exists():
        raise ConfigError(f"{out} holds a fine-tuned model already; choose another --out")
    config = load_site_config(data)
    if target is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"target": target})})
    start = "fresh" if fresh else "model"
    own = config.training
    steps = {"lr": own.learning_rate if lr is None else lr, "batch_size": batch_size or own.batch_size}
    settings: dict[str, Any] = {"runs": runs, "epochs": epochs, "examples": examples, "start": start}
    settings |= {key: value for key, value in steps.items() if value is not None}
    how = parse(FineTuning, settings, "suture finetune")
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
    console.print(f"written: {out / FILE}", soft_wrap=True, highlight=False)
