"""The readers of untrusted input, each with examples of what it reads."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, ClassVar
from unittest.mock import patch

import safetensors.torch
import tomli_w
import torch
from mutate import damaged, flipped, mutated, text_of
from torch import Tensor, nn

from fuzz import Target
from suture.core.errors import RejectedUpdate
from suture.core.labels import LabelSet
from suture.data.batch import Augmentation
from suture.data.config import TrainingConfig, load_server_config, load_site_config
from suture.federation.plan import Plan, Schedule, round_context
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.global_model import classifier, initial
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.selection import Best, ModelSelection
from suture.federation.server.server import Server
from suture.federation.server.state import read_newest
from suture.federation.site.releases import FirstCounts
from suture.federation.site.trainer import States
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.learning.steps import load_optimiser_state, optimiser_of
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL as PFL
from suture.methods.source import code_hash
from suture.methods.surgical import SurgicalAggregation
from suture.models import MODELS, Backbone, ModelSpec, build, check_portable, encoder_of, self_contained
from suture.models.classifier import Layout, load_tensors, split_state
from suture.models.documents import document_inputs
from suture.models.saved import save_model, weights_digest
from suture.protocol import packing
from suture.protocol.check import AllowedReply
from suture.protocol.messages import (
    LARGEST,
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Masking,
    MaskKeys,
    MaskTask,
    Metrics,
    SiteInfo,
    TaskData,
    Update,
    ones,
)
from suture.protocol.packing import Packed, pack, unpack
from suture.protocol.records import Round, SiteRound, Validation
from suture_encoders import foreign as described
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedmas.fedmas import FedMAS
from suture_papers.metafl.metafl import MetaFL
from suture_papers.tables.loading import load_spec
from suture_results.prediction import open_model


def _tiny(channels: int) -> tuple[nn.Module, int]:
    """The smallest network with a convolution and batch norm: thousands of cases a second."""
    layers = (nn.Conv2d(channels, 2, 3, 4), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers), 2


MODELS.setdefault("tiny", Backbone("of the fuzzer", lambda spec, _: _tiny(spec.preprocessing.channels)))

TINY = ModelSpec("tiny", size=16)
LABELS = ("Mass", "Nodule")
EXPERIMENT = {"experiment": "run", "code": code_hash()}


@cache
def folder() -> Path:
    """Where the files of cases lie: in memory, where the machine has such a folder."""
    memory = Path("/dev/shm")
    made = Path(mkdtemp(prefix="suture-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


# 1. Messages, as the server and a site's filter read them

METRICS = Metrics(
    *(3, "validation", 7, 0.5, {"Mass": ClassScore(0.75, 0.5, None, 2, 5, 0.5)}, {"accuracy": 0.5}),
)
TESTED = replace(METRICS, round=4, split="test", attributes={"dark": Figures(3, None, {"accuracy": 0.5})})
SHARED, HEAD = {"w": torch.ones(2, 3), "b": torch.zeros(3)}, {"head.weight": torch.ones(2, 2)}
KEY = 32 * "0a"
TASKS = {
    "handshake": TaskData("handshake"),
    "train": TaskData("train", 4, 3, labels=LABELS, shared=SHARED, head=HEAD),
    "mask": TaskData("mask", 4, mask=MaskTask("keys", KEY, {"Mass": 3, "Nodule": 5})),
    "evaluate": TaskData("evaluate", 4, 4, split="test", labels=LABELS, shared=SHARED, head=HEAD),
}
MESSAGES = (
    (
        "train",
        FedAvg(),
        Update(4, LABELS, SHARED, HEAD, 5 * ones(LABELS), 5.0, train_loss=0.5, metrics=METRICS),
    ),
    ("train", SurgicalAggregation(), Update(4, LABELS, SHARED, HEAD, ones(LABELS))),
    ("handshake", FedAvg(), SiteInfo(LABELS, {"train": 5, "test": 0}, 1, "abc")),
    (
        "handshake",
        FedLSM(),
        SiteInfo(LABELS, {"train": 5}, 1, "abc", counts={"Mass": (1, 4), "Nodule": None}),
    ),
    (
        "mask",
        FedAvg(),
        Masking("keys", keys=MaskKeys(KEY, KEY, KEY, (3, 5), "-----BEGIN", ("alpha",), (3,), (KEY,), "0b")),
    ),
    ("evaluate", FedAvg(), Evaluation(TESTED, TESTED)),
    ("evaluate", MetaFL(), Evaluation(TESTED, TESTED)),
    ("train", FedAvg(), Abstain("data_fault", "DataError", 12)),
    ("train", FedAvg(), TASKS["train"]),
)


@cache
def _packed() -> tuple[Packed, ...]:
    return tuple(pack(message) for _, _, message in MESSAGES)


def _message(rng: Random) -> tuple[str, Any, Packed]:
    number = rng.randrange(len(MESSAGES))
    (task, method, _), packed = MESSAGES[number], _packed()[number]
    tensors, header = dict(packed.tensors), dict(packed.header)
    dice = rng.random()
    if tensors and dice < 0.5:
        tensors = damaged(tensors, rng, foreign=True)
    if not tensors or dice > 0.4:
        header = mutated(header, rng, foreign=True)
    return task, method, Packed(tensors, header)


def _take(case: tuple[str, Any, Packed]) -> None:
    task, method, packed = case
    told: list[Any] = []
    payload = TASKS[task]
    collector = UpdateCollector(folder() / "spool", lambda _, **facts: told.append(facts))
    collector.open({"alpha": AllowedReply(payload, method.egress(Layout.of(SHARED, HEAD)), LABELS, 5)})
    collector.receive("alpha", packed)  # never raises
    line = collector.lines["alpha"]
    json.dumps([asdict(line), told], allow_nan=False)
    for _, update in collector.updates():
        pack(update)
    if line.status == "rejected":
        raise RejectedUpdate(line.reason)
    pack(unpack(packed))  # as the site's filter does


# 2. Byte streams: FLARE's messages, and files of tensors


def _stream(rng: Random) -> Any:
    from nvflare.fuel.utils import fobs

    register()
    message = rng.choice(_packed())
    dice = rng.random()
    if dice < 0.4:
        return _as_shareable(mutated(dict(to_shareable(message)), rng, foreign=True))
    if dice < 0.6:
        return flipped(fobs.dumps(to_shareable(message)), rng)
    path = folder() / "stream.safetensors"
    path.write_bytes(_file_bytes(message, rng))
    return path


def _as_shareable(value: Any) -> Any:
    from nvflare.apis.shareable import Shareable

    if not isinstance(value, dict):
        return value
    shareable = Shareable()
    shareable.clear()
    shareable.update(value)
    return shareable


def _file_bytes(packed: Packed, rng: Random) -> bytes:
    """A file as `packing.save` writes it, with damage of its header, of its tensors or of its bytes."""
    dice = rng.random()
    whole = _Stored.of(packed.tensors)
    if packed.tensors and dice < 0.3:
        whole = _Stored(damaged(dict(packed.tensors), rng))
    text = text_of(mutated(packed.header, rng) if dice > 0.2 else packed.header, rng)
    checksum = whole.checksum(text) if rng.random() < 0.95 else rng.choice(("", "x" * 8, "-" * 8))
    header = {"__metadata__": {"suture": checksum + text}, **whole.entries}
    dice = rng.random()
    own = text_of(mutated(header, rng) if dice < 0.1 else header, rng) if dice < 0.2 else json.dumps(header)
    if dice > 0.995:  # many tensors, or facts
        own = f"{{{_many(rng.random() < 0.5)}, {own[1:]}"
    data = file_of(own.encode("utf-8", "surrogatepass"), whole.data)
    return flipped(data, rng) if 0.2 < dice < 0.3 else data


@cache
def _many(facts: bool) -> str:
    """Entries of a header that would take minutes to read: tensors, or facts."""
    if facts:
        return '"__metadata__": {' + ", ".join(f'"m{i}": ""' for i in range(1_200_000)) + "}"
    empty = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    return ", ".join(f'"m{i}": {empty}' for i in range(120_000))


def file_of(header: bytes, data: bytes) -> bytes:
    """A file of safetensors."""
    return struct.pack("<Q", len(header)) + header + data


class _Stored:
    """Tensors as safetensors stores them: made once for those that no mutation changes.

    Attributes:
        entries: the header's.
        data: what follows the header.
    """

    _known: ClassVar[dict[int, _Stored]] = {}

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        plain = {k: t.contiguous().clone() for k, t in tensors.items() if k.isprintable()}
        content = safetensors.torch.save(plain)
        start = 8 + struct.unpack("<Q", content[:8])[0]
        self.entries: dict[str, Any] = json.loads(content[8:start])
        self.data = content[start:]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Stored:
        """The same for the same object: the examples live as long as the process."""
        if id(tensors) not in cls._known:
            cls._known[id(tensors)] = cls(tensors)
        return cls._known[id(tensors)]

    def checksum(self, header: str) -> str:
        """As `packing.save` writes it."""
        total = zlib.crc32(header.encode("utf-8", "surrogatepass"))
        for name in sorted(self.entries):
            first, last = self.entries[name]["data_offsets"]
            total = zlib.crc32(self.data[first:last], zlib.crc32(name.encode(), total))
        return f"{total:08x}"


def _receive(case: Any) -> None:
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.utils import fobs

    if isinstance(case, Path):
        packing.load(case)
        return
    if isinstance(case, bytes):
        try:
            case = fobs.loads(case)
        except Exception:  # FLARE's own, before anything reaches this package
            return
    if isinstance(case, Shareable):
        unpack(from_shareable_(case))


def _answer(rng: Random) -> Any:
    """What a script answers in a job of FLARE's own workflows, damaged."""
    tensors = {"b": torch.ones(3), "head.bias": torch.ones(2)}
    counted = {"pseudo_positive": 1.0, "pseudo_negative": 0.0}
    result = {"labels": ["Mass", "Nodule"], "weight": 10.0, "class_weights": [1.0, 0.0], "scalars": counted}
    about = {"labels": ["Mass", "Nodule"], "images": 10, "counts": {"Mass": [1, 9], "Nodule": None}}
    data, meta = rng.choice(((tensors, result), ({}, about)))
    return mutated({"kind": "WEIGHTS", "data": data, "meta": meta}, rng, foreign=True)


