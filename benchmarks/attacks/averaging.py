"""Does a server that asks again average the noise away? A real site, with clip = 1 and noise = 2 or with ε.

The server asks a site for its update of round 1, 40 times:

    same     the same task
    moved    with another model each time: its numbers differ by a millionth
    new      each time in a new experiment

and averages the answers that differ. Success is the share of the noise that is gone,

    1 - |mean - clean| / |first - clean|,    clean the answer without noise;

with ε, which has no such answer, 1 - 1 / sqrt(answers).
Beside it: the answers that differ, and the ε that the site's own ledger states (null: infinity).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.sites import described, hospital
from torch import Tensor

from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.federation.plan import Plan, code_hash
from suture.federation.server.global_model import initial
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import unpack
from suture_admin.ledger import read_statement

ASKED, IMAGES, SIZE = 40, 40, 16
UNLIMITED = "reanswers = 1000\n"
LIMITS = {
    "none": "clip = 1.0\nnoise = 2.0\n" + UNLIMITED,
    "limits": "clip = 1.0\nnoise = 2.0\nmax_epsilon = 10.0\n",
    "ε 8": "epsilon = 8\nmax_epsilon = 8\n",
    "ε 4": "epsilon = 4\nmax_epsilon = 4\n",
    "ε 1": "epsilon = 1\nmax_epsilon = 1\n",
}
"""[privacy] of a site by defence."""


def averaged(kind: str, defence: str, seed: int) -> dict[str, Any]:
    """Ask a site again and again; see the top of this file."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        pixels = np.random.default_rng(seed).integers(0, 256, (IMAGES, SIZE, SIZE), dtype=np.uint8)
        hospital(home, pixels, [("train", i % 2) for i in range(IMAGES)], ("Mass",), "")
        found, sizes = list[Tensor](), 0
        for number in range(ASKED):
            answer, size = _asked(home, LIMITS[defence], kind, number)
            if answer is None:
                break
            sizes += size
            if not any(torch.equal(answer, one) for one in found):
                found.append(answer)
        spent = read_statement(home / "state").spent
        if defence.startswith("ε"):
            left = max(len(found), 1) ** -0.5  # none: the noise left too few patients for a batch
        else:
            clean, _ = _asked(home, "clip = 1.0\nnoise = 0.0\n" + UNLIMITED, "clean", 0)
            assert clean is not None
            left = float((torch.stack(found).mean(0) - clean).norm() / (found[0] - clean).norm())
    seconds = time.process_time() - began
    told = {"answers": len(found), "epsilon": spent.epsilon, "bytes": sizes}
    return {"success": 1 - left, "seconds": seconds, **told}


def _asked(home: Path, limits: str, kind: str, number: int) -> tuple[Tensor | None, int]:
    """The change that the site answers as one vector, and the bytes; None if it abstains."""
    config = load_site_config(described(home, limits))
    method = SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=10), batch_norm="frozen")
    name = f"{kind}-{number if kind == 'new' else 0}"
    plan = Plan(method, ModelSpec("cnn", size=SIZE), Augmentation(), 1, name, code_hash(SurgicalAggregation))
    state = experiment_folder(home / ("clean" if kind == "clean" else "state"), plan.experiment)
    site = Site("victim", config, plan, 1, state)
    site.answer(TaskData("handshake"))
    model = initial(plan, ("Mass",))
    head = {n: t + (number * 1e-6 if kind == "moved" else 0) for n, t in model.head.items()}
    task = TaskData(
        "train", 1, labels=("Mass",), shared=dict(model.shared), head=head, fixed=dict(model.fixed)
    )
    update = unpack(site.answer(task).packed)
    if not isinstance(update, Update):
        return None, 0
    sent = {**update.shared, **update.head}
    was = {**model.shared, **head}
    size = sum(t.numel() * t.element_size() for t in sent.values())
    return torch.cat([(sent[n] - was[n]).flatten().double() for n in sorted(sent)]), size
