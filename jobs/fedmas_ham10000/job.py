"""Fed-MAS on HAM10000 at eight sites, divided by a Dirichlet distribution: long tails of different shape.

Point it at the data with SUTURE_DATA (its folder ham10000_112px) or with `--set simulation.root=DIR`. The
prior is EfficientNet-Lite0 (suture[lite]) at 96 px. The settings fit a CPU.
"""

from suture.cli import run_job_file
from suture.data.augmentation import Augmentation
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.models.priors import PriorSpec
from suture.simulation.job import Job
from suture_papers.fedmas.fedmas import FedMAS
from suture_papers.skin_lesions.isic_sites import IsicSites

JOB = Job(
    name="fedmas_ham10000",
    title="HAM10000 at eight sites, Fed-MAS",
    method=FedMAS(
        prior=PriorSpec("efficientnet_lite0", size=96),
        local=LocalTraining(lr=1e-3, epochs=1),
        prior_view="plain",
    ),
    model=ModelSpec("resnet_small", size=64, color=True, projection=1280),
    rounds=12,
    augmentation=Augmentation(flip=0.5, vertical_flip=0.5, rotation=10.0),
    selection="server_balanced_accuracy",
    min_sites=0.5,
    simulation=IsicSites(clients=8, classes="all", partition="dirichlet"),
)

if __name__ == "__main__":
    run_job_file(JOB)