def _understand(case: Any) -> None:
    from nvflare.apis.dxo import DXO

    from suture.flare.components.contract import Contract

    if not isinstance(case, dict) or not isinstance(case.get("meta"), dict):
        return
    contract, labels = Contract.of("fedlsm", "head", "multilabel", {}), ("Mass", "Nodule")
    shared, head = contract.split({"b": torch.ones(3), "head.bias": torch.ones(2)})
    task = TaskData("train", labels=labels, shared=shared, head=head)
    dxo = DXO("WEIGHTS", {}, case["meta"])
    dxo.data_kind, dxo.data = case.get("kind"), case.get("data")
    if isinstance(dxo.data, dict) and not dxo.data:
        contract.introduction(dxo, LARGEST)
    else:
        contract.update(dxo, contract.allowed(task, ("Mass",), 10))


# 3. States

PLAN = Plan(FedAvg(), TINY, Augmentation(), 1, **EXPERIMENT)
PERSONAL = Plan(PFL(), TINY, Augmentation(), 1, **EXPERIMENT)


@cache
def _states() -> tuple[Packed, Packed, Packed]:
    """The state of a server, and of a site of a personal method."""
    server = Server(PLAN, Schedule(name="fuzz", title="fuzz", rounds=3), folder() / "server", None)
    standings = ModelSelection(Best(1, -0.5), {"alpha": Best(1, -0.25)}, 1, "site_loss")
    lines = {"alpha": SiteRound("accepted", seconds=0.1)}
    pending = Round(1, "main", "committed", 0.1, 0, 0, lines, Validation())
    state = replace(server.state, standings=standings, pending=pending, holders=frozenset({"alpha"}))
    server._commit(1, initial(PLAN, LABELS), state)
    whole = packing.load(server.states.path(1))
    network = build(TINY, LabelSet(LABELS), 1, pretrained=False)
    state, head = split_state(network.state_dict())
    moments = {
        f"optimiser/{name}/{field}": torch.zeros(()) if field == "step" else torch.zeros_like(p)
        for name, p in list(network.named_parameters())[:1]
        for field in ("step", "exp_avg", "exp_avg_sq")
    }
    own = {f"fixed/{k}": t for k, t in head.items()} | {f"local/{k}": t for k, t in (state | head).items()}
    header = {"format": 1, "threads": 1, "labels": list(LABELS), "phase": "main", "round": 1}
    return whole, Packed(own | moments, header), Packed({}, {"counts": {"Mass": [1, 4], "Nodule": None}})


