"""The registry of models: a backbone by its name, with a head whose rows belong to classes.

A name ``FAMILY:NAME`` is an encoder of another library, whose family another package has. What a job says of
one that comes from a file or folder travels in the plan, so that no other party needs that. Nothing is
downloaded, and nothing that a file holds is run: a file or folder gives tensors and a configuration of
plain values, from which the library's own classes are built.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field, StrictBool
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.entry_points import MODEL_GROUP, Registry, find_foreign, package_of
from suture.core.errors import ConfigError, as_word, show_value, unknown
from suture.core.files import parse_json
from suture.core.labels import LabelSet
from suture.core.runtime import seed_for, seed_torch
from suture.core.validation import NAMED_FILE, STRICT, parse
from suture.data.batch import Mean, Preprocessing, Std
from suture.data.embedding import TFIDF
from suture.data.text import EVERYBODY, Tokeniser, Vocabulary, clinical_vocabulary, read_vocabulary
from suture.models.adapters import Adapters, add_adapters, merge_adapters
from suture.models.classifier import (
    Classifier,
    HeadKind,
    RowInit,
    Trains,
    head_rows,
    load_tensors,
    set_momentum,
)
from suture.models.encoders import (
    IMAGENET,
    LITE,
    TextLSTM,
    densenet121,
    efficientnet_lite0,
    resnet18,
    small_cnn,
    small_resnet,
    vector_mlp,
)
from suture.models.encoders import Backbone as Backbone

RANDOM = "random"
"""As `ModelSpec.weights`: begin without pretraining, although a model has weights at hand, or is frozen."""

WEIGHTS = ("download", "package", RANDOM)
"""What `ModelSpec.weights` may be besides a path; the first two are each for some models."""

CORPUS = "corpus"
"""As `ModelSpec.vocabulary`: the vocabulary of all documents of a simulation."""


_Number = Annotated[int, Field(ge=-(2**20), le=2**20)] | Annotated[float, Field(ge=-(2**20), le=2**20)]


_Text = Annotated[str, Field(max_length=64)]


_Value = bool | _Number | _Text | Annotated[tuple[_Number | _Text, ...], Field(max_length=32)] | None
"""A plain value; no argument of a network is larger."""


_MOST_LAYERS = 256
"""Largest number in an argument that says how many layers or blocks there are."""


_LAYERS = ("num_hidden_layers", "n_layers", "depths", "layers", "block_config")


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
    "a suture.models.Family",
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


MODELS: Registry[Backbone] = Registry(
    MODEL_GROUP,
    "model",
    {
        "cnn": Backbone(
            "small CNN of four blocks, 98 thousand parameters, for the demo and tests",
            lambda spec, weights: small_cnn(spec.preprocessing.channels, weights),
            weights=(),
        ),
        "resnet_small": Backbone(
            "small ResNet of four blocks, 0.3 million parameters, for 64 px images on a CPU",
            lambda spec, weights: small_resnet(spec.preprocessing.channels, weights),
            weights=(),
        ),
        "resnet18": Backbone(
            "torchvision ResNet-18, ImageNet weights from a path or by download",
            lambda _, weights: resnet18(weights),
            smallest=33,
            weights=("download",),
            normalisation=IMAGENET,
        ),
        "densenet121": Backbone(
            "MONAI DenseNet121, ImageNet weights from a path or by download",
            lambda _, weights: densenet121(weights),
            smallest=29,
            weights=("download",),
            normalisation=IMAGENET,
        ),
        "efficientnet_lite0": Backbone(
            "EfficientNet-Lite0 with the ImageNet weights of its package (suture[lite])",
            lambda spec, weights: efficientnet_lite0(spec.size, weights),
            smallest=32,
            weights=("package",),
            normalisation=LITE,
        ),
        "lstm": Backbone(
            "bidirectional LSTM over an embedding of words, for clinical text",
            lambda spec, _: (
                TextLSTM(vocabulary_of(spec).size, width=spec.longest if spec.padding else None),
                TextLSTM.FEATURES,
            ),
            reads="text",
        ),
        "vectors": Backbone(
            "two Dense blocks over a frozen vector of each document, TF-IDF or a local embedding model's",
            lambda spec, _: vector_mlp(spec.vector),
            reads="text",
            vectors=True,
        ),
    },
    "a suture.models.Backbone",
    lambda entry: isinstance(entry, Backbone),
)


_LONGEST_CONFIG = 2**24
"""Letters of an encoder's configuration, its tokeniser included."""

