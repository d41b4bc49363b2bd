"""A backbone with a head whose rows belong to classes, and which of its batch-norm tensors sites share.

The rows of a head begin at random from a seed and the class name, or at vectors of the names.

In coherent predictions the probability of a class is at least that of each class below it. The head has a
row for each class, and nothing relates them. With ``max`` a class gets the largest probability of itself
and of all classes below it. With ``noisy-or`` it is absent where it and each class below it are,
independently: P = 1 - prod (1 - p), each class once, also where several paths lead to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.errors import ConfigError, as_word
from suture.core.labels import LabelSet, canonical
from suture.core.ontology import Relations
from suture.core.runtime import generator_for, seed_torch
from suture.data.batch import FEATURES
from suture.data.embedding import signs
from suture.models.weights import dense
from suture.protocol.egress import Layout as Layout
from suture.protocol.packing import read_tensors

_GRAMS = (3, 4, 5)
"""Lengths of the runs of letters that a name is taken apart into."""


def name_vectors(names: Sequence[str], width: int, file: str | None = None) -> Tensor:
    """Return a vector of length 1 for each class name.

    By default the number of times that each run of 3 to 5 characters occurs in the name, in small letters
    with a space before and behind, through a random projection to +-1 (Achlioptas, J. Comput. Syst. Sci.
    66:671, 2003) whose signs are the bits of the run's SHAKE-256: so equal on every machine, under every
    seed. Names that share words are close; meanings are unknown to it.

    Args:
        width: of the vectors.
        file: a safetensors file with a vector ``[width]`` for each name, from an embedding of text.

    Returns:
        float32 ``[len(names), width]``.

    Raises:
        ConfigError: the file cannot be read, or lacks a name, or its vectors have another width.
    """
    found = _hash(names, width) if file is None else _read(Path(file).expanduser(), names, width)
    return F.normalize(found, dim=1).float()


def _hash(names: Sequence[str], width: int) -> Tensor:
    rows = np.zeros((len(names), width))
    for row, name in zip(rows, names, strict=True):
        text = f" {name.lower()} "
        for n in _GRAMS:
            for start in range(len(text) - n + 1):
                row += signs(text[start : start + n], width)
    return torch.from_numpy(rows)


def _read(path: Path, names: Sequence[str], width: int) -> Tensor:
    key = "model.name_vectors"
    if not path.exists():
        raise ConfigError(f"{key}: {path} does not exist; name a safetensors file of vectors by class name")
    try:
        tensors = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as safetensors: {as_word(error)}") from error
    vectors = {canonical(name): dense(name, vector, str(path)) for name, vector in tensors.items()}
    for name in names:
        if name not in vectors:
            raise ConfigError(f"{key}: {path} has no vector for the class {name!r}; add it, under that name")
        shape = tuple(vectors[name].shape)
        if shape != (width,):
            raise ConfigError(
                f"{key}: the vector of {name!r} in {path} has the shape {shape}, and the classifier has "
                f"{width} weights for each class. Set model.neck to the width of the vectors"
            )
        if not bool(torch.isfinite(vectors[name]).all() and vectors[name].any()):
            raise ConfigError(f"{key}: the vector of {name!r} in {path} is 0 or not finite; compute it again")
    return torch.stack([vectors[name].double() for name in names])


HeadKind = Literal["linear", "dot", "cosine", "anchors"]
"""linear: h . w_c + b_c. dot: h . w_c, without a bias. cosine: `SCALE` times the cosine of h and w_c.
anchors: h . w_c, and h . w_c / |w_c| where an image has one label (FedAlign)."""

RowInit = Literal["random", "named"]
"""random: from a seed of the class name. named: the vector of the class name, see `names.py`."""

SCALE = 30.0
"""The factor of a cosine head (Cao et al., LDAM, NeurIPS 2019): a softmax of numbers within 1 is too flat."""


def channels_last(network: nn.Module) -> nn.Module:
    """Let a network reorder its images to channels last in memory; its convolutions keep that order.

    On a CPU ResNet-18 and DenseNet121 are 1.1 to 1.4 times as fast with it. The network's own tensors stay
    as they are.
    """
    network.register_forward_pre_hook(_reorder)
    return network


def _reorder(_: nn.Module, images: tuple[Any, ...]) -> tuple[Tensor, ...]:
    # `vmap` cannot reorder; a compiler would break its graph in two at the question.
    if not torch.compiler.is_compiling() and any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, images)
    ):
        return images
    return tuple(image.to(memory_format=torch.channels_last) for image in images)


class _CosineHead(nn.Linear):
    """Logits ``[n, c]`` are the scaled cosines of features ``[n, d]`` and rows ``[c, d]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return SCALE * F.linear(F.normalize(input, dim=1), F.normalize(self.weight, dim=1))


