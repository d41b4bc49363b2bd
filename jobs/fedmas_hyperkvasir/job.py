"""Fed-MAS on HyperKvasir: eight sites that know all of its 23 classes, of 1,148 images down to six.

Point it at the data with SUTURE_DATA (its folders hyperkvasir and hyperkvasir_splits) or with
`--set simulation.root=DIR --set simulation.lists=DIR`. The prior is EfficientNet-Lite0 (suture[lite]).
Nearest to the paper's own settings, whose augmentation of these images is not public, are

    suture run fedmas_hyperkvasir --set method.prior.name=moco_resnet50 --set method.prior.path=FILE \\
        --set model.projection=2048 --set model.weights=download --set rounds=200 --set epochs=10
"""

from suture.cli import run_job_file
from suture.data.augmentation import Augmentation
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.models.priors import PriorSpec
from suture.simulation.job import Job
from suture_papers.fedmas.fedmas import FedMAS
from suture_papers.fedmas.hyperkvasir_sites import HyperKvasirSites

JOB = Job(
    name="fedmas_hyperkvasir",
    title="HyperKvasir at eight sites, Fed-MAS",
    method=FedMAS(
        prior=PriorSpec("efficientnet_lite0"),
        local=LocalTraining(lr=0.1, final_lr=1e-4, optimiser="sgd", weight_decay=1e-4),
    ),
    model=ModelSpec("resnet18", size=224, color=True, projection=1280),
    rounds=50,
    augmentation=Augmentation(flip=0.5, vertical_flip=0.5, rotation=10.0),
    selection="server_balanced_accuracy",
    min_sites=0.5,
    simulation=HyperKvasirSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
