"""Classes of which a site knows positives alone: what training takes for their unknown labels.

A site that annotates consolidation knows a lung opacity where there is a consolidation, and nothing where
there is none. To learn from positives alone makes everything positive; to take the others for negatives makes
every other opacity negative. So a round begins with an E step (Dempster, Laird, Rubin 1977) under the
received model: where the annotated classes below a class are known to be absent, its target is

    q = (1 - rho) p / (1 - rho p)

with p its probability, and rho the share of its images that show one of the classes below: of the site's
images the share with one, by the mean of p. This is the weight of an unlabelled image where labelled ones are
drawn at random from all positives (Elkan, Noto, KDD 2008), which rho, the same for all images, supposes. Of
images with the same p a share rho p is taught 1 and the others q, so that for every p

    rho p + (1 - rho p) q = p

and the positives alone do not draw the class upwards. Where the classes below are all that there are, rho is
1 and q is 0.

The model's own probability of the classes below, image by image, would take the place of rho p in a model
that is right. One that has seen an image in training remembers that they are absent: q is then p, and nothing
balances the positives. And p is taken with the batch statistics that training sees, without dropout: under
the averaged ones, targets and steps would disagree, and the targets drift.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.devices import repeatable
from suture.core.labels import LabelSet
from suture.learning.training import LocalRound, SiteContext, ready_inputs
from suture.models.classifier import ENCODER, frozen_copy


def expected(site: SiteContext, own: LabelSet, round_: LocalRound) -> SiteContext:
    """Return the site with targets for the unknown labels of its one-sided classes; the same without any.

    Args:
        own: the site's classes.
    """
    labels, train = site.model.labels, site.samples["train"]
    classes = [name for name in own.one_sided if name in labels]
    if not classes or not len(train):
        return site
    p = torch.sigmoid(as_trained(site, round_).double())
    taught = torch.full_like(train.y, torch.nan) if train.taught is None else train.taught.clone()
    for name in classes:
        column = labels.index(name)
        below = train.y[:, [labels.index(child) for child in own.one_sided[name]]]
        absent = (below == 0).all(dim=1)
        present = (below == 1).any(dim=1)
        rho = present.sum() / p[present | absent, column].sum().clamp(min=1e-9)
        q = given_absent(p[:, column], min(float(rho), 1.0))
        unknown = absent & train.y[:, column].isnan()
        taught[unknown, column] = q[unknown].to(taught)
    return replace(site, samples={**site.samples, "train": replace(train, taught=taught)})


@torch.no_grad()
def as_trained(site: SiteContext, round_: LocalRound) -> Tensor:
    """Return the logits of the training images, ``[n, c]``, in batches and with batch norm as in training."""
    model, train = frozen_copy(site.model), site.samples["train"]
    for name, module in model.named_modules():
        frozen = round_.norm == "frozen" or (name.startswith(ENCODER) and model.trains == "head")
        if isinstance(module, _BatchNorm) and not frozen:
            module.train()
    with repeatable(site.device):
        batches = train.batches(round_.local.batch_size)
        return torch.cat([model(ready_inputs(site, batch).inputs).cpu() for batch in batches])


def given_absent(p: Tensor, rho: float) -> Tensor:
    """Return the probability of a class in images without any of the annotated classes below it.

    Args:
        p: of the class, before this is known, ``[n]``.
        rho: the share of images with the class that show one of these, at most 1.

    >>> given_absent(torch.tensor([0.6, 0.1]), 0.5)
    tensor([0.4286, 0.0526])
    """
    return (1 - rho) * p / (1 - rho * p).clamp(min=1e-9)
