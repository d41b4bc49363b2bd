"""The training loop that every method uses, and prediction, at a site."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError, SutureError
from suture.core.runtime import out_of_memory, repeatable, seed_for, seed_torch
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import (
    FEATURES,
    ROW,
    Augmentation,
    Batch,
    Preprocessing,
    Samples,
    augment,
    class_aware,
    endless,
    parts,
)
from suture.data.table import Split
from suture.learning.dp_sgd import PatientPrivacy, refuse_batch_norm
from suture.learning.steps import (
    LossScale,
    NonFiniteLoss,
    StepLosses,
    load_optimiser_state,
    optimiser_of,
    optimiser_state_of,
)
from suture.learning.steps import Objective as Objective
from suture.models.classifier import (
    Classifier,
    NormPolicy,
    load_tensors,
    reinitialise_head,
    train_mode,
    train_parameters,
)

if TYPE_CHECKING:
    from suture.learning.features import FeatureStore
    from suture.models.priors import Prior

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_MOST = 256
"""Images, or documents, of a batch of an evaluation."""

_PIXELS = 2**20
"""Of a batch on the CPU: 256 images of 64 px. The largest activation of a DenseNet121 or a ResNet-18 has 16
values a pixel, 64 MiB in all; larger batches are not faster (`benchmarks/parts/backbones.py`)."""

_Result = TypeVar("_Result")


def evaluation_batch(inputs: Mapping[str, Tensor], device: torch.device | str, most: int = _MOST) -> int:
    """Return how many inputs are computed at a time: `most`, and on the CPU no more than `_PIXELS` of images.

    It depends on nothing that is measured, because the last bits of a result depend on the batch.

    Args:
        inputs: as of a batch; images ``[n, channels, h, w]``.
    """
    image = inputs.get("image")
    if image is None or torch.device(device).type != "cpu":
        return most
    return max(1, min(most, _PIXELS // image.shape[2:].numel()))


def retry_in_smaller_batches(compute: Callable[[int], _Result], size: int) -> _Result:
    """Return the result in batches of `size`, or of half as long as the memory of the device is too small.

    Raises:
        Exception: of `compute`; that memory is full, where it is too small even for batches of one.
    """
    while True:
        try:
            return compute(size)
        except (RuntimeError, MemoryError, OSError) as error:
            if size <= 1 or not out_of_memory(error):
                raise
        # Outside the handler, because its traceback holds the tensors that filled the memory.
        size //= 2
        log.warning("the memory of the device is full; computing in batches of %d", size)


_COPIES = {"adam": 4, "adamw": 4, "sgd": 3}
"""Tensors of a weight's size in a step: weight, gradient and the optimiser's moments."""


def activation_bytes(site: SiteContext, objective: Objective) -> float:
    """The bytes that a forward pass keeps for the backward pass, for each image: of four less two, by two."""
    state = {name: tensor.clone() for name, tensor in site.model.state_dict().items()}
    site.model.train()
    with seed_torch(0, site.device):
        two, four = (_kept_bytes(site, objective, n) for n in (2, 4))
    site.model.load_state_dict(state)  # batch norm has seen the images
    return (four - two) / 2


def _kept_bytes(site: SiteContext, objective: Objective, n: int) -> int:
    """The bytes of all that is kept, a storage that several operations keep counted once."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    train = site.samples["train"]
    batch = ready_inputs(site, train.batch(torch.arange(n) % len(train)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = objective(site.model, batch)
    del graph  # held until here, that no storage takes the place of another
    return sum(sizes.values())


def check_memory(
    site: SiteContext, objective: Objective, optimiser: str, size: int, free: int | None = None
) -> None:
    """Refuse a batch that cannot fit on the site's GPU; elsewhere, or without images, nothing is checked.

    What must be there at once is counted: weights, gradients, moments and activations, but no working memory.
    So a batch that passes may still not fit, and one that is refused does not.

    Args:
        size: images of the smallest batch that the site would try.
        free: bytes, by default those of the GPU.

    Raises:
        ConfigError: names what is needed and free, and the batch that may fit.
    """
    if (free is None and site.device.type != "cuda") or not len(site.samples["train"]):
        return
    if free is None:
        free = torch.cuda.mem_get_info(site.device)[0] + torch.cuda.memory_reserved(site.device)
    copies = ((_COPIES[optimiser] if p.requires_grad else 1, p) for p in site.model.parameters())
    weights = sum(n * p.numel() * p.element_size() for n, p in copies)
    each = activation_bytes(site, objective)
    needed = weights + size * each
    if needed <= free:
        return
    fits = int((free - weights) / each)
    remedy = f"set batch_size below {fits + 1}" if fits >= 2 else "take a smaller model or another device"
    raise ConfigError(
        f"{site.name}: a step of {size} images needs at least {needed / 2**30:.3g} GiB of {site.device}, "
        f"where {free / 2**30:.3g} GiB are free; {remedy} under [training], or end what else uses it"
    )


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits, y and known ``[n, c]`` to a scalar."""

Observer = Callable[[Tensor, Tensor], None]
"""Called with rows ``[m]`` and their positive pseudo-labels ``[m, c]``."""

Batches = Callable[[torch.Generator, torch.Generator], Iterable[Batch]]
"""The batches of an epoch, from a generator for their order and one for their augmentation."""

_LOGITS = 2**24
"""Logits that are kept on the device before they are copied to the CPU: 64 MiB."""


def prefetch(items: Iterable[_T], count: int) -> Iterator[_T]:
    """Yield the items in their order, while one thread makes the `count` next ones.

    An error of making an item is raised where that item would have been yielded. The thread has ended when
    the last item was yielded, an error was raised, or the iterator was closed.

    Args:
        count: of items that wait at most; 0 makes each when it is asked for, without a thread.
    """
    source = iter(items)
    if not count:
        yield from source
        return
    end = object()
    maker = ThreadPoolExecutor(1, "suture-batches")
    try:
        waiting = deque(maker.submit(next, source, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(maker.submit(next, source, end))
            yield item  # type: ignore[misc]
    finally:
        maker.shutdown(cancel_futures=True)


def view_key(inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the input that methods have views of: the image, or its features."""
    return FEATURES if FEATURES in inputs else "image"


@validated(frozen=True, config=STRICT)
class LocalTraining:
    """How a site trains in one round.

    Attributes:
        lr: learning rate; a site may set its own.
        epochs: passes over the local data in each round (E of the paper). A job needs 1 or more, or
            `iterations`; 0 does not train, to measure the time of everything else.
        batch_size: images or documents in each step; a site may set its own.
        iterations: steps a round in place of epochs, over batches without end; None for epochs.
        optimiser: ``adam``; ``adamw``, with decoupled weight decay; or ``sgd`` with Nesterov momentum.
        weight_decay: L2 penalty.
        betas: decay of Adam's two moments.
        momentum: momentum of SGD.
        final_lr: learning rate of the last round, reached along half a cosine; None keeps it constant.
        warmup_epochs: epochs of a first round that trains only the head, with the backbone frozen; 0 for
            none.
        warmup_lr: learning rate of the warm-up, at every site.
        warmup_init: initial head and hidden block of the warm-up: ``common`` to all sites, or ``independent``
            random ones, whose units are not aligned when they are averaged.
        clip: maximum norm of a step's gradient over all trained parameters; None does not clip.
        sampling: ``shuffled`` images, each once in an epoch; or ``class_aware``, every class that the site
            has equally often (Kang et al., ICLR 2020; see `suture.data.batch.class_aware`).
    """

    lr: Annotated[float, Field(gt=0)] = 5e-5
    epochs: Annotated[int, Field(ge=0, le=LIMIT)] = 1
    batch_size: Annotated[int, Field(ge=1, le=LIMIT)] = 64
    iterations: Annotated[int, Field(ge=1, le=LIMIT)] | None = None
    optimiser: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    final_lr: Annotated[float, Field(gt=0)] | None = None
    warmup_epochs: Annotated[int, Field(ge=0, le=LIMIT)] = 0
    warmup_lr: Annotated[float, Field(gt=0)] = 5e-3
    warmup_init: Literal["common", "independent"] = "common"
    clip: Annotated[float, Field(gt=0)] | None = None
    sampling: Literal["shuffled", "class_aware"] = "shuffled"

    def images_of(self, images: int) -> int:
        """How many of so many images the steps of a round are of, at most."""
        return images if self.iterations is None else min(images, self.iterations * self.batch_size)

    def draws_of(self, patients: int) -> tuple[float, int]:
        """The probability q that a step of `PatientPrivacy` draws a patient, and the steps of an epoch."""
        rate = min(1.0, self.batch_size / max(patients, 1))
        return rate, self.iterations or math.ceil(1 / rate)


@dataclass(frozen=True)
class SiteContext:
    """What a method works with at a site.

    Attributes:
        name: the site, for seeds and errors.
        model: holds what was received; its head has one row for each of its `labels`.
        samples: the site's data, cut to the model's labels.
        prepare: uint8 images to normalised floats; idle where the inputs are text.
        lr, batch_size: the site's own, where its configuration has them.
        prior: a frozen network that the method compares the model with.
        cache: results that a method may compute again; it lives as long as the process.
        identified: ``[c]``, which of the model's classes the site annotates; None for all.
        observe: receives pseudo-labels; a simulation counts how many are right.
        record: receives figures of each class by name, ``[c]``; a simulation writes them to its diagnostics.
        cache_dir: folder of the site's `[storage] cache`; None keeps nothing on disk.
        min_count: images below which a site says nothing of a class: a method that sends tensors of classes
            gives such a class the weight 0 there, and zeros.
        round_counts: numbers of images of a class that leave are rounded to multiples of this.
        prefetch: training batches that a thread reads ahead; 0 reads each when its step begins.
        scale: of the loss at the start of a round in fp16; None for the last round's.
        features: of a frozen encoder, from which views of training images are drawn; None where it reads
            images in each step.
        private: how `fit` protects each patient; None for without.
    """

    name: str
    model: Classifier
    samples: Mapping[Split, Samples]
    prepare: Preprocessing
    augmentation: Augmentation
    device: torch.device
    lr: float | None = None
    batch_size: int | None = None
    prior: Prior | None = None
    cache: dict[str, Tensor] = field(default_factory=dict)
    identified: Tensor | None = None
    observe: Observer | None = None
    record: Callable[[Mapping[str, Tensor]], None] | None = None
    cache_dir: Path | None = None
    min_count: int = 0
    round_counts: int = 1
    prefetch: int = 2
    scale: float | None = None
    features: FeatureStore | None = None
    private: PatientPrivacy | None = None


@dataclass(frozen=True)
class LocalRound:
    """One round of local training, with everything resolved that does not depend on the method.

    Attributes:
        local: learning rate, epochs and batch size of this site in this round.
        norm: what batch norm does while the model trains.
        seed, round: with the site's name they seed shuffling, augmentation and dropout.
        optimiser_state: of the round before; empty in the first round of a phase.
        head_only: whether the backbone rests, in eval mode, and only the head is trained.
        keep_best: the validation loss by which the best epoch is kept; None keeps the last epoch.
        phase, phase_round, phase_rounds: name of the phase, the round within it from 1, and their number.
        reinit_head: whether the head is reinitialised before the round.
        kept: the method's channels that stay at the site, as it left them in its last round; see `Channel`.
        head_lr: learning rate of the head's rows; None for that of all other parameters.
    """

    local: LocalTraining
    norm: NormPolicy
    seed: int
    round: int
    optimiser_state: Mapping[str, Tensor] = field(default_factory=dict)
    head_only: bool = False
    keep_best: Loss | None = None
    phase: str = "main"
    phase_round: int = 1
    phase_rounds: int = 1
    reinit_head: bool = False
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    head_lr: float | None = None


@dataclass(frozen=True)
class Fitted:
    """What a round of `fit` leaves besides the model.

    Attributes:
        loss: mean of the local steps; None if there were none.
        optimiser_state: for the next round.
        steps: number of steps of the optimiser.
    """

    loss: float | None
    optimiser_state: dict[str, Tensor]
    steps: int


def on_known(loss: Loss) -> Objective:
    """A loss over known entries as the objective of a batch."""
    return lambda model, batch: loss(model(batch.inputs), batch.y, batch.known)


def fit(
    site: SiteContext,
    objective: Objective,
    round_: LocalRound,
    *,
    batches: Batches | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
    after_epoch: Callable[[], None] | None = None,
) -> Fitted:
    """Train the site's model in place for one round; with `site.private` by its steps, without a loss.

    Args:
        batches: of one epoch; by default `training_batches`.
        before_step: called with the gradients of each step in place, which it may change; after `clip`.
        after_step, after_epoch: called then; the latter may change the model's tensors.

    Raises:
        NonFiniteLoss: names site, round and the first broken step. Others may have followed (`StepLosses`):
            the model, and what the functions given here counted, are to be thrown away, as a site does.
        GradientOverflow: see `LossScale.state`.
    """
    local, optimiser = round_.local, _prepare(site, round_, before_step)
    best = BestEpoch(site, round_.keep_best) if round_.keep_best else None
    make, private = batches or partial(training_batches, site, local), site.private
    shuffle, noise = (
        torch.Generator().manual_seed(_seed(site, round_, of)) for of in ("shuffle", "augmentation")
    )
    scale = LossScale(site.model.amp_dtype, site.device, round_.optimiser_state, site.scale)
    losses = StepLosses(partial(_divergence, site.name, round_.round))
    steps = 0
    with (
        repeatable(site.device),
        seed_torch(_seed(site, round_, "dropout"), site.device),
        losses,
        _single(site.name),
    ):
        for _ in range(1 if local.iterations else local.epochs):
            train_mode(site.model, round_.norm, head_only=round_.head_only)
            if private:
                refuse_batch_norm(site.model)
            for batch in make(shuffle, noise):
                steps += 1
                if private:
                    private.step(site.model, objective, optimiser, batch, local.batch_size)
                else:
                    losses.add(scale.step(objective(site.model, batch), optimiser))
                if after_step:
                    after_step()
            losses.read()
            for measure in (best, after_epoch):
                if measure:
                    measure()
    if private and not all(p.isfinite().all() for p in site.model.parameters()):
        raise NonFiniteLoss(
            f"{site.name}: the model of round {round_.round} diverged; lower the learning rate"
        )
    if best:
        best.restore()
    state = scale.state(site.name, round_.round, losses.steps) | optimiser_state_of(optimiser, site.model)
    optimiser.zero_grad(set_to_none=True)  # gradients are as large as the model that a site keeps
    return Fitted(losses.mean, state, steps)


@contextmanager
def _single(site: str) -> Iterator[None]:
    """Say in our words that a batch of one image leaves batch norm a single value of a channel."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"{site}: a batch of one image leaves batch norm a single value, which has no variance. Set a "
            'batch_size of 2 or more, give the site more training images, or set method.batch_norm = "frozen"'
        ) from error


def _seed(site: SiteContext, round_: LocalRound, purpose: str) -> int:
    """A seed of the round: of the job's, or where patients are protected a secret one."""
    if site.private:
        return int.from_bytes(site.private.draw(8), "little") >> 1
    return seed_for(round_.seed, site.name, round_.round, purpose)


def _divergence(site: str, round_: int, step: int, loss: float) -> str:
    return (
        f"{site}: the loss of round {round_}, step {step} is {loss}; lower the learning rate or look for "
        "broken images"
    )


def _prepare(
    site: SiteContext, round_: LocalRound, before_step: Callable[[], None] | None
) -> torch.optim.Optimizer:
    """Set what of the model is trained; return its optimiser as the round before left it."""
    model, local = site.model, round_.local
    if (local.epochs or local.iterations) and not len(site.samples["train"]):
        raise SutureError(f"{site.name} has no training images; give it a split with some")
    reinit_head(site, round_)
    train_parameters(model, head_only=round_.head_only)
    train_mode(model, round_.norm, head_only=round_.head_only)
    optimiser = optimiser_of(model, round_.local, round_.head_lr)
    load_optimiser_state(optimiser, model, round_.optimiser_state)
    if before_step:
        optimiser.register_step_pre_hook(lambda *_: before_step())
    return optimiser


def reinit_head(site: SiteContext, round_: LocalRound) -> None:
    """Reinitialise the head if the round begins with that; a second time gives the same head."""
    if round_.head_only and round_.local.warmup_init == "independent":
        reinitialise_head(site.model, seed_for(round_.seed, site.name, "init"))
    elif round_.reinit_head:
        reinitialise_head(site.model, seed_for(round_.seed, "head", round_.round))


class BestEpoch:
    """Remembers the epoch of the lowest validation loss; without validation data, the last epoch."""

    def __init__(self, site: SiteContext, loss: Loss) -> None:
        self._site, self._loss = site, loss
        self._lowest = math.inf
        self._tensors: dict[str, Tensor] = {}

    def __call__(self) -> None:
        """Measure the model, and remember it if it is the best so far."""
        value = validation_loss(self._site, self._loss)
        if value is None or value < self._lowest:
            self._lowest = math.inf if value is None else value
            model = self._site.model
            state = {k: t for k, t in model.state_dict().items() if k not in model.frozen_names}
            self._tensors = {k: t.detach().clone() for k, t in state.items()}

    def restore(self) -> None:
        """Put the best model back."""
        load_tensors(self._site.model, self._tensors)


def validation_loss(site: SiteContext, loss: Loss) -> float | None:
    """The loss on the site's validation data, None if it has none."""
    part = site.samples.get("validation")
    if part is None or not len(part):
        return None
    return float(loss(predict(site, part), *part.targets()))


def training_batches(
    site: SiteContext,
    local: LocalTraining,
    shuffle: torch.Generator,
    noise: torch.Generator,
    seen: Callable[[Batch, torch.Generator], Batch] | None = None,
    rows: Callable[[Batch], Mapping[str, Tensor]] | None = None,
) -> Iterator[Batch]:
    """The augmented, normalised batches of one epoch, or of `local.iterations` steps, on the site's device.

    A thread reads `site.prefetch` batches ahead (from a memory map, that is the disk). It alone draws from
    `shuffle`, and the calling thread alone from `noise`, each in the order of the batches: what is drawn does
    not depend on `prefetch`.

    Args:
        seen: what the model sees of a normalised batch; by default its `first_view`.
        rows: numbers of images that a batch's labels decide, by name, which join its inputs. They are found
            where the labels are read: on a GPU the host would wait for them.
    """
    seen = seen or partial(first_view, site)
    train = site.samples["train"]
    batches: Iterator[Batch] = map(train.batch, _rows(site, local, shuffle))
    if rows:
        batches = (replace(batch, inputs={**batch.inputs, **rows(batch)}) for batch in batches)
    if site.device.type != "cpu":
        batches = map(Batch.pin, batches)
    # One generator for order and augmentation: rows drawn ahead would take numbers that are the views'.
    for batch in prefetch(batches, 0 if shuffle is noise else site.prefetch):
        yield seen(ready_inputs(site, batch), noise)


def _rows(site: SiteContext, local: LocalTraining, shuffle: torch.Generator) -> Iterator[Tensor]:
    train, size = site.samples["train"], local.batch_size
    if site.private:
        return site.private.draws(train.patients, *local.draws_of(site.private.patients))
    if local.sampling == "class_aware":
        return class_aware(train.y, site.model.labels.names, size, shuffle, local.iterations)
    if local.iterations is None:
        return parts(torch.randperm(len(train), generator=shuffle), size)
    return islice(endless(len(train), size, shuffle), local.iterations)


def first_view(site: SiteContext, batch: Batch, noise: torch.Generator) -> Batch:
    """A normalised batch with its image under the job's augmentation; other inputs pass as they are."""
    name = view_key(batch.inputs)
    if name not in batch.inputs:
        return batch
    return replace(batch, inputs={**batch.inputs, name: view(site, batch, noise)})


def view(
    site: SiteContext,
    batch: Batch,
    noise: torch.Generator,
    augmentation: Augmentation | None = None,
    rows: Tensor | slice = slice(None),
) -> Tensor:
    """Views of the images of a normalised batch, or of some of its rows.

    Args:
        augmentation: by default the job's.

    Returns:
        normalised images ``[n, channels, h, w]``; or, of a frozen encoder, features ``[n, d]`` of one of the
        views of each image that the site keeps.
    """
    spec = site.augmentation if augmentation is None else augmentation
    image = batch.inputs[view_key(batch.inputs)][rows]
    if not (spec.active and len(image)):
        return image
    if site.features is None:
        return augment(image, noise, spec, std=site.prepare.std)
    return site.features.view(site.model, spec, batch.inputs[ROW][rows], noise)


def ready_inputs(site: SiteContext, batch: Batch) -> Batch:
    """The batch on the site's device with its image normalised there; other inputs (tokens) only move.

    An image crosses as uint8, a quarter of the bytes of floats.
    """
    batch = batch.to(site.device)
    image = batch.inputs.get("image")
    return batch if image is None else replace(batch, inputs={**batch.inputs, "image": site.prepare(image)})


@torch.no_grad()
def predict(site: SiteContext, samples: Samples) -> Tensor:
    """Logits ``[n, c]`` of the model in eval mode, on the CPU; see `evaluation_batch`."""
    site.model.eval()
    size = site.batch_size or evaluation_batch(samples.inputs, site.device)
    with repeatable(site.device):
        return retry_in_smaller_batches(partial(_logits, site, samples), size)


def _logits(site: SiteContext, samples: Samples, size: int) -> Tensor:
    on_cpu: list[Tensor] = []
    on_device: list[Tensor] = []
    values = 0
    for batch in samples.batches(size):
        ready = ready_inputs(site, batch)
        on_device.append(site.model(ready.inputs))
        values += on_device[-1].numel()
        if values >= _LOGITS:  # each copy waits for the device, and what stays there takes its memory
            on_cpu.append(torch.cat(on_device).cpu())
            on_device, values = [], 0
    if on_device:
        on_cpu.append(torch.cat(on_device).cpu())
    return torch.cat(on_cpu) if on_cpu else torch.empty(0, len(site.model.labels))