Width = Annotated[int, Field(ge=0, le=4096)]
"""Number of features; a Dense block between two of the widest has 64 MiB."""


def _code_string(value: str) -> str:
    if not re.fullmatch(r"[A-Z0-9_ ]{1,16}", value) or value != value.strip():
        raise ValueError("is not a code of DICOM's Modality; write for example CR, DX, MG, CT, MR or US")
    return value


_Words = Annotated[tuple[str, ...], Field(max_length=500_000)]

_Modality = Annotated[str, AfterValidator(_code_string)]
"""A Modality (0008,0060), a code string of DICOM (PS3.5, 6.2)."""


@validated(frozen=True, config=STRICT)
class ModelSpec:
    """Which model, and its input.

    Attributes:
        name: name of a model; `suture list models` shows them, and `suture list models NAME` its input. A
            file or folder, as in ``hf:FOLDER``, is located like `weights`.
        size: side of the images in pixels.
        color: read images in colour.
        hidden: width of a Dense block between backbone and head, 0 for none (256 in the program of
            Surgical Aggregation).
        dropout: dropout rate of that block.
        norm_momentum: momentum of the running statistics of batch norm; None for the network's own: 0.1, or
            0.01 for EfficientNet-Lite0, whose statistics need some hundred steps to adapt.
        projection: width of the projector of methods that compare features with a frozen prior's (the prior's
            width), 0 for none.
        second_head: whether the projection has a head of its own, as in the published program of Fed-MAS.
        neck: width of a neck between backbone and head (Linear, ReLU, Linear; 256 in MOON), 0 for none.
        head: ``linear``; ``dot``, without bias; ``cosine``, scaled cosine similarities of features and rows;
            or ``anchors``, as ``dot``, with rows of length 1 for multiclass labels (FedAlign).
        row_init: initial rows of the head: ``random``, or ``named``, vectors of the class names; also for
            classes that join later.
        name_vectors: for named rows: a safetensors file with a vector for each class name, located like
            `weights`; None computes vectors from the letters of the name.
        weights: file of pretrained weights, or a folder of timm, transformers or MONAI with one; at a real
            server, which alone reads it, its bare name in ``[storage] files``. ``download`` fetches
            torchvision's, ``package`` uses those of the backbone's package, ``random`` none. By default those
            of the package or folder, where the encoder has some; a frozen encoder needs weights.
        mean, std: normalisation for each channel; None for that of the pretrained backbone, otherwise 0.5 and
            0.25.
        vocabulary: for models of text: ``clinical``, part of the package; the path of a vocabulary file; the
            words themselves; or, in a simulation, ``corpus``: the words of all documents, as in the published
            program of PMFL.
        tokeniser: what is a word of a document: ``unicode``, a run of letters of any script; ``pmfl``, of
            ASCII, as in the published program of PMFL.
        longest: maximum number of tokens read of a document; None reads all.
        embedding: for models of document vectors: ``tfidf``, from public word frequencies; or the folder of
            an encoder of text, as in ``hf:FOLDER``, at a real site its bare name in ``[storage] files``.
        embedding_digest: SHA-256 of that folder, part of the job; every party compares it with its own
            folder.
        vector: width of those vectors.
        train: the part that is trained: ``all``; or the ``head``, with hidden block, neck and projector. The
            backbone is then a frozen encoder, batch norm included: sites receive it once, and a round carries
            the rest alone. ``adapters`` trains a small part of the encoder, too.
        adapters: what of the encoder ``train = "adapters"`` trains. A saved model has them merged into its
            weights.
        views: of a frozen encoder: each image is read once for all runs, and for each augmentation in this
            number of random views, whose features a site keeps in its cache; 0 keeps none, and reads every
            image in each step.
        padding: pad every document to `longest`, and read the padding as words, as in the published program
            of PMFL.
        modalities: DICOM modalities (0008,0060) that the model is for, such as ``["CR", "DX"]``: images of
            another one count as unreadable at the sites, and get no probability from the trained model. Other
            formats do not state a modality and are read. By default any.
        encoder_config: configuration of an encoder that comes from a file or folder, as JSON, so that sites
            build it without the folder; or name and version of the package that an encoder comes from. The
            job's own record, not to be set.
    """

    name: Annotated[str, NAMED_FILE] = "cnn"
    size: Annotated[int, Field(ge=16, le=4096)] = 64
    color: StrictBool = False
    hidden: Width = 0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    projection: Width = 0
    second_head: StrictBool = False
    neck: Width = 0
    head: HeadKind = "linear"
    row_init: RowInit = "random"
    name_vectors: Annotated[str | None, NAMED_FILE] = None
    weights: Annotated[str | None, NAMED_FILE] = None
    mean: tuple[Mean, ...] | None = None
    std: tuple[Std, ...] | None = None
    vocabulary: Annotated[str | _Words, NAMED_FILE] = "clinical"
    tokeniser: Tokeniser = "unicode"
    longest: Annotated[int, Field(ge=1, le=100_000)] | None = None
    padding: StrictBool = False
    modalities: tuple[_Modality, ...] = ()
    embedding: Annotated[str, NAMED_FILE] = TFIDF
    embedding_digest: str | None = None
    vector: Annotated[int, Field(ge=1, le=8192)] = 384
    encoder_config: Annotated[str, Field(max_length=_LONGEST_CONFIG)] | None = None
    train: Trains = "all"
    adapters: Adapters | None = None
    views: Annotated[int, Field(ge=0, le=256)] = 4

    def __post_init__(self) -> None:
        if not family_of(self.name) and self.name not in MODELS and self.name not in MODELS.names():
            raise unknown(
                "model", self.name, (*MODELS.names(), *(family.form for family in FAMILIES.values()))
            )

    @property
    def pretrained(self) -> bool:
        """Whether training begins with weights; of a specification that is `self_contained`."""
        return self.weights not in (None, RANDOM)

    @property
    def reads_features(self) -> bool:
        """Whether sites train on features that they have computed once."""
        return self.train == "head" and self.views > 0

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of this model's images."""
        own = encoder_of(self).normalisation
        channels = len(own[0]) if own else 3 if self.color else 1
        mean, std = own or ((0.5,) * channels, (0.25,) * channels)
        return Preprocessing(self.size, self.color, channels, self.mean or mean, self.std or std)


