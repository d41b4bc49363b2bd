"""A trained model put to a task of its own: fine-tuned on most of its data and tested on the rest.

Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV: the server's model begins the training of a task that no site
had; 90 % of its data train, 10 % test, ten epochs, five times. What a good beginning saves shows in the
learning curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.core.seeds import seed_for
from suture.core.validation import STRICT
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples
from suture.data.split import by_patient
from suture.learning.losses import masked_bce
from suture.learning.metrics import auroc, youden
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, predict
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, load_tensors


@validated(frozen=True, config=STRICT)
class FineTuning:
    """How a model is fine-tuned.

    Attributes:
        runs: divisions of the data, each trained anew.
        epochs, batch_size, lr: of Adam, fresh in each run.
        test: share of the data that tests.
        examples: train on no more than so many, and test on all that does not train; None trains on all but
            the test part.
        few: a run's targets are trained on no more than so many as well, each as a task of its own.
        start: from the trained ``model``, or ``fresh`` from a random one, to compare.
    """

    runs: Annotated[int, Field(ge=1)] = 5
    epochs: Annotated[int, Field(ge=1)] = 10
    batch_size: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0)] = 1e-3
    test: Annotated[float, Field(gt=0, lt=1)] = 0.1
    examples: Annotated[int, Field(ge=4)] | None = None
    few: Annotated[int, Field(ge=4)] | None = None
    start: Literal["model", "fresh"] = "model"


@dataclass(frozen=True)
class Tuned:
    """One run: the figures of each epoch, and those at the threshold of the greatest Youden index at the end.

    The threshold is fitted on the scores that it is tested on, as in the paper.
    """

    auroc: tuple[float, ...]
    precision: float
    recall: float
    f1: float
    train: int
    test: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"auroc": list(self.auroc)}


def finetune(
    name: str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    how: FineTuning,
    seed: int,
    *,
    device: str = "cpu",
    amp: bool = False,
    done: Callable[[Classifier, int], None] = lambda model, run: None,  # noqa: ARG005
) -> list[Tuned]:
    """All runs on one task.

    Args:
        name: the task, for seeds and messages.
        tensors: of the trained model; its head is of one row.
        samples: all data of the task, ``y`` of one column.
        seed: with name and run of each division and of the order of training. It does not depend on where the
            model comes from, so that methods are compared on the same data.
        amp: in mixed precision.
        done: called with the model of each run.

    Raises:
        DataError: the data are too few to be divided.
    """
    results = []
    for run in range(how.runs):
        model = build(spec, LabelSet((name,)), seed_for(seed, "finetune", run), pretrained=False)
        if how.start == "model":
            load_tensors(model, tensors)
        train, test = divided(samples, how, seed_for(seed, "finetune", name, run), name)
        context = SiteContext(
            name,
            model.to(device),
            {"train": train, "test": test},
            spec.preprocessing,
            Augmentation(),
            torch.device(device),
            amp,
        )
        results.append(_tuned(context, how, seed_for(seed, run)))
        done(model, run)
    return results


def _tuned(context: SiteContext, how: FineTuning, seed: int) -> Tuned:
    """Trains a model and measures it after each epoch."""
    train, test = context.samples["train"], context.samples["test"]
    truth = test.y.squeeze(1).numpy()
    areas: list[float] = []
    local = LocalTraining(lr=how.lr, epochs=how.epochs, batch_size=how.batch_size)

    def scores() -> Any:
        return predict(context, test).squeeze(1).numpy()

    fit(
        context,
        on_known(masked_bce),
        LocalRound(local, "average", seed, 1),
        after_epoch=lambda: areas.append(auroc(truth, scores())),
    )
    at = youden(truth, scores())
    return Tuned(tuple(areas), at.precision, at.recall, at.f1, len(train), len(test))


def divided(samples: Samples, how: FineTuning, seed: int, name: str) -> tuple[Samples, Samples]:
    """Training and test part, divided by patients, either kind as often in each as in the whole.

    Where few examples train, all others test, except those of a patient of whom one trains.

    Raises:
        DataError: a part would have no positive or no negative.
    """
    y = samples.y.numpy()
    split = np.array(by_patient(samples.patients, y, (1 - how.test, 0.0, how.test), seed))
    order = np.random.default_rng(seed).permutation(len(samples))
    parts = []
    for part, most in (("train", how.examples), ("test", None)):
        kinds = [order[(split[order] == part) & (y[order, 0] == value)] for value in (1, 0)]
        if not all(map(len, kinds)):
            raise DataError(
                f"{name} has too few examples to fine-tune and test: {int((y == 1).sum())} positive and "
                f"{int((y == 0).sum())} negative"
            )
        parts.append(np.concatenate([rows if most is None else rows[: most // 2] for rows in kinds]))
    train, test = parts
    if how.examples is not None:
        patients = np.array(samples.patients)
        test = order[~np.isin(patients[order], patients[train])]
    return samples.rows(torch.from_numpy(train)), samples.rows(torch.from_numpy(test))


def summarised(runs: list[Tuned]) -> dict[str, Any]:
    """Mean and standard deviation over the runs, and every run."""
    last = {"auroc": [run.auroc[-1] for run in runs]} | {
        key: [getattr(run, key) for run in runs] for key in ("precision", "recall", "f1")
    }
    return {
        "mean": {key: float(np.mean(values)) for key, values in last.items()},
        "sd": {key: float(np.std(values, ddof=1)) if len(runs) > 1 else None for key, values in last.items()},
        "runs": [run.to_dict() for run in runs],
    }