class _UnitRows(nn.Linear):
    """Logits ``[n, c]`` are features ``[n, d]`` times rows ``[c, d]`` that are scaled to the length 1."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits."""
        return F.linear(input, F.normalize(self.weight, dim=1))


def make_head(kind: HeadKind, features: int, labels: LabelSet) -> nn.Linear:
    """Return a head with one row for each class."""
    made: type[nn.Linear] = nn.Linear
    if kind == "cosine":
        made = _CosineHead
    elif kind == "anchors" and labels.label_type == "multiclass":
        made = _UnitRows
    return made(features, len(labels), bias=kind == "linear")


def head_rows(
    labels: LabelSet,
    features: int,
    seed: int,
    head: str = "head",
    start: RowInit = "random",
    vectors: str | None = None,
) -> dict[str, Tensor]:
    """Return the initial rows of a head, each from its class name.

    So the row of a class does not depend on the other classes, nor on their order.

    Args:
        start: of the rows of the head that predicts; others are random, as is every bias.
        vectors: see `name_vectors`.

    Returns:
        ``head.weight`` [c, features] and ``head.bias`` [c], or those of another head by its name: uniform in
        +-1/sqrt(features) as in `nn.Linear`, or named.

    Raises:
        ConfigError: see `name_vectors`.
    """
    bound = features**-0.5
    rows = [
        torch.empty(features + 1).uniform_(-bound, bound, generator=generator_for(seed, head, name))
        for name in labels.names
    ]
    stacked = torch.stack(rows)
    weight = stacked[:, :-1].contiguous()
    if start == "named" and head == "head":
        weight = name_vectors(labels.names, features, vectors)
    return {f"{head}.weight": weight, f"{head}.bias": stacked[:, -1].contiguous()}


Coherence = Literal["none", "max", "noisy-or"]


def classes_below(labels: LabelSet, relations: Relations) -> dict[str, tuple[str, ...]]:
    """Return the classes below each class that has any, by all paths of the relations."""
    below: dict[str, tuple[str, ...]] = {}
    for name in labels:
        for above in sorted(relations.ancestors.get(name, frozenset()).intersection(labels)):
            below[above] = (*below.get(above, ()), name)
    return below


