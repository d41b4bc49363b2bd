"""Partial Meta-Federated Learning: MetaFL of one half of the model; the other half is each party's own.

    Zhang, Zhang, Chen, Bengio, Liu. PMFL: Partial Meta-Federated Learning for heterogeneous tasks and its
    applications on real-world medical records. arXiv:2112.05321, 2021; Algorithm 2, and its program.

    at site k:   phi_k[:N/2] <- theta[:N/2];  phi_k[N/2:] stays as the site left it
                 phi_k <- S steps of SGD on the support half, all of phi_k                     (Eq. 3)
                 L_k = L_query(phi_k);  g_k = its gradient, of the first half        (the program)
    server:      theta[:N/2] <- theta[:N/2] - beta 1/K sum_k g_k,                              (Eq. 4)
                 by Adam                                                             (the program)
                 theta[N/2:] stays as it was initialised

Half of a model is the first half of the rows of each tensor: so in the published program, where an LSTM
shares its input and forget gates, the embedding half of the words, and an output layer of one row nothing.
Whole hidden units (`share.of="units"`) are what the paper's words suggest. As in `metafl.py`, the query half
is the program's (Algorithm 2 has none), and gradients travel rather than the paper's losses, only of the rows
that are shared.
"""

from __future__ import annotations

from dataclasses import field

from suture.methods.base import About, Share, hyperparameters
from suture_papers.metafl.inner_loop import MetaLearning


@hyperparameters
class PMFL(MetaLearning):
    """PMFL: the site's model holds its own half and the received one, and afterwards what the site keeps.

    Attributes:
        share: the part of the model that server and sites share.
        The rest as in `MetaLearning`.
    """

    about = About(
        "pmfl",
        "PMFL",
        "Zhang et al. 2021, Algorithm 2",
        question="few labels",
        fixed_batches=True,
        mixes_patients="adapts to one half of a batch before the other",
    )

    share: Share = field(default_factory=Share)
