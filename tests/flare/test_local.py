"""The half of a method at a site, in FLARE's own workflow."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from flare_job import FlareJob
from rounds import conformant
from suture.flare.components import MethodAggregator
from suture.flare.local import LocalSite, network
from suture.learning.evaluation import label_counts
from suture.models.classifier import Layout
from suture.protocol.messages import round_figure
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

PAPERS = "surgical", "fedlsm", "fedmas", "pmfl"
ROUNDS = 2


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
            received = FLModel(
                params=task.data, meta=task.meta, current_round=number, total_rounds=ROUNDS + 1
            )
            update = local.train(received)
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


@pytest.mark.complete
@pytest.mark.parametrize("name", PAPERS)
def test_the_model_is_that_of_sutures_own_controller(name: str) -> None:
    method = conformant(name)
    with Trial(method, SMALL, method.labels.types[0], rounds=ROUNDS) as trial:
        trial.run()
        model = trial.server.model
        spec = {"encoder": SMALL.name, "size": SMALL.size, "weights": SMALL.weights}
        found = in_flare(trial, name, asdict(method), spec)
    for tensor_name, tensor in {**model.shared, **model.head}.items():
        torch.testing.assert_close(found[tensor_name], tensor, rtol=0, atol=1e-6)
