"""Federations small enough to run many of: three sites in memory, a small network, states on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.files import read_json, read_records
from suture.core.labels import LabelSet, LabelType
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import seed_for
from suture.data.batch import Augmentation, Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import SPLITS, Split
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan, Schedule
from suture.federation.server.record import describe
from suture.federation.server.server import Server
from suture.federation.site.releases import SiteAnswer
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.learning.samples import SiteSamples
from suture.learning.training import SiteContext
from suture.methods.base import Method, layout_of
from suture.methods.source import code_hash
from suture.models import ModelSpec, build
from suture.models.classifier import load_tensors, split_state
from suture.protocol.egress import CLASSES as OF_CLASSES
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, Transport, restore_task, restore_update, unpack

CLASSES = ("Fibrosis", "Hernia", "Mass", "Nodule")
SITES = {"alpha": ("Mass", "Nodule"), "beta": ("Hernia", "Nodule"), "gamma": ("Fibrosis", "Mass", "Nodule")}
SIZES: dict[Split, int] = {"train": 18, "validation": 6, "test": 0}

_MOST_ROUNDS = 1000


class Trial:
    """A federation of the small sites, in a folder that vanishes with it.

    Args:
        rounds: those that the method needs are added, but for one.
        rates: learning rates of sites that have one of their own.
        hidden: the number that stands in a batch where a label is unknown. Each site then leaves every third
            label of its first class unknown; None leaves its classes known, and 0 stands for the others.
        one_sided: whether beta knows positives alone of Mass: where an image shows its Hernia, below Mass.
        min_count: of every site.
        transport: of the plan.

    Attributes:
        seen: the class names that each site has been sent by `run`.
        seen_rows: the numbers of rows of what it has been sent for each class: the head, and class tensors.
    """

    def __init__(
        self,
        method: Method,
        model: ModelSpec,
        label_type: LabelType,
        *,
        rounds: int = 1,
        rates: Mapping[str, float] | None = None,
        hidden: float | None = None,
        one_sided: bool = False,
        min_count: int = 0,
        transport: Transport = "float32",
    ) -> None:
        self.label_type, self._rates, self._hidden = label_type, rates or {}, hidden
        self._min_count, self._one_sided = min_count, one_sided
        self.folder = Path(tempfile.mkdtemp())
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.plan = Plan(method, model, Augmentation(), 1, "run", code_hash(type(method)), transport)
        rounds += least_rounds(method) - 1
        schedule = Schedule(name="trial", title="trial", rounds=rounds)
        self.server = Server(self.plan, schedule, self.folder / "run", None)
        self.sites = {name: self._site(name, rounds) for name in SITES}
        self.seen: dict[str, set[str]] = {name: set() for name in SITES}
        self.seen_rows: dict[str, set[int]] = {name: set() for name in SITES}
        self._payloads: dict[str, TaskData] = {}

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def run(self) -> None:
        """All rounds, with the records of any other run."""
        describe(self.server.record, self.plan, self.server.schedule)
        federate(self.server, _Watched(self))

    def payload(self, site: str) -> TaskData:
        """What the server sends to a site for round 1."""
        if not self._payloads:
            loop = Loop(self.sites)
            self.server.begin(
                loop.exchange("handshake", self.server.handshake(loop.sites), self.server.receiver())
            )
            self._payloads = {
                name: self._received(name, _payload(packed)) for name, packed in self.server.assign().items()
            }
        return self._payloads[site]

    def answer(self, site: str) -> SiteAnswer:
        """What a site answers in round 1."""
        return self.sites[site].answer(self.payload(site))

    def update(self, site: str) -> Update:
        """The update of a site in round 1, as the server reads it that has sent what the site received."""
        answer = self.answer(site)
        update = unpack(answer.packed)
        if not isinstance(update, Update) or not answer.allowed:
            raise AssertionError(f"{self.label_type}: {site} sent no update: {update}")
        return restore_update(update, self.payload(site), answer.allowed.egress, self.plan.transport)

    def _received(self, site: str, payload: TaskData) -> TaskData:
        layout = self.plan.method.sharing.layout(self.sites[site].trainer.model(payload.labels))
        return restore_task(payload, layout, self.plan.transport)

    def history(self) -> list[dict[str, Any]]:
        """The rounds so far, as in history.jsonl."""
        return read_records(self.folder / "run" / "history.jsonl")

    def metrics(self) -> dict[str, Any]:
        """The figures of the selected model, as in metrics.json."""
        return read_json(self.folder / "run" / "metrics.json")

    def context(self, site: str, payload: TaskData) -> SiteContext:
        """What a method's half at the site is given, outside of a federation."""
        own, samples = self._samples(site)
        labels = LabelSet(payload.labels, self.label_type)
        model = build(self.plan.model, labels, 1, pretrained=False)
        load_tensors(model, {**payload.fixed, **payload.shared, **payload.head})
        return SiteContext(
            site,
            model,
            {split: columns(part, own, labels) for split, part in samples.items()},
            self.plan.model.preprocessing,
            Augmentation(),
            torch.device("cpu"),
            prior=self.sites[site].trainer.prior,
            identified=torch.tensor([name in own for name in labels]),
        )

    def _site(self, name: str, rounds: int) -> Site:
        folder, own = self.folder / name, SITES[name]
        method, training = self.plan.method, {}
        if name in self._rates:
            training["lr"] = self._rates[name]
        public = PrivacyConfig.of_public_data(method.labels.view)
        data = {"dataset": "hospital", "root": folder, "table": folder / "labels.csv"}
        config = SiteConfig.model_validate(
            {
                "data": data | ({"target": own[0]} if method.labels.view == "target" else {}),
                "training": training,
                "privacy": public.model_copy(update={"min_count": self._min_count}),
                "storage": {"state": folder / "state", "cache": folder / "cache"},
            }
        )
        state = experiment_folder(folder / "state", self.plan.experiment)
        return Site(name, config, self.plan, rounds, state, lambda: self._samples(name))

    def _samples(self, site: str) -> SiteSamples:
        own, samples = _samples(site, self.label_type)
        if self._one_sided and site == "beta":
            own = LabelSet((*own.names, "Mass"), self.label_type, {"Mass": ("Hernia",)})
            samples = {split: _with_parent(part, split) for split, part in samples.items()}
        if self._hidden is None:
            return own, samples
        return own, {split: _hiding(part, self._hidden) for split, part in samples.items()}


