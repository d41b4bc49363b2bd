"""Every method in mixed precision: a federation in which one site has a GPU with CUDA's autocast."""

from __future__ import annotations

from typing import Any

import pytest

from methods.test_host_reads import OTHERS, SITE, label_types, lasting, two_sites  # noqa: F401
from rounds import configured, conformant
from simulated_device import NAME, Simulated
from suture.core.labels import LabelType
from suture.federation.site import site as sites
from suture.methods import METHODS
from suture.methods.fedavg import FedAvg
from suture_synthetic.method_checks import subject_of

pytestmark = pytest.mark.complete


EVERY = {
    **{name: conformant(name) for name in METHODS},
    **OTHERS,
    "balanced": FedAvg(softmax="balanced"),
}

SCALED = {"fedavg", "fedlsm", "creff"}
"""Methods with both halves: fp16 meets every dtype that bf16 does, and it alone has a scaler of losses. They
train on labels alone, on those of a teacher too, and with gradients beside the loss.
"""

CASES = [
    (name, kind, half)
    for name, method in EVERY.items()
    if not method.about.fixed_batches
    for half in (("fp16", "bf16") if name in SCALED else ("fp16",))
    for kind in label_types(method)
]


@pytest.mark.parametrize(("name", "label_type", "half"), CASES)
def test_a_round_trains(name: str, label_type: LabelType, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raised(folder: Any, site: Any, task: Any, error: Exception) -> None:
        raise error

    monkeypatch.setattr(sites, "record_error", raised)  # no abstention
    with Simulated(), subject_of(lasting(EVERY[name], 2)).trial(label_type) as federation:
        own = {"device": NAME, "amp": True, "half": half}
        federation.sites[SITE] = configured(federation.sites[SITE], training=own)
        federation.run()
