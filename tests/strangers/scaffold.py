"""SCAFFOLD: each local step is corrected by the difference of two control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning. ICML 2020, Algorithm 1 with option II.
"""

from dataclasses import replace

from suture.sdk import (
    About,
    Channel,
    ConfigError,
    LabelUse,
    LocalAveraging,
    LocalTraining,
    add_prefix,
    fit,
    hyperparameters,
    mean_of_channel,
    strip_prefix,
)


@hyperparameters
class Scaffold(LocalAveraging):
    """SCAFFOLD; `server_lr` is eta_g."""

    about = About("scaffold", "SCAFFOLD", "Karimireddy et al., ICML 2020, Algorithm 1", "sites differ")
    labels = LabelUse(view="own")
    local: LocalTraining = LocalTraining(lr=0.01, optimiser="sgd", momentum=0.0)
    server_lr: float = 1.0

    def __post_init__(self):
        if self.local.optimiser != "sgd" or self.local.momentum:
            raise ConfigError("SCAFFOLD takes plain steps; set local.optimiser=sgd and local.momentum=0")

    def egress(self, layout):
        like, why = layout.trained, "change of the control variate: the site's mean gradient in the round"
        kept = Channel("control", "down", like), Channel("own_control", "site", like)
        return replace(super().egress(layout), channels=(*kept, Channel("change", "up", like, why=why)))

    def train(self, site, received, round_):
        c, own = strip_prefix("control", received.channels), strip_prefix("own_control", round_.kept)
        steps = []
        y = dict(site.model.named_parameters())
        x = {k: y[k].detach().cpu().clone() for k in c}
        shift = {k: (c[k] - own[k]).to(site.device) for k in c}

        def corrected():
            steps.append(round_.local.lr)
            for name in (name for name in c if y[name].grad is not None):
                y[name].grad += shift[name]

        fitted = fit(site, self.objective_at(site), round_, before_step=corrected)
        new = {name: own[name] - c[name] + (x[name] - y[name].detach().cpu()) / sum(steps) for name in c}
        change = add_prefix("change", {name: new[name] - own[name] for name in c})
        update = self.weigh(site, received, round_, fitted)
        return replace(update, channels=change), fitted.optimiser_state | add_prefix("own_control", new)

    def aggregate(self, previous, updates, ctx):
        mean, x = super().aggregate(previous, updates, ctx), previous.trained
        y, share = mean.trained, sum(1 for _ in updates) / ctx.sites
        c, change = (
            strip_prefix("control", previous.channels),
            mean_of_channel(updates, "change", previous.labels),
        )
        moved = mean.moved_to({name: x[name] + self.server_lr * (y[name] - x[name]) for name in c})
        return replace(moved, channels=add_prefix("control", {k: c[k] + share * change[k] for k in c}))
