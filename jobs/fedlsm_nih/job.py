"""FedLSM on NIH ChestX-ray14: eight sites that identify 3 of its 14 findings each.

The class lists are those of the paper's Table 5; the server holds the validation and test images, as there.
Point it at the data with SUTURE_DATA (its folder nih_cxr14_64px) or with `--set simulation.root=DIR`. The
defaults fit a CPU; the paper's own, with the split, the normalisation and the subsets of its program, are

    suture run fedlsm_nih --set model.name=densenet121 --set model.size=320 --set model.weights=download \\
        --set rounds=50 --set iterations=200 --set method.local.lr=1e-4 --set simulation.split=official \\
        --set 'model.mean=[0.506,0.506,0.506]' --set 'model.std=[0.252,0.252,0.252]' \\
        --set confident=2000 --set uncertain=500
"""

from suture.cli import run_job_file
from suture.data.augmentation import STRONG
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.chest_xrays.chest_sites import NihSites
from suture_papers.fedlsm.fedlsm import FedLSM

JOB = Job(
    name="fedlsm_nih",
    title="NIH ChestX-ray14 at eight sites with 3 findings each, FedLSM",
    method=FedLSM(local=LocalTraining(lr=1e-3, iterations=15, weight_decay=5e-4, betas=(0.9, 0.99))),
    model=ModelSpec("resnet_small", size=64),
    rounds=12,
    augmentation=STRONG,  # FedLSM, FixMatch and FSSL have views of their own, weak and strong
    selection="server_metric",
    simulation=NihSites(clients=8, classes="dealt", per_client=3, validation="server"),
)

if __name__ == "__main__":
    run_job_file(JOB)