def _state(rng: Random) -> tuple[str, Path]:
    kind = rng.choice(("server", "server", "site", "site", "counts"))
    home = folder() / kind
    (home / "state").mkdir(parents=True, exist_ok=True)
    server, site, counts = _states()
    if kind == "counts":
        text = text_of(mutated(counts.header, rng), rng)
        (home / "counts.json").write_bytes(
            flipped(text.encode(), rng) if rng.random() < 0.2 else text.encode("utf-8", "surrogatepass")
        )
        return kind, home
    for old in (home / "state").glob("*"):
        if old.is_file():
            old.unlink()
    path = home / "state" / "round-000001.safetensors"
    path.write_bytes(_file_bytes(server if kind == "server" else site, rng))
    return kind, home


def _restore(case: tuple[str, Path]) -> None:
    kind, home = case
    if kind == "counts":
        counts = FirstCounts(home).of(LabelSet(LABELS), {"Mass": (2, 3), "Nodule": None})
        SiteInfo(LABELS, {}, 1, "abc", counts=counts)
    elif kind == "server":
        _continue(home)
    else:
        _resume(home)


def _continue(home: Path) -> None:
    for record in ("history.jsonl", "events.jsonl", "run.json"):
        (home / record).unlink(missing_ok=True)
    server = Server(PLAN, Schedule(name="fuzz", title="fuzz", rounds=3), home, None)
    if found := read_newest(server.states, PLAN):
        server.registry = SiteRegistry({}, tuple(sorted({*LABELS, "Hernia", *found.model.labels})))
        server._restore(found)
        classifier(server.model, PLAN)
        server._note_validation()
        assert server.state.standings.of("alpha") >= 0
        server._commit(server.round + 1, server.model, server.state)
        if server.state.standings.best:
            server.select_model()


