"""A step of training: its loss, over the known labels, and the optimiser that takes it.

Optimisers are torch's without its compiler. torch excludes some of their functions from compilation, and
the first call of any imports its compiler for that: 1 to 1.7 s in every process that trains. Nothing here
compiles a step of an optimiser, so these classes have the functions as torch wrote them, before it wrapped
them. A site keeps their state between rounds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.errors import SutureError
from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.models.classifier import HEADS, Classifier
from suture.protocol.messages import LARGEST

if TYPE_CHECKING:
    from suture.learning.training import LocalTraining

log = logging.getLogger(__name__)

LabelLoss = Callable[[Tensor, Tensor, Tensor, LabelType], Tensor]
"""`Method.loss`: logits, y and known ``[n, c]``, and the label type, to a scalar."""

Objective = Callable[[Classifier, Batch], Tensor]
"""What a step minimises: the model on a batch, to a scalar."""


# Losses: mask first, then reduce


def masked_bce(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """Return the binary cross-entropy over the known entries.

    Surgical Aggregation, Eq. 3; partial loss, Eq. 8. It is the mean over all known entries of the batch.
    Where the same classes C_k are known in every row, as at a site, it equals the papers' mean over samples
    of the mean over C_k.

    Args:
        logits: ``[n, c]``.
        y: ``[n, c]``, 1 or 0; unknown entries may have any value, NaN included.
        known: ``[n, c]`` boolean.

    Returns:
        a scalar; 0 with a zero gradient if nothing is known.
    """
    each = F.binary_cross_entropy_with_logits(logits, torch.where(known, y, 0.0), reduction="none")
    return torch.where(known, each, 0.0).sum() / known.sum().clamp(min=1)


def masked_ce(logits: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """Return the cross-entropy of multiclass labels over the known classes.

    A row whose known entries are all 0 means "none of my classes" and is left out.

    Args:
        logits, y, known: ``[n, c]``; y is one-hot over the known classes.

    Returns:
        a scalar; 0 with a zero gradient if no row is labelled.
    """
    each, labelled = ce_of_rows(logits, y, known)
    return torch.where(labelled, each, 0.0).sum() / labelled.sum().clamp(min=1)


def ce_of_rows(logits: Tensor, y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row over its known classes, and whether the row is labelled.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.

    Returns:
        ``[n]`` and ``[n]`` boolean; the cross-entropy of a row without a label is 0.
    """
    target = torch.where(known, y, 0.0)
    visible = torch.where(known, logits, torch.finfo(logits.dtype).min)
    return -(target * F.log_softmax(visible, dim=1)).sum(dim=1), target.sum(dim=1) > 0


def masked_loss(logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
    """Return `masked_bce` for multilabel data, `masked_ce` for multiclass data."""
    return (masked_bce if label_type == "multilabel" else masked_ce)(logits, y, known)


def balanced_ce(logits: Tensor, y: Tensor, known: Tensor, counts: Tensor) -> Tensor:
    """Return the balanced softmax loss: the cross-entropy of z_c + ln(n_c / n).

    Ren et al., NeurIPS 2020, Eq. 4. A class without a training image at the site gets ln 1e-12.

    Args:
        logits, y, known: ``[n, c]``, as for `masked_ce`.
        counts: n_c, the number of training images of each class, ``[c]``.
    """
    prior = counts / counts.sum().clamp(min=1)
    return masked_ce(logits + torch.log(prior + 1e-12), y, known)


def weighted_bce(logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Entry by entry -w_c y ln sigma(s) - (1 - y) ln(1 - sigma(s)).

    Args:
        logits, y: ``[n, c]``.
        weight: ``[c]``; None for 1.
    """
    return F.binary_cross_entropy_with_logits(logits, y, pos_weight=weight, reduction="none")


def probabilities(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return the probabilities ``[n, c]``: sigmoids for multilabel data, a softmax for multiclass data."""
    return torch.sigmoid(logits) if label_type == "multilabel" else torch.softmax(logits, dim=1)


_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


def _plain(kind: type[_Kind]) -> type[_Kind]:
    """Return the class with its own functions; `step` still computes without gradients."""
    own = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return cast(type[_Kind], type(kind.__name__, (kind,), {**own, "step": torch.no_grad()(own["step"])}))


Adam, AdamW, SGD = _plain(torch.optim.Adam), _plain(torch.optim.AdamW), _plain(torch.optim.SGD)


def optimiser_of(
    model: nn.Module, local: LocalTraining, head_lr: float | None = None
) -> torch.optim.Optimizer:
    """The optimiser of the trainable parameters; it clips the gradient of each step where `clip` is set.

    Args:
        head_lr: learning rate of the head's rows; None for `local.lr`.
    """
    decay = local.weight_decay
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rows = [p for name, p in named if name.startswith(HEADS)]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if not name.startswith(HEADS)]},
        {"params": rows, "lr": local.lr if head_lr is None else head_lr},
    ]
    optimiser: torch.optim.Optimizer
    if local.optimiser == "sgd":
        nesterov = local.momentum > 0
        optimiser = SGD(groups, local.lr, local.momentum, 0, decay, nesterov)
    else:
        adam = AdamW if local.optimiser == "adamw" else Adam
        optimiser = adam(groups, local.lr, local.betas, weight_decay=decay)
    if (limit := local.clip) is not None:

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_([p for _, p in named], limit)

        optimiser.register_step_pre_hook(clip)
    return optimiser


