"""Random data of three sites, which annotate different classes."""

import torch

LABELS = ["Edema", "Hernia", "Mass", "Nodule", "Pneumonia"]
SITES = {"site-1": ["Mass", "Nodule"], "site-2": ["Hernia", "Nodule"], "site-3": ["Edema", "Mass", "Nodule"]}


def load(site: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return inputs ``[64, 8]``, labels ``[64, c]`` and the names of the c classes that a site annotates."""
    labels = SITES[site]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(sorted(SITES).index(site)))
    # A class has the same rule at every site: its own input is positive.
    return x, (x[:, [LABELS.index(name) for name in labels]] > 0).float(), labels