def encoder_of(spec: ModelSpec) -> Backbone:
    """Return the entry of a model: of the registry, or of the library that its name begins with.

    Raises:
        ConfigError: the library is not installed or has no such network, its file or folder cannot be used,
            or another package's entry point cannot.
    """
    if family_of(spec.name):
        spec = self_contained(spec)
        return family_encoder(spec.name, spec.encoder_config)
    if spec.name in MODELS:
        return MODELS[spec.name]
    entry, own = MODELS.find(spec.name), _package(spec.name)
    if spec.encoder_config not in (None, own):
        raise ConfigError(
            f"model.name={spec.name}: the model was made with {as_word(spec.encoder_config)}, and {own} is "
            "installed; install the same version"
        )
    return entry


def _package(name: str) -> str:
    """Name and version of the package that registers an encoder of its own."""
    return package_of(find_foreign(MODEL_GROUP)[name][0])


def self_contained(spec: ModelSpec) -> ModelSpec:
    """Return the specification with all that other parties need to build its network.

    An encoder of a file or folder is then known by the name of its network and its configuration. The file,
    folder or package of an encoder gives the weights, unless the specification names others.

    Raises:
        ConfigError: the file or folder cannot be used.
    """
    family, _, path = spec.name.partition(":")
    if not family_of(spec.name):
        if spec.encoder_config is None and spec.name not in MODELS:
            spec = replace(spec, encoder_config=_package(spec.name))
        packaged = "package" in (MODELS.find(spec.name).weights or ())
        return replace(spec, weights="package") if packaged and spec.weights is None else spec
    read = FAMILIES[family].read
    if read is None or spec.encoder_config is not None:
        return spec
    network, described = read(Path(path).expanduser())
    if len(config := str(described)) > _LONGEST_CONFIG:
        raise ConfigError(
            f"model.name={spec.name}: its tokeniser takes {len(config):,} letters of a job, which may have "
            f"{_LONGEST_CONFIG:,}; choose a model with fewer tokens"
        )
    return replace(spec, name=f"{family}:{network}", encoder_config=config, weights=spec.weights or path)