def optimiser_state_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as ``parameter/field`` tensors."""
    return {
        f"{name}/{field}": value.detach().cpu()
        for name, parameter in model.named_parameters()
        for field, value in optimiser.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimiser_state(
    optimiser: torch.optim.Optimizer, model: nn.Module, optimiser_state: Mapping[str, Tensor]
) -> None:
    """Hands saved moments over to the optimiser, which goes on to change them in place.

    Those of a parameter whose shape changed (new classes) start afresh.
    """
    trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
    of: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in optimiser_state.items():
        name, _, moment = key.rpartition("/")
        of[name][moment] = value
    for name, parameter in model.named_parameters():
        saved = of.get(name)
        if not saved or id(parameter) not in trained:
            continue
        if any(v.dim() and v.shape != parameter.shape for v in saved.values()):
            shape = tuple(parameter.shape)
            log.warning("the optimiser's moments of %s are reset, because its shape is now %s", name, shape)
            continue
        optimiser.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device) for k, v in saved.items()
        }


LOSS_SCALE = "loss scale"
"""In place of a parameter's name, in the optimiser's state."""


_STATE = {f"{LOSS_SCALE}/scale": "scale", f"{LOSS_SCALE}/steps": "_growth_tracker"}
"""The tensors of a site's state: the scale, and how many steps it has been the same; their names in torch."""


class GradientOverflow(SutureError):
    """In fp16 the gradients of a round were beyond the range of numbers, so its steps were skipped.

    Args:
        scale: of the loss, after the round.
    """

    def __init__(self, text: str, scale: float) -> None:
        super().__init__(text)
        self.scale = scale


class LossScale:
    """Takes the steps of a round; in fp16 the loss is scaled, because small gradients would be 0.

    (Micikevicius et al., ICLR 2018.)
    A step whose gradients overflow is skipped, and the scale halved. The next round begins with the last one.

    Args:
        half: the short type of mixed precision; None for none.
        optimiser_state: of the round before.
        first: the scale to begin with in place of that round's last one; None for that.
    """

    def __init__(
        self,
        half: torch.dtype | None,
        device: torch.device,
        optimiser_state: Mapping[str, Tensor],
        first: float | None = None,
    ) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
        if self._scaler.is_enabled():
            own = {_STATE[name]: t.item() for name, t in optimiser_state.items() if name in _STATE}
            own |= {} if first is None else {"scale": first}
            self._scaler.load_state_dict(self._scaler.state_dict() | own)
        self._before = self._scaler.get_scale()

    def step(self, loss: Tensor, optimiser: torch.optim.Optimizer) -> Tensor:
        """Take the step that lowers the loss, a scalar; return it without its graph, still on the device.

        Nothing here waits for the device, but in fp16, where the gradients are looked at.
        """
        optimiser.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._scaler.is_enabled():
            self._scaler.unscale_(optimiser)  # before the optimiser clips
        self._scaler.step(optimiser)
        self._scaler.update()
        return loss.detach()

    def state(self, site: str, round_: int, steps: int) -> dict[str, Tensor]:
        """Return what the next round begins with; nothing in other precisions.

        Raises:
            GradientOverflow: none of the `steps` was taken, or gradients overflow that are not scaled at all.
        """
        state = self._scaler.state_dict()
        if not state:
            return {}
        scale, all_skipped = state["scale"], self._before * state["backoff_factor"] ** steps
        if steps and (scale <= all_skipped or scale < 1):
            raise GradientOverflow(
                f"{site}: the gradients of round {round_} overflow in fp16, and "
                f"{'every step was' if scale <= all_skipped else 'steps were'} skipped. Set half = "
                '"bf16" under [training], let the round have more steps, or look for broken images',
                scale,
            )
        return {name: torch.tensor(state[key]) for name, key in _STATE.items()}


class NonFiniteLoss(SutureError):
    """The loss of a local step stopped being a number."""


READ_EVERY = 32
"""Steps after which their losses are read from the device."""


class StepLosses:
    """The losses of steps, which wait on the device: to read one, the host waits until a GPU has computed it.

    They are read `READ_EVERY` at a time, by `read`, and at the end of the block that this is the context
    manager of; also where a step has failed, because that may follow from an earlier loss that was no number.
    So up to `READ_EVERY` - 1 steps may follow one whose loss is no number.

    Args:
        fault: the text of the error, from the number of the step (from 1) and its loss.

    Attributes:
        steps: whose losses were read.
    """

    def __init__(self, fault: Callable[[int, float], str]) -> None:
        self._fault = fault
        self._waiting: list[Tensor] = []
        self._total, self.steps = 0.0, 0

    def __enter__(self) -> StepLosses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.read()

    def add(self, loss: Tensor) -> None:
        """Keep the loss of the next step, a scalar.

        Raises:
            NonFiniteLoss: see `read`.
        """
        self._waiting.append(loss.detach())
        if len(self._waiting) == READ_EVERY:
            self.read()

    def read(self) -> None:
        """Read the losses that wait.

        Raises:
            NonFiniteLoss: one is no number, or larger than any that is sent; names the first such step.
        """
        values: list[float] = torch.stack(self._waiting).tolist() if self._waiting else []
        self._waiting.clear()
        for value in values:
            self.steps += 1
            if not abs(value) <= LARGEST:
                raise NonFiniteLoss(self._fault(self.steps, value))
            self._total += value

    @property
    def mean(self) -> float | None:
        """The mean of the losses that were read, added up in the order of the steps; None without any."""
        return self._total / self.steps if self.steps else None
