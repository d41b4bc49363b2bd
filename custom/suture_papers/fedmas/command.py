"""`suture pretrain`: a frozen prior from images without labels."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from suture.cli.common import ModelDevice, device_of, print_line
from suture.core.errors import ConfigError
from suture.core.files import make_folder

if TYPE_CHECKING:
    from torch import Tensor

    from suture_papers.fedmas.pretraining import Pretraining


def pretrain(
    configs: Annotated[list[Path], typer.Argument(help="The suture.toml of each data set.")],
    out: Annotated[Path, typer.Option(help="Folder to write prior.safetensors and prior.json into.")],
    backbone: Annotated[str, typer.Option(help="cnn, resnet_small or resnet18.")] = "cnn",
    size: Annotated[int, typer.Option(help="Side of the images.")] = 64,
    color: Annotated[bool, typer.Option("--color", help="Images in colour.")] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 20,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another setting of MoCo v2: batch_size, lr, weight_decay, momentum, queue, temperature, "
            "projection, or of its augmentation, views.crop=0.4. Repeatable.",
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the prior.")] = None,
    seed: int = 1,
    device: ModelDevice = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads; they affect rounding.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the prior in --out.")] = False,
) -> None:
    """Train a prior by MoCo v2 on the training images of some data sets, without labels."""
    import torch

    from suture.core.validation import parse
    from suture_papers.fedmas.pretraining import Pretraining

    chosen: dict[str, Any] = {"backbone": backbone, "size": size, "color": color, "epochs": epochs}
    spec = parse(Pretraining, chosen | _settings(settings or []), "suture pretrain")
    _check_out(out, overwrite)
    torch.set_num_threads(threads)
    print_line(f"written: {_pretrain(configs, spec, out, seed, device_of(device), licence)}")


def _settings(words: list[str]) -> dict[str, Any]:
    """Return the fields of `Pretraining`, and of its `views`, that KEY=VALUE words change; values are JSON.

    Raises:
        ConfigError: a word has another form.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        part, dot, name = key.strip().rpartition(".")
        try:
            (found.setdefault(part, {}) if dot else found)[name] = json.loads(text)
        except (ValueError, TypeError):
            raise ConfigError(f"--set {word!r}: write for example lr=0.03 or views.crop=0.4") from None
    return found


def _check_out(out: Path, overwrite: bool) -> None:
    """Check, before hours of training, that the prior can be written into OUT.

    Raises:
        ConfigError: the folder already holds a prior, or cannot be made.
    """
    if (out / "prior.json").exists() and not overwrite:
        raise ConfigError(f"{out} already contains prior.json; choose another folder, or add --overwrite")
    try:
        make_folder(out)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder with --out") from error


def _pretrain(
    configs: list[Path], spec: Pretraining, out: Path, seed: int, device: str, licence: str | None
) -> Path:
    """Train a prior and write it into OUT; return the path of its .json."""
    from suture.models.priors import freeze, save_prior
    from suture_papers.fedmas.pretraining import pretrain as train

    images, data = _images(configs, spec.size, spec.color)
    print_line(f"{len(images):,} images of {len(data)} data sets")
    since = time.monotonic()

    def report(epoch: int, loss: float) -> None:
        each = (time.monotonic() - since) / epoch
        left = f"{each:.1f} s each, {each * (spec.epochs - epoch) / 60:.1f} min left"
        print_line(f"epoch {epoch}/{spec.epochs}  loss {loss:.4f}  {left}")

    try:
        done = train(images, spec, seed, device, report)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; nothing was written", style="yellow")
        raise typer.Exit(130) from None
    text = f"MoCo v2, {spec.backbone}, {len(images):,} images without labels"
    prior = freeze(spec.backbone, done.network, done.width, spec.preprocessing, text)
    facts = {
        "data": data,
        "images": len(images),
        "seed": seed,
        "training": dataclasses.asdict(spec),
        "epochs": spec.epochs,
        "losses": list(done.losses),
        "final_loss": done.losses[-1],
    }
    return save_prior(out, spec.backbone, prior, licence, facts)


def _images(configs: list[Path], size: int, color: bool) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return all training images, uint8 ``[n, 1 or 3, size, size]``, and their number by data set.

    A prior is published, so the numbers are given without the names of folders.
    """
    import torch

    from suture.data.config import load_site_config
    from suture.learning.samples import load_samples
    from suture.models import ModelSpec

    parts, data = [], []
    for path in configs:
        config = load_site_config(path)
        config = config.model_copy(update={"data": config.data.model_copy(update={"color": color})})
        _, samples = load_samples(config, ModelSpec(size=size), path.resolve().parent.name, only="train")
        parts.append(samples["train"].inputs["image"])
        data.append({"dataset": config.data.dataset, "images": len(parts[-1])})
    # One data set stays memory-mapped; several are copied into memory.
    return parts[0] if len(parts) == 1 else torch.cat(parts), data