class Coherent(nn.Module):
    """Logits ``[n, c]`` to coherent ones; the others stay as they are.

    Args:
        below: the classes below each class, as `classes_below` returns them.
    """

    def __init__(self, rule: Coherence, labels: LabelSet, below: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.rule = rule
        # A class has more classes below it than each of them has: fewer first, from the leaves upwards.
        order = sorted(below, key=lambda name: len(below[name]))
        self.groups = [(labels.index(name), [labels.index(child) for child in below[name]]) for name in order]

    def forward(self, logits: Tensor) -> Tensor:
        """In the exported graphs, too: each step is a standard operator."""
        columns = list(logits.unbind(dim=1))
        for at, below in self.groups:
            largest = torch.stack([columns[at], *(columns[child] for child in below)], dim=1).amax(dim=1)
            if self.rule == "noisy-or":
                # -ln prod (1 - p); the logit of 1 - exp(-s) is s + ln(1 - exp(-s)).
                s = F.softplus(logits[:, [at, *below]]).sum(dim=1)
                # Rounding, and s = 0, must not make it smaller than one of them.
                largest = torch.maximum(s + torch.log(-torch.expm1(-s)), largest)
            columns[at] = largest
        return torch.stack(columns, dim=1)


AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The short types of mixed precision, by their names in a site's configuration."""

HEADS = ("head.", "second_head.")
"""Prefixes of the names of tensors whose rows belong to classes."""

ENCODER = "backbone."
"""Prefix of the names of the backbone's tensors."""

Trains = Literal["all", "adapters", "head"]
"""The part of a model that is trained: all of it; or what comes after the backbone, which is then a frozen
encoder, in eval mode with its statistics of batch norm; or that and the encoder's adapters."""


class Classifier(nn.Module):
    """Backbone, an optional hidden block, and a linear head with one row per class.

    Its tensors are named ``backbone.*``, ``hidden.*``, ``head.weight`` [c, d] and ``head.bias`` [c]. The
    hidden block is shared like the backbone: only the head's rows belong to classes.

    Args:
        backbone: maps inputs to features ``[n, features]``.
        labels: the classes of the head's rows, in order.
        hidden: width of the hidden block (Dense, ReLU, Dropout); 0 for none.
        projection: width of a projector beside the head (Linear, batch norm, ReLU, Linear; ``projector.*``),
            for methods that compare features; 0 for none.
        second_head: whether the projection has a head of its own, one row per class (``second_head.*``); it
            is trained like the other, but not used for prediction.
        reads: names of the backbone's inputs, in order.
        neck: width of a neck before the head (Linear, ReLU, Linear; ``neck.*``), 0 for none. It is shared,
            too; features are its output.
        kind: of the head.
        trains: the part that is trained; the rest is frozen for good, and no round sends it.
        adapters: names of the backbone's tensors that are trained nevertheless.

    Attributes:
        encoding: number of the backbone's features.
        projected: width of the projector's output, or of the head's input where there is no projector.
        coherent: makes logits coherent, where a saved model asks for it; None in training.
        amp_dtype: the short type in which the backbone computes, see `compute_in`; None for single precision.
    """

    amp_dtype: torch.dtype | None = None
    coherent: Coherent | None

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        labels: LabelSet,
        hidden: int = 0,
        dropout: float = 0.0,
        projection: int = 0,
        second_head: bool = False,
        reads: tuple[str, ...] = ("image",),
        neck: int = 0,
        kind: HeadKind = "linear",
        trains: Trains = "all",
        adapters: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.labels = labels
        self.coherent = None
        self.reads = reads
        self.trains = trains
        self._adapters = {f"{ENCODER}{name}" for name in adapters}
        self.encoding = features
        self.backbone = backbone
        self.hidden: nn.Module = nn.Identity()
        if hidden:
            self.hidden = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout))
        width = hidden or features
        self.head = make_head(kind, neck or width, labels)
        self.projector: nn.Module = nn.Identity()
        if projection:
            first = nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()
            self.projector = nn.Sequential(*first, nn.Linear(width, projection))
        self.projected = projection or width
        self.second_head = nn.Linear(projection, len(labels)) if second_head else None
        self.neck: nn.Module = nn.Identity()
        if neck:
            self.neck = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, neck))
        train_parameters(self)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, but for a frozen encoder."""
        super().train(mode)
        if self.trains != "all":
            self.backbone.eval()
        return self

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the input of the head, ``[n, d]``, from a backbone's inputs or its `FEATURES`."""
        out = inputs[FEATURES] if FEATURES in inputs else self.encode(inputs)
        return cast(Tensor, self.neck(self.hidden(out)))

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the backbone's features, ``[n, encoding]``."""
        read = [inputs[name] for name in self.reads]
        if self.amp_dtype is None:
            return cast(Tensor, self.backbone(*read))
        with torch.autocast(read[0].device.type, self.amp_dtype):
            out: Tensor = self.backbone(*read)
        return out.float()

    def compute_in(self, half: torch.dtype | None) -> None:
        """Use mixed precision in the backbone alone: what a method computes of its features is float32.

        A share of 1e-9 is 0 in float16, and its logarithm is not finite. A backbone with a recurrent network
        stays in float32, too: not every CPU has a short kernel of it, and cuDNN's takes float16 for bfloat16.
        """
        kinds = nn.RNNBase, nn.RNNCellBase
        recurrent = any(isinstance(module, kinds) for module in self.backbone.modules())
        self.amp_dtype = None if recurrent else half

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits ``[n, c]``."""
        out: Tensor = self.head(self.features(inputs))
        return out if self.coherent is None else cast(Tensor, self.coherent(out))

    # Names are settled when the model is made; to list them is a walk over all of its modules.

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all its tensors."""
        return tuple(self.state_dict())

    @functools.cached_property
    def frozen_names(self) -> frozenset[str]:
        """The names of the tensors that are never trained: those of a frozen encoder but for its adapters."""
        encoder = frozenset(n for n in self.names if self.trains != "all" and n.startswith(ENCODER))
        return encoder - self._adapters

    @functools.cached_property
    def norm_names(self) -> frozenset[str]:
        """The names of gamma, beta, mean and variance of every batch norm."""
        found = {f"{name}.{tensor}" for name, norm in _norms(self).items() for tensor in norm.state_dict()}
        return frozenset(found - self.counters)

    @functools.cached_property
    def buffer_names(self) -> frozenset[str]:
        """The names of the tensors that no gradient trains."""
        return frozenset(name for name, _ in self.named_buffers())

    @functools.cached_property
    def counters(self) -> frozenset[str]:
        """The names of the integer counters of batch norm, which are never sent and never averaged."""
        return frozenset(f"{name}.num_batches_tracked" for name in _norms(self))


