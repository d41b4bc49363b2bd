"""Fed-MAS on ISIC 2019 at four clients of light and dark skin, each divided 70/15/15.

The tones are in a CSV with the columns image and skin_tone (light or dark), which is yours to name:

    suture run fedmas_tones --set simulation.tones=FILE \\
        --set simulation.root=DIR --set simulation.lists=DIR

root and lists may be left out where SUTURE_DATA has the folders ham10000_112px and flamby_isic. The prior is
EfficientNet-Lite0 (suture[lite]). The defaults fit a CPU. Nearest to the paper's own (its program's
augmentation of these images is not offered whole, see docs/methods.md) are further

        --set method.prior.name=moco_resnet50 --set method.prior.path=FILE --set model.projection=2048 \\
        --set model.name=resnet18 --set model.size=224 --set model.weights=download --set rounds=200 \\
        --set epochs=10 --set method.local.lr=3e-4 --set prior_view=same
"""

from suture.cli import run_job_file
from suture.data.augmentation import Augmentation
from suture.learning.training import LocalTraining
from suture.methods.fedmas import FedMAS
from suture.models import ModelSpec
from suture.models.priors import PriorSpec
from suture.simulation import AttributeSites
from suture.simulation.job import Job

JOB = Job(
    name="fedmas_tones",
    title="ISIC 2019 at four clients of two skin tones, Fed-MAS",
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
    simulation=AttributeSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
