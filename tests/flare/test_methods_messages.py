"""Methods give in FLARE what they give in one process: through its messages, and in its own workflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.fuel.utils import fobs

from flare_job import FlareJob
from rounds import conformant
from suture.federation.loop import Loop, federate
from suture.federation.site.site import Site
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.flare.components import MethodAggregator
from suture.flare.executor import ALLOWED, EgressFilter
from suture.flare.local import LocalSite, network
from suture.learning.evaluation import label_counts
from suture.methods.base import Method
from suture.models.classifier import Layout
from suture.protocol.egress import round_figure
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed, Transport, unpack
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

pytestmark = pytest.mark.complete

ROUNDS = 2


class _ThroughFlare(Loop):
    """The loop, with each message written and read by FLARE, and each answer passed by the site's filter."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        super().__init__(sites)
        self.filter, self.abstained = EgressFilter(), 0

    def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
        for name, packed in payloads.items():
            payload = unpack(_sent(packed))
            assert isinstance(payload, TaskData)
            site, context = self._sites[name], FLContext()
            answer = site.answer(payload)
            self.abstained += answer.allowed is None
            context.set_prop(ALLOWED, answer.allowed, private=True, sticky=False)
            passed = self.filter.process(to_shareable(answer.packed), context)
            receive(name, _sent(from_shareable_(passed)))
        return {}


def _sent(packed: Packed) -> Packed:
    """As it arrives: FLARE refers to large tensors and fetches them later, so small ones stand for them."""
    return from_shareable_(fobs.loads(fobs.dumps(to_shareable(packed))))


def _trial(method: Method, transport: Transport) -> Trial:
    label_type = "multilabel" if method.labels.view == "target" else method.labels.types[0]
    return Trial(method, SMALL, label_type, rounds=2, transport=transport)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("afl", "float32"),  # sums in double precision
        ("creff", "float32"),  # tensors of classes both ways
        ("fedmlp", "float32"),  # rows of classes of others
        ("pmfl", "float32"),  # gradients beside a head of their own
        ("pmfl", "float16"),
        ("fedmlp", "int8"),
    ],
)
def test_flares_messages_change_no_byte(name: str, transport: Transport) -> None:
    register()
    method = conformant(name)
    with _trial(method, transport) as loop, _trial(method, transport) as flare:
        federate(loop.server, Loop(loop.sites))
        through = _ThroughFlare(flare.sites)
        federate(flare.server, through)
        assert not through.abstained
        assert loop.metrics() == flare.metrics()
        one, two = loop.server.model, flare.server.model
        for group in ("shared", "head", "fixed", "channels"):
            a, b = getattr(one, group), getattr(two, group)
            assert a.keys() == b.keys()
            for key, tensor in a.items():
                assert torch.equal(tensor, b[key]), f"{group}/{key}"


def in_flare(trial: Trial, name: str, settings: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """The model after the same rounds of the same sites with FLARE's FedAvg and the method's aggregator."""
    labels = trial.server.model.labels
    job = FlareJob(
        MethodAggregator(name, labels, label_type=trial.label_type, settings=settings),
        network(labels, spec, trial.label_type).state_dict(),
        rounds=ROUNDS + 1,
    )
    requested = trial.plan.method.egress(Layout({}, {})).counts
    sites = {}
    for site, party in trial.sites.items():
        own, samples = party.trainer.data
        train = samples["train"]
        sites[site] = LocalSite(
            site, name, settings, spec, own.names, train.inputs, train.y, label_type=trial.label_type
        )
        counts = label_counts(own, train, party.config.privacy)
        job.introduce(site, own.names, len(train), counts if requested else None)
    job.close()
    for number in range(1, ROUNDS + 1):
        for site, local in sites.items():
            task = job.task(site)
            of_round = {"current_round": number, "total_rounds": ROUNDS + 1}
            update = local.train(FLModel(params=task.data, meta=task.meta, **of_round))
            job.answer(
                site,
                {**update.shared, **update.head},
                labels=list(update.labels),
                weight=update.weight,
                class_weights=update.class_weights.tolist(),
                scalars={key: round_figure(value) for key, value in update.scalars.items()},
                channels={key: tensor.numpy() for key, tensor in update.channels.items()},
            )
        job.close()
    return job.params


@pytest.mark.parametrize("name", ["surgical", "fedlsm", "fedmas", "pmfl"])
def test_flares_own_workflow_gives_the_model_of_sutures_controller(name: str) -> None:
    method = conformant(name)
    with Trial(method, SMALL, method.labels.types[0], rounds=ROUNDS) as trial:
        trial.run()
        model = trial.server.model
        spec = {"encoder": SMALL.name, "size": SMALL.size, "weights": SMALL.weights}
        found = in_flare(trial, name, asdict(method), spec)
    for tensor_name, tensor in {**model.shared, **model.head}.items():
        torch.testing.assert_close(found[tensor_name], tensor, rtol=0, atol=1e-6)
