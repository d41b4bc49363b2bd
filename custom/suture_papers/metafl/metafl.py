"""Meta-Federated Learning: sites with different tasks meta-train one model that a new task adapts fast.

    Zhang, Zhang, Chen, Bengio, Liu. PMFL: Partial Meta-Federated Learning for heterogeneous tasks and its
    applications on real-world medical records. arXiv:2112.05321, 2021; Algorithm 1, and its program.
    After Finn, Abbeel, Levine. Model-Agnostic Meta-Learning. ICML 2017.

    at site k:   phi_0 = theta;  phi_{s+1} = phi_s - alpha grad L_support(phi_s),  s < S       (Eq. 3)
                 L_k = L_query(phi_S)                                                 (the program)
                 g_k = grad_phi L_k at phi_S  (`order=1`), or grad_theta L_k through all steps  (`order=2`)
    server:      theta <- theta - beta 1/K sum_k g_k,                                           (Eq. 4)
                 by Adam                                                              (the program)

Algorithm 1 has no query set: its L_k is the training loss of a site's last local epoch. The published program
takes it on the other half of the batch, as MAML does, and so does this. The paper returns the loss L_k alone.
A number has no derivative: where server and sites are different machines the gradient must travel, and does
here. `order=2` is Eq. 4 to the letter; `order=1`, which leaves out the derivative of the inner steps, is what
the program computes.
"""

from __future__ import annotations

from suture.methods.base import About, hyperparameters
from suture_papers.metafl.inner_loop import MetaLearning


@hyperparameters
class MetaFL(MetaLearning):
    """MetaFL; see `MetaLearning` for the fields."""

    about = About(
        "metafl",
        "MetaFL",
        "Zhang et al. 2021, Algorithm 1",
        question="few labels",
        fixed_batches=True,
        mixes_patients="adapts to one half of a batch before the other",
    )
