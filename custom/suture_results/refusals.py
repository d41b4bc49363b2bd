"""Why sites or labels would not take part in a job: what a run would say, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from suture.core.errors import SutureError
from suture.core.labels import LabelSet, canonical
from suture.data.config import SiteConfig
from suture.execution.job import Job
from suture.federation.server.checks import (
    check_decision,
    check_label_type,
    check_liars,
    check_owners,
    check_same_classes,
)
from suture.federation.server.registry import one_label_type, senders
from suture.federation.site.site import check_batch_norm, check_consent
from suture.models import build


def owners_of(labels: Mapping[str, LabelSet], job: Job | None) -> dict[str, list[str]]:
    """Return the sites that annotate each class, by its name in the job."""
    label_map = {canonical(own): canonical(name) for own, name in job.label_map.items()} if job else {}
    owners: dict[str, list[str]] = {}
    for site, classes in labels.items():
        for label in classes:
            owners.setdefault(label_map.get(label, label), []).append(site)
    return owners


def rows_sent(labels: Mapping[str, LabelSet], job: Job, sites: int) -> dict[str, int]:
    """Return how many of the sites send a row of each class."""
    return senders(job.method, {name: len(own) for name, own in owners_of(labels, job).items()}, sites)


def refusals(configs: Mapping[str, SiteConfig], labels: Mapping[str, LabelSet], job: Job) -> Iterator[str]:
    """Return why sites would not take part in the job, or its method would not take their labels."""
    plan = job.plan("check")
    label_types = sorted({classes.label_type for classes in labels.values()})
    checks: list[Callable[[], object]] = [
        partial(one_label_type, {site: classes.label_type for site, classes in labels.items()})
    ]
    checks += [partial(check_label_type, job.method, label_type) for label_type in label_types]
    checks += [partial(check_consent, site, plan, config) for site, config in configs.items()]
    checks.append(partial(check_liars, job, len(configs)))
    owners, sent = owners_of(labels, job), rows_sent(labels, job, len(configs))
    checks.append(partial(check_owners, job.secure_aggregation, sent, owners, len(configs)))
    for label_type in label_types:
        alike = job.method, label_type, owners, len(configs)
        checks.append(partial(check_same_classes, job.secure_aggregation, *alike))
        checks.append(partial(check_decision, job.decision, *alike))
    protected = [site for site, config in configs.items() if config.privacy.epsilon]
    if label_types and protected:
        model = build(plan.model, LabelSet(("class",), label_types[0]), plan.seed, pretrained=False)
        checks += [partial(check_batch_norm, site, model, plan, job.rounds) for site in protected]
    for check in checks:
        try:
            check()
        except SutureError as refusal:
            yield str(refusal)
