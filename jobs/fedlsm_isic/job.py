"""FedLSM on ISIC 2018 Task 3 (HAM10000): five sites that identify 3 of its 7 diagnoses each.

The class lists are those of the paper's Table 6; the server holds the validation and test images, as there.
Images of one lesion stay together; `--set simulation.split=images` divides single images, as the published
program does. Point it at the data with SUTURE_DATA (its folder ham10000_112px) or with
`--set simulation.root=DIR`. The defaults fit a CPU; the paper's own, with the split, the normalisation and
the subsets of its program, are

    suture run fedlsm_isic --set model.name=densenet121 --set model.size=224 --set model.weights=download \\
        --set rounds=50 --set iterations=30 --set method.local.lr=1e-4 --set simulation.split=images \\
        --set 'model.mean=[0.763,0.546,0.570]' --set 'model.std=[0.141,0.153,0.170]' \\
        --set confident=200 --set uncertain=50
"""

from suture.cli import run_job_file
from suture.data.augmentation import STRONG
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.skin_lesions.isic_sites import IsicSites

JOB = Job(
    name="fedlsm_isic",
    title="ISIC 2018 at five sites with 3 diagnoses each, FedLSM",
    method=FedLSM(local=LocalTraining(lr=1e-3, iterations=15, weight_decay=5e-4, betas=(0.9, 0.99))),
    model=ModelSpec("resnet_small", size=64, color=True),
    rounds=12,
    augmentation=STRONG,  # FedLSM, FixMatch and FSSL have views of their own, weak and strong
    selection="server_metric",
    simulation=IsicSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