def vocabulary_of(spec: ModelSpec) -> Vocabulary:
    """Return the vocabulary of a text model.

    Raises:
        ConfigError: the vocabulary file cannot be read, or has a word twice.
    """
    if spec.vocabulary == "clinical":
        return clinical_vocabulary(spec.tokeniser)
    if spec.vocabulary == CORPUS:
        raise ConfigError(
            "model.vocabulary=corpus needs all documents in one place, as in a simulation. For a "
            "federation, make a file from public text with `suture vocab` and name it as "
            "model.vocabulary"
        )
    if isinstance(spec.vocabulary, str):
        return read_vocabulary(Path(spec.vocabulary), spec.tokeniser)
    return Vocabulary(spec.vocabulary, spec.tokeniser)


def own_words(spec: ModelSpec) -> str:
    """Return a warning where the vocabulary is a file of a site's own documents; empty otherwise."""
    if spec.vocabulary in ("clinical", CORPUS) or not vocabulary_of(spec).own:
        return ""
    return f"model.vocabulary={spec.vocabulary} was made of a site's own documents: {EVERYBODY}"


def check_portable(spec: ModelSpec, holder: str) -> None:
    """Refuse a specification from elsewhere that names a file to read the vocabulary or the encoder from.

    The number of its lines would be that of the embedding's rows, so whoever chose the name would learn it.

    Args:
        holder: what holds the specification, for the message.

    Raises:
        ConfigError: the vocabulary is a path; says what to write.
    """
    if family_of(spec.name) and is_stored(spec.name) and spec.encoder_config is None:
        raise ConfigError(
            f"model.name={spec.name[:80]!r}: {holder} needs the encoder's configuration, not the name of a "
            "file or folder; export it again with `suture export`"
        )
    if isinstance(spec.vocabulary, str) and spec.vocabulary != "clinical":
        raise ConfigError(
            f"model.vocabulary={spec.vocabulary[:80]!r}: {holder} needs the words themselves or "
            "'clinical', not the name of a file; export it again with `suture export`"
        )


def build(spec: ModelSpec, labels: LabelSet, seed: int, *, pretrained: bool) -> Classifier:
    """Build the model of a specification; the same seed gives the same tensors, and no global state changes.

    Args:
        pretrained: whether `spec.weights` and `spec.name_vectors` are read; a site receives what is made of
            them from the server instead.

    Raises:
        ConfigError: the weights cannot be read or do not fit, or settings contradict each other.
    """
    spec = self_contained(spec)
    entry = encoder_of(spec)
    _check(spec, entry)
    with seed_torch(seed_for(seed, "model")):
        backbone, features = entry.build(spec, spec.weights if pretrained and spec.pretrained else None)
        adapted: frozenset[str] = frozenset()
        if spec.train == "adapters":
            example = example_of(spec, entry)
            adapted = add_adapters(backbone, spec.adapters or Adapters(), spec.name, seed, example)
        model = Classifier(
            backbone,
            features,
            labels,
            spec.hidden,
            spec.dropout,
            spec.projection,
            spec.second_head,
            entry.inputs,
            spec.neck,
            spec.head,
            spec.train,
            adapted,
        )
    if spec.norm_momentum is not None:
        set_momentum(model, spec.norm_momentum)
    start = spec.row_init if pretrained or not spec.name_vectors else "random"
    rows = head_rows(labels, model.head.in_features, seed, start=start, vectors=spec.name_vectors)
    load_tensors(model, rows)
    if model.second_head is not None:
        load_tensors(model, head_rows(labels, spec.projection, seed, "second_head"))
    return model