def _resume(home: Path) -> None:
    network = build(TINY, LabelSet(LABELS), 1, pretrained=False)
    task = TaskData("train", 2, 1, labels=LABELS, fixed=split_state(network.state_dict())[1])
    states = States("alpha", PERSONAL, TrainingConfig(), home / "state")
    state = states.before(task)
    for tensors in (states.own_part(task, state, network), states.local_model(task, state, network)):
        load_tensors(network, tensors)
    optimiser = optimiser_of(network, LocalTraining())
    load_optimiser_state(optimiser, network, states.kept_by_method(state))


# 4. Model folders


_DIGEST = "0" * 64
"""In a description, the place of the digest of the weights: with a wrong one, no changed weights are read."""


@cache
def _model_files() -> tuple[tuple[str, dict[str, Tensor]], ...]:
    specs = (
        (TINY, "multilabel"),
        (replace(TINY, hidden=3, projection=2, second_head=True, color=True), "multilabel"),
        (replace(TINY, mean=(0.1,), std=(0.2,)), "multiclass"),
        (ModelSpec("lstm", vocabulary=("a", "b", "cough"), longest=5), "multilabel"),
    )
    made = []
    for i, (spec, label_type) in enumerate(specs):
        home = folder() / f"model{i}"
        save_model(build(spec, LabelSet(LABELS, label_type), 1, pretrained=False), spec, home, {"round": 3})
        text = (home / "model.json").read_text().replace(weights_digest(home), _DIGEST)
        made.append((text, safetensors.torch.load_file(home / "model.safetensors")))
    return tuple(made)


def _model(rng: Random) -> Path:
    text, tensors = rng.choice(_model_files()[:1] * 4 + _model_files())
    home, dice = folder() / "model", rng.random()
    home.mkdir(exist_ok=True)
    if dice < 0.7:
        text = text_of(mutated(json.loads(text), rng), rng)
    data = text.encode("utf-8", "surrogatepass")
    described = flipped(data, rng) if rng.random() < 0.1 else data
    stored = _Stored(damaged(tensors, rng)) if dice > 0.6 else _Stored.of(tensors)
    weights = file_of(json.dumps(stored.entries).encode(), stored.data)
    (home / "model.safetensors").write_bytes(flipped(weights, rng) if dice > 0.85 else weights)
    (home / "model.json").write_bytes(described.replace(_DIGEST.encode(), weights_digest(home).encode()))
    return home


