"""Methods for tests: settings that suit tiny networks, and one round outside of a federation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from small_hospitals import EVERY
from suture.data.batch import Preprocessing
from suture.federation.loop import Loop
from suture.federation.server.global_model import initial
from suture.federation.server.server import Server
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining, SiteContext
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method, RoundContext, local_round
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, unpack
from suture_papers.metafl.inner_loop import INNER, ServerStep
from suture_papers.rare_classes.creff import ClassGradients, FederatedFeatures

_QUICK: dict[str, dict[str, Any]] = {
    "creff": {
        "class_gradients": ClassGradients(draws=2, images=2),
        "federated_features": FederatedFeatures(per_class=20),
    }
}
"""Hyperparameters that do fewer steps than by default, or that 18 images are enough for."""

NEW = Packed({}, {})


def reply_of(site: Site, task: TaskData) -> Any:
    """A site's answer to a task, as it crosses the wire."""
    return unpack(site.answer(task).packed)


def context_of(site: Site, task: TaskData) -> SiteContext:
    """What a method is given at a site that has received a task."""
    return site.trainer.context(task, site.states.before(task))


def first_task(site: Site, **tensors: Tensor) -> TaskData:
    """The payload of round 1 of small hospitals, with other class tensors in place of the initial ones."""
    model = initial(site.plan, EVERY)
    channels = {**model.channels, **tensors}
    return TaskData(
        "train", 1, labels=EVERY, shared=dict(model.shared), head=dict(model.head), channels=channels
    )


def begun(tiny: Any, method: Any, **tensors: Tensor) -> tuple[SiteContext, TaskData]:
    """Alpha, which annotates Mass and Nodule in 15 images, with that payload."""
    site = tiny(method).sites()["alpha"]
    task = first_task(site, **tensors)
    return context_of(site, task), task


def configured(site: Site, **sections: dict[str, Any]) -> Site:
    """The site, which has not answered yet, with other keys in sections of its suture.toml."""
    own = {name: getattr(site.config, name).model_copy(update=keys) for name, keys in sections.items()}
    config = site.config.model_copy(update=own)
    return Site(site.name, config, site.plan, site.rounds, site.folder, site.trainer.load)


def step_by_step(server: Server, sites: Mapping[str, Site]) -> Iterator[GlobalModel]:
    """The global model at the start, and after each round, which is trained when it is asked for."""
    loop = Loop(dict(sites))
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    yield server.model
    while not server.done:
        server.close_round(loop.exchange("train", server.assign(), server.receiver()))
        yield server.model


class Precise:
    """A site's preprocessing in float64, as Adam's first steps blow rounding up."""

    def __init__(self, prepare: Preprocessing) -> None:
        self.prepare, self.std = prepare, prepare.std

    def __call__(self, image: Tensor) -> Tensor:
        return self.prepare(image).double()


def precise(site: SiteContext) -> SiteContext:
    """The site in double precision: its model, its images and its labels."""
    prepare: Any = Precise(site.prepare)
    samples = {split: replace(part, y=part.y.double()) for split, part in site.samples.items()}
    return replace(site, model=site.model.double(), prepare=prepare, samples=samples)


def train_round(
    method: Method, site: SiteContext, received: TaskData, ctx: RoundContext, state: Packed = NEW
) -> tuple[Update, dict[str, Tensor]]:
    """What the site sends and stores after a round from `state`."""
    return method.train(site, received, local_round(method, site, state, ctx))


def conformant(name: str) -> Method:
    """The method with a learning rate and batches at which a tiny network moves."""
    kind: Any = METHODS[name]
    if kind().labels.view != "target":
        return kind(local=LocalTraining(lr=1e-2, batch_size=8), **_QUICK.get(name, {}))  # type: ignore[no-any-return]
    method = kind(local=replace(INNER, lr=0.1, iterations=3), batches=1)
    return method if name == "fl" else replace(method, server=ServerStep(lr=1e-2))