def example_of(spec: ModelSpec, entry: Backbone) -> tuple[Tensor, ...]:
    """Return the inputs of a backbone for one image or document, of zeros."""
    if entry.reads == "image":
        return (torch.zeros(1, spec.preprocessing.channels, spec.size, spec.size),)
    if entry.vectors:
        return (torch.zeros(1, spec.vector),)
    return torch.zeros(1, 4, dtype=torch.long), torch.tensor([4])


def without_adapters(model: Classifier, spec: ModelSpec) -> tuple[Classifier, ModelSpec]:
    """Return a copy of a model with its adapters merged into the weights, and its specification.

    The encoder is frozen then, as with ``train = "head"``. A model without adapters is returned as it is.
    """
    if spec.train != "adapters":
        return model, spec
    plain = replace(self_contained(spec), train="head", adapters=None)
    whole = build(plain, model.labels, 0, pretrained=False)
    load_tensors(whole, model.state_dict())
    whole.backbone.load_state_dict(merge_adapters(model.backbone).state_dict())
    return whole.train(model.training), plain


def _check(spec: ModelSpec, entry: Backbone) -> None:
    """Refuse settings that contradict each other; not in `ModelSpec`, as `--set` changes them one at a time.

    Raises:
        ConfigError: naming the setting and the remedy.
    """
    if spec.size < entry.smallest:  # its last pooling would leave no pixel, or batch norm a single one
        raise ConfigError(f"model.size {spec.size} is too small for {spec.name}; {entry.smallest} or more")
    if spec.pretrained and entry.weights is None:
        raise ConfigError(f"model.weights: {spec.name} has none; remove it, or set model.name")
    if spec.weights in WEIGHTS and spec.weights not in (RANDOM, *(known := entry.weights or ())):
        words = ", or ".join(["name a file", *known])
        raise ConfigError(f"model.weights={spec.weights} is not for {spec.name}; {words}")
    if spec.dropout and not spec.hidden:
        raise ConfigError("model.dropout applies to the hidden block; set model.hidden, or remove it")
    if spec.second_head and not spec.projection:
        raise ConfigError("model.second_head belongs to the projection; set model.projection, or remove it")
    if spec.norm_momentum is not None and spec.train != "all" and not spec.projection:
        raise ConfigError(
            f"model.norm_momentum has no effect with model.train={spec.train!r}: the batch norm of a frozen "
            "encoder does not adapt; remove it"
        )
    if spec.views != ModelSpec.views and spec.train != "head":
        raise ConfigError("model.views is for a frozen encoder; set model.train='head', or remove it")
    if spec.adapters and spec.train != "adapters":
        raise ConfigError("model.adapters needs model.train='adapters'; set that, or remove model.adapters")
    if spec.name_vectors and spec.row_init != "named":
        raise ConfigError("model.name_vectors is for named rows; set model.row_init=named, or remove it")
    if spec.neck and spec.projection:
        raise ConfigError("model.neck and model.projection do not go together; set one of them to 0")
    if spec.modalities and entry.reads != "image":
        raise ConfigError(f"model.modalities is for images, but {spec.name} reads {entry.reads}; remove it")
    if entry.vectors and spec.longest is not None:
        raise ConfigError("model.longest limits words, but this model reads whole documents; remove it")
    if not entry.vectors and spec.embedding != TFIDF:
        raise ConfigError(f"model.embedding is not for {spec.name}; set model.name=vectors, or remove it")
    if entry.tokenise and (spec.padding or spec.vocabulary != "clinical"):
        raise ConfigError(
            f"model.vocabulary and model.padding are for lstm; {spec.name} has its own tokeniser; remove them"
        )
    if spec.padding and spec.longest is None:
        raise ConfigError(
            "model.padding fills every document up to model.longest. Set it, for example to the "
            "longest document of all sites (`suture data check` shows it for each site)"
        )
    pixels = spec.preprocessing
    if spec.color and pixels.channels == 1:
        raise ConfigError(f"model.color: {spec.name} takes gray images of one channel; remove it")
    for name in ("mean", "std"):
        if (given := len(getattr(pixels, name))) != pixels.channels:
            raise ConfigError(
                f"model.{name} has {given} values; {spec.name} takes {pixels.channels} channels"
            )