def _predict(home: Path) -> None:
    model = open_model(home)
    if model.reads_text:
        document = home / "a.txt"
        document.write_text("a cough b")
        found = torch.tensor(model.predict(document).to_numpy())
    else:
        channels = 3 if model.prepare.color else 1
        found = model(
            torch.full((1, channels, model.prepare.size, model.prepare.size), 128, dtype=torch.uint8)
        )
    assert found.shape == (1, len(model.labels))
    assert bool(((found >= 0) & (found <= 1)).all()), found
    ", ".join(model.labels).encode()


# 5. Configurations

SITES = (
    {
        "data": {"dataset": "hospital", "root": "images", "table": "labels.csv", "labels": ["Mass", "Nodule"]}
        | {
            "synonyms": {"tumour": "Mass"},
            "target": "Mass",
            "groups": {"head": ["Mass"]},
            "split": "patients",
        },
        "training": {"batch_size": 8, "lr": 0.01, "threads": 1, "device": "cpu", "prior": "p"},
        "privacy": {"label_view": "own", "min_count": 5, "clip": 1.0, "noise": 0.5, "delta": 1e-5},
        "storage": {"state": "state", "cache": "cache", "diagnostics": True},
    },
    {"data": {"dataset": "nih", "root": "~/nih", "table": "Data_Entry_2017.csv"}},
    {"data": {"dataset": "openi", "table": "reports.tgz"}, "privacy": {"label_view": "all"}},
    {"storage": {"state": "state"}},
)
PLANS = tuple(
    Plan(method, model, augmentation, 1, **EXPERIMENT).to_dict()
    for method, model, augmentation in (
        (FedAvg(), TINY, Augmentation()),
        (FedLSM(), replace(TINY, hidden=8, mean=(0.5,), std=(0.25,)), Augmentation(rotation=10.0)),
        (FedMAS(), replace(TINY, projection=128), Augmentation()),
        (MetaFL(), ModelSpec("lstm", vocabulary=("a", "b"), longest=5), Augmentation()),
        (PFL(), TINY, Augmentation()),
    )
)
SCHEDULES = (
    Schedule(name="fuzz", title="fuzz", rounds=3).to_dict(),
    Schedule(
        name="fuzz",
        title="fuzz",
        rounds=4,
        min_sites=0.5,
        grace=3.0,
        patience=2,
        label_map={"a": "b"},
        accept_labels=("Mass",),
    ).to_dict(),
)


@cache
def _tables() -> tuple[dict[str, Any], ...]:
    import tomllib

    from suture_papers.tables.loading import known_tables

    found = [tomllib.loads(path.read_text()) for path in known_tables().values()]
    return tuple(sorted(found, key=lambda one: len(str(one)))[:6])


def _configuration(rng: Random) -> tuple[str, Any]:
    kind = rng.choice(("site", "site", "server", "plan", "plan", "schedule", "table"))
    if kind in ("plan", "schedule"):
        valid: Any = rng.choice(PLANS if kind == "plan" else SCHEDULES)
        return kind, mutated(valid, rng)
    path = folder() / f"{kind}.toml"
    path.write_bytes(_toml(rng.choice(_tables() if kind == "table" else SITES), rng))
    return kind, path


def _toml(valid: Any, rng: Random) -> bytes:
    while True:
        try:
            text = text_of(
                mutated(valid, rng), rng, lambda value: tomli_w.dumps(_without_none(value), indent=0)
            )
        except (TypeError, ValueError, AttributeError, RecursionError):  # no TOML: another mutation
            continue
        data = text.encode("utf-8", "surrogatepass")
        return flipped(data, rng) if rng.random() < 0.2 else data


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value if v is not None]
    return value


def _configure(case: tuple[str, Any]) -> None:
    kind, content = case
    if kind == "plan":
        plan = Plan.from_dict(content)
        json.dumps(plan.to_dict(), allow_nan=False)
        round_context(plan.method, plan.seed, 2, 1)
    elif kind == "schedule":
        json.dumps(Schedule.from_dict(content).to_dict(), allow_nan=False)
    else:
        readers: dict[str, Callable[[Path], object]] = {
            "site": load_site_config,
            "server": load_server_config,
            "table": lambda path: load_spec(str(path)),
        }
        readers[kind](content)


# 6. Encoders: what a job says of one, and the files from which it is made


