"""FedAvg over the union of all classes, every site counting with its number of images.

    McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017;
    as the baseline of Deng et al. (FedLSM), MICCAI 2023, Tables 1 to 3. `rows="owners"` is their FedAvg*,
    the task-dependent aggregation of Dong et al. (FPSL), IEEE TMI 2022.

    at site k:   minimise  L = 1/(N M) sum_i sum_c -w_c y_c ln p_c - (1 - y_c) ln(1 - p_c)
                 with y_c = 0 for c not in I_k; in a multiclass task the cross-entropy of labelled images
    server:      w     = sum_k n_k w_k / sum_k n_k
                 psi_c = the same over all sites, or over those that identify class c

What a site does not know is taught as absent. With `rows="owners"` that harms the backbone alone: rows of the
head come from the sites that know them.
"""

from __future__ import annotations

from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed


@hyperparameters
class FedAvg(Composed):
    """FedAvg; see `Composed` for the fields. It adds no term and changes no loss."""

    about = About(
        "fedavg",
        "FedAvg",
        "McMahan et al., AISTATS 2017; Deng et al., MICCAI 2023",
        mixes_patients="weighs sites by their numbers of images, and asks for counts of labels",
    )