def train_parameters(model: Classifier, *, head_only: bool = False) -> None:
    """Give gradients to the parameters that are trained: but for a while, or for good, those of the backbone.

    Args:
        head_only: whether the backbone rests for a while.
    """
    for name, parameter in model.named_parameters():
        rests = name in model.frozen_names or (head_only and name.startswith(ENCODER))
        parameter.requires_grad_(not rests)


def frozen_copy(model: Classifier) -> Classifier:
    """A copy of the model as it is now, in eval mode and without gradients; what is frozen is shared."""
    same: dict[int, object] = {id(model.backbone): model.backbone} if model.trains == "head" else {}
    tensors = model.state_dict(keep_vars=True)
    same |= {id(tensors[name]): tensors[name] for name in model.frozen_names}
    return copy.deepcopy(model, same).eval().requires_grad_(False)


def reinitialise_head(model: Classifier, seed: int) -> None:
    """Initialise hidden block, neck and head, named rows too, as those of a model of this seed."""
    fresh = head_rows(model.labels, model.head.in_features, seed)
    for name, layer in model.named_modules():
        if name.startswith(("hidden.", "neck.")) and isinstance(layer, nn.Linear):
            with seed_torch(seed):
                drawn = nn.Linear(layer.in_features, layer.out_features)
            fresh |= {f"{name}.{key}": tensor for key, tensor in drawn.state_dict().items()}
    load_tensors(model, fresh)


def relabel(
    head: Mapping[str, Tensor],
    before: tuple[str, ...],
    labels: tuple[str, ...],
    seed: int,
    start: RowInit = "random",
    vectors: str | None = None,
) -> dict[str, Tensor]:
    """Return the rows of `labels`: those of `before` keep their values, new ones are initialised.

    Args:
        head: ``weight`` [len(before), d] and ``bias`` [len(before)] of each head, under their full names.
        start, vectors: see `head_rows`.

    Raises:
        ConfigError: see `head_rows`.
    """
    if before == labels:
        return dict(head)
    fresh: dict[str, Tensor] = {}
    for name, rows in head.items():
        if name.endswith(".weight"):
            head_name = name.removesuffix(".weight")
            fresh |= head_rows(LabelSet(labels), rows.shape[1], seed, head_name, start, vectors)
    fresh = {name: rows for name, rows in fresh.items() if name in head}  # not every head has a bias
    known = [name for name in labels if name in before]
    to = torch.tensor([labels.index(name) for name in known], dtype=torch.long)
    source = torch.tensor([before.index(name) for name in known], dtype=torch.long)
    for name, rows in head.items():
        fresh[name][to] = rows[source]
    return fresh


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into the tensors outside the heads, and those of the heads."""
    head = {name: t for name, t in state.items() if name.startswith(HEADS)}
    return {name: t for name, t in state.items() if name not in head}, head


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model by name; names that the model lacks are ignored."""
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if name in tensors:
                target.copy_(tensors[name])


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Check that tensors of a file have the names, shapes and types of a model's.

    Raises:
        ConfigError: names the file and the first tensor that differs.
    """
    if wrong := found.keys() ^ expected.keys():
        name = min(wrong)
        what = "does not belong to this model" if name in found else "is missing"
        raise ConfigError(f"{where}: the tensor {as_word(name)} {what}; restore the file from a backup")
    for name, tensor in found.items():
        has, needs = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, expected[name]))
        if has != needs:
            raise ConfigError(f"{where}: {name} is {has} instead of {needs}; restore the file from a backup")


NormPolicy = Literal["average", "local", "frozen"]
"""average: FedAvg, all four arrays are averaged. local: FedBN, they stay at the site (Li et al. 2021,
arXiv:2102.07623). frozen: FedBN+, they stay at their pretrained values (Kulkarni et al. 2023,
arXiv:2303.06180)."""


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def train_mode(model: nn.Module, policy: NormPolicy, *, head_only: bool = False) -> None:
    """Set training mode; under `frozen` batch norm is in eval mode, and gamma and beta have no gradient.

    Args:
        head_only: the backbone is in eval mode.
    """
    model.train()
    if head_only:
        model.get_submodule("backbone").eval()
    if policy == "frozen":
        for module in _norms(model).values():
            module.eval()
            module.requires_grad_(False)


def set_momentum(model: nn.Module, momentum: float) -> None:
    """Set the momentum of every batch norm: new statistics = (1 - momentum) old + momentum batch.

    Raises:
        ConfigError: the model has no batch norm.
    """
    norms = _norms(model)
    if not norms:
        raise ConfigError("model.norm_momentum is for batch norm, which this model does not have; remove it")
    for module in norms.values():
        module.momentum = momentum