@cache
def _encoders() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Models, and the JSON of which their encoders are made, by the names of its files."""
    import monai.networks.nets  # noqa: F401 - whose import takes more memory than an input may

    transformer = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    stages = {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "hidden_act": "gelu"}
    normalised = {"mean": [0.5] * 3, "std": [0.25] * 3, "size": 32, "labels": ["Mass"]}
    seen = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3, "do_rescale": True, "size": {"height": 32}}
    net = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "block_config": [1, 1], "init_features": 4}
    net |= {"growth_rate": 2, "bn_size": 1, "dropout_prob": 0.5}
    image = {"image": {"value_range": [0, 255], "spatial_shape": [32, 32]}}
    defined = {"network_def": {"_target_": "monai.networks.nets.DenseNet121", **net}}
    words = {"type": "WordLevel", "vocab": {"no": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    rules = {"version": "1.0", "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}}
    rules |= {"model": words, "added_tokens": []}
    small = {"vocab_size": 2, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 8, "max_position_embeddings": 8}
    pooled = {"arguments": small | {"pooling": "mean", "normalize": True}, "size": 8}
    modules = [{"type": f"models.{kind}", "path": kind} for kind in ("Transformer", "Pooling", "Normalize")]
    return (
        ("hf:bert", {"": pooled | {"tokeniser": json.dumps(rules)}}),
        (
            "hf",
            {
                "config.json": {"model_type": "bert", **small},
                "tokenizer.json": rules,
                "modules.json": modules,
                "Pooling/config.json": {"pooling_mode_mean_tokens": True},
                "sentence_bert_config.json": {"max_seq_length": 8},
            },
        ),
        ("hf:dinov2", {"": {"arguments": transformer, **normalised}}),
        ("hf:convnext", {"": {"arguments": stages, **normalised}}),
        ("bundle:DenseNet121", {"": {"arguments": net, "mean": [0.5], "std": [0.25]}}),
        (
            "hf",
            {
                "config.json": {
                    "model_type": "vit",
                    "image_size": 32,
                    "architectures": ["ViTModel"],
                    **transformer,
                },
                "preprocessor_config.json": seen,
            },
        ),
        (
            "bundle",
            {
                "configs/inference.json": defined,
                "configs/metadata.json": {"network_data_format": {"inputs": image}},
            },
        ),
        ("xrv", {"metadata": {"range": "[-1024, 1024]", "labels": '["Mass"]', "size": "224"}}),
    )


def _encoder(rng: Random) -> ModelSpec:
    name, files = rng.choice(_encoders())
    home = folder() / "encoder"
    shutil.rmtree(home, ignore_errors=True)
    for inner in ("configs", "Pooling"):
        (home / inner).mkdir(parents=True)
    texts = {file: json.dumps(content) for file, content in files.items()}
    if rng.random() < 0.9:
        changed = rng.choice(list(files))
        texts[changed] = text_of(mutated(files[changed], rng), rng)
    if ":" in name:
        config = texts[""].encode("utf-8", "replace").decode()
        return ModelSpec(name, size=32, encoder_config=config)
    if name == "xrv":
        text = f'{{"__metadata__": {texts["metadata"]}}}'
        (home / "a.safetensors").write_bytes(file_of(text.encode("utf-8", "surrogatepass"), b""))
        return ModelSpec(f"xrv:{home / 'a.safetensors'}", size=32)
    for file, text in texts.items():
        (home / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    return ModelSpec(f"{name}:{home}", size=32)


def _build(spec: ModelSpec) -> None:
    found = self_contained(spec)
    assert str(folder()) not in str(found.encoder_config)
    check_portable(found, "a job")
    with patch.object(described, "MOST_BYTES", 10**6):  # a larger one takes its time
        if spec.name.startswith("xrv"):
            encoder_of(found)
        elif encoder_of(found).reads == "text":
            inputs = document_inputs(found, ["No effusion", ""])
            build(found, LabelSet(LABELS), 1, pretrained=False)(inputs)
        else:
            build(found, LabelSet(LABELS), 1, pretrained=False)


TARGETS = {
    target.name: target
    for target in (
        Target("messages", _message, _take),
        Target("streams", _stream, _receive),
        Target("answers", _answer, _understand),
        Target("states", _state, _restore),
        Target("models", _model, _predict),
        Target("configurations", _configuration, _configure),
        Target("encoders", _encoder, _build),
    )
}
