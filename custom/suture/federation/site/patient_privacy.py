"""What DP-SGD of a site costs in a job, and which jobs it cannot protect: [privacy] epsilon of a suture.toml.

A site sends its number of training patients once, with noise, and the sampling rate, the number of steps and
their noise all follow from the number that was sent. So these tell no more, and ε covers all of them.
"""

from __future__ import annotations

import math

from suture.core.errors import ConfigError
from suture.data.config import SiteConfig
from suture.federation.plan import Plan, round_context
from suture.learning.dp_sgd import refuse_batch_norm
from suture.methods.base import resolve_training
from suture.models.classifier import Classifier, Layout, train_mode
from suture.privacy.differential_privacy import MULTIPLIERS, Mechanism, multiplier_for

_COUNT = 40.0
"""The noise of the number of patients is this over ε: 10 patients at ε = 4. It takes 1 to 2 % of μ²."""


def count_mechanism(epsilon: float) -> Mechanism:
    """Return the mechanism by which a site sends its number of training patients."""
    return Mechanism(_COUNT / epsilon)


def mechanism_of_round(
    plan: Plan, config: SiteConfig, rounds: int, round_: int, patients: int, multiplier: float = 0.0
) -> Mechanism:
    """Return the mechanism of the steps of a round.

    Args:
        patients: number of the site's training patients, as sent.
    """
    where, own = round_context(plan.method, plan.seed, rounds, round_), config.training
    local = resolve_training(plan.method.local, where, own.lr, own.batch_size)
    if local.sampling != "shuffled":
        raise ConfigError(
            f"[privacy] epsilon: the job samples classes ({local.sampling}), and DP-SGD patients; set "
            'method.local.sampling = "shuffled"'
        )
    if local.batch_size > patients:
        raise ConfigError(
            f"[privacy] epsilon: a batch has {local.batch_size} patients, and the site about {patients}, a "
            "noisy number. Set batch_size under [training] in suture.toml to at most a tenth of its patients"
        )
    rate, steps = local.draws_of(patients)
    return Mechanism(multiplier, rate, steps * (1 if local.iterations else local.epochs))


def planned_multiplier(plan: Plan, config: SiteConfig, rounds: int, patients: int) -> float:
    """Return the noise of the steps of a job with which it has the site's ε.

    Raises:
        ConfigError: no noise within reason has it.
    """
    epsilon, delta = config.privacy.epsilon or 0.0, config.privacy.delta
    steps = [mechanism_of_round(plan, config, rounds, r, patients) for r in range(1, rounds + 1)]
    multiplier = multiplier_for(epsilon, delta, steps, count_mechanism(epsilon))
    if math.isinf(multiplier):
        raise ConfigError(
            f"[privacy] epsilon = {epsilon:g} needs noise of more than {MULTIPLIERS[1]:g} times clip in each "
            f"of the job's {sum(one.steps for one in steps)} steps. Set a larger epsilon, or a smaller "
            "batch_size under [training], or let the job have fewer rounds"
        )
    return multiplier


def check_protected(site: str, plan: Plan, config: SiteConfig) -> None:
    """Refuse a job whose training mixes the patients of a site that protects each of them.

    Raises:
        ConfigError: says what mixes them, and the remedy.
    """
    method, training, remedy = plan.method, config.training, "choose a method that docs/protection.md names"
    egress, title = method.egress(Layout({}, {})), method.about.title
    faults = {
        f"{title} {method.about.mixes_patients}; {remedy}": method.about.mixes_patients,
        f"{title} asks for counts of labels, which no noise covers; {remedy}": egress.counts,
        f"{title} sends scalars, which no noise covers; {remedy}": egress.scalars or egress.losses,
        f"{title} weighs sites by their numbers of images; {remedy}": egress.weight != (1.0, 1.0),
        "mixed precision and compiled models have no gradients of single images; remove amp and compile "
        "under [training]": training.amp or training.compile != "no",
        "views for a frozen encoder are drawn for all images together; remove the job's augmentation": (
            plan.model.reads_features and plan.augmentation.active
        ),
    }
    for fault, present in faults.items():
        if present:
            raise ConfigError(f"{site}: [privacy] epsilon protects each patient, but {fault}")


def check_batch_norm(site: str, model: Classifier, plan: Plan, rounds: int) -> None:
    """Refuse a model whose batch norm would mix patients of the site in a round; see `refuse_batch_norm`."""
    head_only = all(phase.trainable == "head" for phase in plan.method.phases(rounds))
    train_mode(model, plan.method.sharing.batch_norm, head_only=head_only)
    try:
        refuse_batch_norm(model)
    except ConfigError as error:
        raise ConfigError(f"{site}: {error}") from error
