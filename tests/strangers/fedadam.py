"""FedAdam: the server takes the mean change of the sites as a gradient for Adam.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021,
Algorithm 2. v begins as tau^2, the least that it permits; as there, moments have no bias correction.
"""

from dataclasses import replace

import torch

from suture.sdk import (
    About,
    Channel,
    LabelUse,
    LocalAveraging,
    LocalTraining,
    add_prefix,
    hyperparameters,
    strip_prefix,
)


@hyperparameters
class FedAdam(LocalAveraging):
    """FedAdam; `server_lr` is eta. A class that no site sent in a round keeps its row."""

    about = About("fedadam", "FedAdam", "Reddi et al., ICLR 2021, Algorithm 2", "sites differ")
    labels = LabelUse(view="own")
    local: LocalTraining = LocalTraining(lr=0.01, optimiser="sgd", momentum=0.0)
    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def egress(self, layout):
        channels = (Channel("m", "server", layout.trained), Channel("v", "server", layout.trained))
        return replace(super().egress(layout), channels=channels)

    def aggregate(self, previous, updates, ctx):
        mean = super().aggregate(previous, updates, ctx)
        x, y = previous.trained, mean.trained
        m, v = strip_prefix("m", previous.channels), strip_prefix("v", previous.channels)
        delta = {name: y[name] - x[name] for name in m}
        v = {name: torch.where(old == 0, self.tau**2, old) for name, old in v.items()}
        m = {name: self.beta1 * m[name] + (1 - self.beta1) * d for name, d in delta.items()}
        v = {name: self.beta2 * v[name] + (1 - self.beta2) * d**2 for name, d in delta.items()}
        moved = {n: x[n] + self.server_lr * m[n] / (v[n].sqrt() + self.tau) for n in m}
        sent = {label for update in updates for label in update.labels}
        unsent = previous.where([label for label in previous.labels if label not in sent])
        for name in previous.head:  # else their momentum would move them
            moved[name][unsent] = x[name][unsent]
        return replace(mean.moved_to(moved), channels=add_prefix("m", m) | add_prefix("v", v))
