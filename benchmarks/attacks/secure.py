"""One round of secure aggregation: what the server learns in place of the updates.

All messages of an attempt are real (`suture.privacy.masking`), without FLARE and files; no site drops out.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from suture.methods.base import GlobalModel
from suture.privacy.masking import (
    Attempt,
    Identity,
    Participant,
    Received,
    from_fixed_point,
    sorted_out,
    unmask_sum,
)  # fmt: skip
from suture.privacy.robust import Counted
from suture.privacy.secure_aggregation import apart, in_ring
from suture.protocol.messages import Update, ones

DEFENCE = "secure aggregation"
"""Its name among the defences of `table`."""


def summed(previous: GlobalModel, updates: Mapping[str, Update]) -> Counted:
    """Return the updates of all sites as the server has them: each with the mean of all.

    Args:
        previous: the model that the sites have received. A row that too few sites send stays as it is there.
    """
    numbers = {label: i for i, label in enumerate(previous.labels)}
    attempt = Attempt("attacks", 1, secrets.token_hex(32))
    own = {site: {label: numbers[label] for label in update.labels} for site, update in updates.items()}
    sites = {site: Participant(site, attempt, list(own[site].values()), Identity()) for site in updates}
    roster = {site: part.keys for site, part in sites.items()}
    sealed = {site: part.shares(roster) for site, part in sites.items()}
    for site, part in sites.items():
        part.receive({by: shares[site] for by, shares in sealed.items() if by != site})
    received = Received(b"", dict.fromkeys(numbers.values(), b""))  # digests, equal at all sites
    masked = {
        site: part.mask(in_ring(updates[site], own[site], len(sites)), received)
        for site, part in sites.items()
    }
    signed = {site: part.sign(sorted(sites)) for site, part in sites.items()}
    revealed = {site: part.reveal(signed) for site, part in sites.items()}
    shares, _ = sorted_out(sealed, {}, sorted(sites), revealed)
    total = unmask_sum(attempt, roster, sites, masked.items(), shares, dict.fromkeys(sites, received))
    one = next(iter(updates.values()))
    weight = sum(update.weight for update in updates.values())
    shared = apart(from_fixed_point(total.shared) / weight, one.shared)
    head = {name: tensor.clone() for name, tensor in previous.head.items()}
    for label, number in numbers.items():
        if number in total.rows:
            owned = sum(
                float(u.class_weights[u.labels.index(label)]) for u in updates.values() if label in u.labels
            )
            row = {name: tensor[number] for name, tensor in head.items()}
            for name, values in apart(from_fixed_point(total.rows[number]) / owned, row).items():
                head[name][number] = values.to(head[name].dtype)
    shared = {name: tensor.to(one.shared[name].dtype) for name, tensor in shared.items()}
    return Counted(tuple(updates.values()), replace(previous, shared=shared, head=head))


def sum_of(changes: list[dict[str, Tensor]], labels: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the sum of the changes of sites that have the same classes, unmasked by the server."""
    parts = []
    for change in changes:
        shared = {name: tensor for name, tensor in change.items() if not name.startswith("head.")}
        head = {name: tensor for name, tensor in change.items() if name.startswith("head.")}
        parts.append(Update(1, labels, shared, head, ones(labels)))
    updates = {f"site{i}": part for i, part in enumerate(parts)}
    model = summed(GlobalModel(labels, dict(parts[0].shared), dict(parts[0].head)), updates).model
    return {name: tensor * len(changes) for name, tensor in {**model.shared, **model.head}.items()}
