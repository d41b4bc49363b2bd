"""Fed-MAS on ISIC 2019 as FLamby's centres: one site for each that has images here.

With the official lists and the images of HAM10000 alone, which are all for training, the images that are
there are divided:

    suture run fedmas_isic --set simulation.split=lesions \\
        --set simulation.root=DIR --set simulation.lists=DIR

root and lists may be left out where SUTURE_DATA has the folders ham10000_112px and flamby_isic. With all
images of ISIC 2019 the first setting may be left out too: the published lists of the first fold then train,
and the others test. The prior is EfficientNet-Lite0 (suture[lite]). The defaults fit a CPU. Nearest to the
paper's own (the Gaussian blur of its program is not offered, see docs/methods.md) are

    suture run fedmas_isic --set method.prior.name=moco_resnet50 --set method.prior.path=FILE \\
        --set model.projection=2048 --set model.name=resnet18 --set model.size=224 \\
        --set model.weights=download --set rounds=200 --set epochs=10 --set method.local.lr=3e-4 \\
        --set prior_view=same
"""

from suture.cli import run_job_file
from suture.data.augmentation import Augmentation
from suture.learning.training import LocalTraining
from suture.methods.fedmas import FedMAS
from suture.models import ModelSpec
from suture.models.priors import PriorSpec
from suture.simulation import FlambySites
from suture.simulation.job import Job

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
    min_sites=0.5,
    simulation=FlambySites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
