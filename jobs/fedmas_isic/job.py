"""Fed-MAS on ISIC 2019 as FLamby's centres: one site for each that has images here.

Training lists are those of the paper's first fold; where only their images are there,
`--set simulation.split=lesions` divides those. Point it at the data with SUTURE_DATA (its folders
ham10000_112px and flamby_isic) or with `--set simulation.root=DIR --set simulation.lists=DIR`. The prior is
EfficientNet-Lite0 (suture[lite]). The defaults fit a CPU. Nearest to the paper's own, whose Gaussian blur is
not offered (docs/methods/fedmas.md), are

    suture run fedmas_isic --set method.prior.name=moco_resnet50 --set method.prior.path=FILE \\
        --set model.projection=2048 --set model.name=resnet18 --set model.size=224 \\
        --set model.weights=download --set rounds=200 --set epochs=10 --set method.local.lr=3e-4 \\
        --set prior_view=same
"""

from suture.cli import run_job_file
from suture.data.transforms import Augmentation
from suture.job import Job
from suture.methods.fedmas import FedMAS
from suture.models import ModelSpec
from suture.priors import PriorSpec
from suture.simulation import FlambySites
from suture.training import LocalTraining

JOB = Job(
    name="fedmas_isic",
    title="ISIC 2019 at FLamby's centres, Fed-MAS",
    method=FedMAS(
        prior=PriorSpec("efficientnet_lite0"),
        local=LocalTraining(lr=1e-3, epochs=1),
        prior_view="plain",
    ),
    model=ModelSpec("resnet_small", size=64, color=True, projection=1280),
    rounds=12,
    augmentation=Augmentation(flip=0.5, vertical_flip=0.5, rotation=10.0),
    selection="server_balanced_accuracy",
    simulation=FlambySites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
