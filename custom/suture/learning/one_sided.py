"""Classes of which a site knows positives alone: what training takes for their unknown labels.

A site that annotates consolidation knows a lung opacity where there is a consolidation, and nothing where
there is none. To learn from positives alone makes everything positive; to take the others for negatives makes
every other opacity negative. So a round begins with an E step (Dempster, Laird, Rubin 1977) under the
received model: where the annotated classes c below a class a are known to be absent, the target of a is

    q = P(a | none of c) = (p_a - u) / (1 - u), at least 0,    u = 1 - prod_c (1 - p_c)

For a model whose probabilities are right, the expected gradient of positives and targets together is zero:
u (p_a - 1) + (1 - u) (p_a - q) = 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from suture.core.labels import LabelSet
from suture.learning.training import SiteContext, predict


def expected(site: SiteContext, own: LabelSet) -> SiteContext:
    """Return the site with targets for the unknown labels of its one-sided classes; the same without any.

    Args:
        own: the site's classes.
    """
    labels, train = site.model.labels, site.samples["train"]
    classes = [name for name in own.one_sided if name in labels]
    if not classes or not len(train):
        return site
    p = torch.sigmoid(predict(site, train).double())
    taught = torch.full_like(train.y, torch.nan) if train.taught is None else train.taught.clone()
    for name in classes:
        column, below = labels.index(name), [labels.index(child) for child in own.one_sided[name]]
        q = given_absent(p[:, column], p[:, below])
        unknown = train.y[:, column].isnan() & (train.y[:, below] == 0).all(dim=1)
        taught[unknown, column] = q[unknown].to(taught)
    return replace(site, samples={**site.samples, "train": replace(train, taught=taught)})


def given_absent(p: Tensor, below: Tensor) -> Tensor:
    """Return the probability of a class where some classes below it are absent.

    Args:
        p: of the class, ``[n]``.
        below: of the classes below it, ``[n, c]``.

    >>> given_absent(torch.tensor([0.6, 0.1]), torch.tensor([[0.5], [0.5]]))
    tensor([0.2000, 0.0000])
    """
    none = (1 - below).prod(dim=1)
    return ((p - (1 - none)) / none.clamp(min=1e-12)).clamp(min=0)