def least_rounds(method: Method) -> int:
    """The fewest rounds that a run of the method needs; with fewer its `phases` raise a ConfigError."""
    for rounds in range(1, _MOST_ROUNDS):
        with suppress(ConfigError):
            method.phases(rounds)
            return rounds
    raise ConfigError(f"{method.about.title} has no phases for any number of rounds below {_MOST_ROUNDS}")


class _Watched(Loop):
    """The loop, noting which class names and how many rows each site is sent."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.sites)
        self._trial = trial

    def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
        for site, packed in payloads.items():
            payload = _payload(packed)
            # A head that stays at the site is sent once, among the tensors that no round changes.
            _, once = split_state(payload.fixed)
            rows = [*payload.head.values(), *once.values(), *self._of_classes(payload.channels)]
            self._trial.seen[site] |= set(payload.labels)
            self._trial.seen_rows[site] |= {tensor.shape[0] for tensor in rows}
        return super().exchange(task, payloads, receive)

    def _of_classes(self, channels: Mapping[str, Tensor]) -> list[Tensor]:
        """Those with a row for each class."""
        if not channels:  # before there is a model
            return []
        method = self._trial.plan.method
        forms = method.egress(layout_of(self._trial.server.model, method)).forms("down", "facts")
        return [tensor for name, tensor in channels.items() if forms[name][0][:1] == (OF_CLASSES,)]


def _payload(packed: Packed) -> TaskData:
    message = unpack(packed)
    assert isinstance(message, TaskData)
    return message


def _samples(site: str, label_type: LabelType) -> SiteSamples:
    """A site's classes and its images: a bright band at a place of its own marks each class."""
    own = LabelSet(SITES[site], label_type)
    samples: dict[Split, Samples] = {}
    for split in SPLITS:
        n = SIZES[split]
        g = torch.Generator().manual_seed(seed_for("check", site, split))
        y = torch.randint(0, 2, (n, len(CLASSES)), generator=g).float()
        if label_type == "multiclass":
            y = torch.eye(len(CLASSES))[torch.randint(0, len(CLASSES), (n,), generator=g)]
        image = torch.randint(60, 110, (n, 1, 16, 16), generator=g, dtype=torch.uint8)
        bands = y.repeat_interleave(4, dim=1).view(n, 1, 16, 1) > 0
        image = torch.where(bands, image + 90, image)
        rows = [CLASSES.index(name) for name in own]
        names = tuple(f"{site}-{split}-{i}" for i in range(n))
        samples[split] = Samples({"image": image}, y[:, rows], names, names)
    return own, samples


def _with_parent(samples: Samples, split: Split) -> Samples:
    """The samples with a column more, which is known to be present where the first one is, in training."""
    parent = torch.where((samples.y[:, :1] == 1) & (split == "train"), 1.0, torch.nan)
    return replace(samples, y=torch.cat([samples.y, parent], dim=1))


@dataclass(frozen=True)
class _Hiding(Samples):
    """Samples with `value` in the place of unknown labels, which the mask of known ones leaves out."""

    value: float = 0.0

    def rows(self, where: Tensor) -> Samples:
        return _Hiding(**vars(super().rows(where)), value=self.value)

    def targets(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        y, known = super().targets(rows)
        return torch.where(known, y, self.value), known


def _hiding(samples: Samples, value: float) -> Samples:
    """The samples with every third label of the first class unknown, and `value` where one is."""
    y = samples.y.clone()
    y[::3, 0] = float("nan")
    return _Hiding(**vars(replace(samples, y=y)), value=value)
