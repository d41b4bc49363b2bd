"""FedDyn: each local step is corrected so that local optima agree with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on Dynamic
Regularization. ICLR 2021, Algorithm 1.
"""

from dataclasses import replace

from suture.sdk import (
    About,
    Channel,
    LabelUse,
    LocalAveraging,
    LocalTraining,
    add_prefix,
    fit,
    hyperparameters,
    strip_prefix,
)


@hyperparameters
class FedDyn(LocalAveraging):
    """FedDyn; `alpha` weighs the regulariser. A class that no site sent in a round keeps its row."""

    about = About("feddyn", "FedDyn", "Acar et al., ICLR 2021, Algorithm 1", "sites differ")
    labels = LabelUse(view="own")
    local: LocalTraining = LocalTraining(lr=0.01, optimiser="sgd", momentum=0.0)
    alpha: float = 0.1

    def egress(self, layout):
        channels = (Channel("gradient", "site", layout.trained), Channel("h", "server", layout.trained))
        return replace(super().egress(layout), channels=channels)

    def train(self, site, received, round_):
        gradient = {name: t.to(site.device) for name, t in strip_prefix("gradient", round_.kept).items()}
        theta = dict(site.model.named_parameters())
        start = {name: theta[name].detach().clone() for name in gradient}

        def regularised():
            for name in (name for name in gradient if theta[name].grad is not None):
                pull = self.alpha * (theta[name].detach() - start[name])
                theta[name].grad += pull - gradient[name]

        fitted = fit(site, self.objective_at(site), round_, before_step=regularised)
        new = {k: g - self.alpha * (theta[k].detach() - start[k]) for k, g in gradient.items()}
        update = self.weigh(site, received, round_, fitted)
        return update, fitted.optimiser_state | add_prefix("gradient", new)

    def aggregate(self, previous, updates, ctx):
        mean = super().aggregate(previous, updates, ctx)
        before, theta = previous.trained, mean.trained
        part = self.alpha * sum(1 for _ in updates) / ctx.sites
        h = strip_prefix("h", previous.channels)
        h = {name: h[name] - part * (theta[name] - before[name]) for name in h}
        moved = {name: theta[name] - h[name] / self.alpha for name in h}
        sent = {label for update in updates for label in update.labels}
        unsent = previous.where([label for label in previous.labels if label not in sent])
        for name in previous.head:  # else h would move them
            moved[name][unsent] = before[name][unsent]
        return replace(mean.moved_to(moved), channels=add_prefix("h", h))
