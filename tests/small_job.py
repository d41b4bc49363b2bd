"""The smallest job that runs: for tests of what happens around a run."""

from suture.execution.job import Job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_synthetic.phantom_hospitals import PhantomSites

SMALL = Job(
    name="small",
    title="a small federation",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3)),
    model=ModelSpec("cnn", size=16),
    rounds=2,
    simulation=PhantomSites(images=20, held_out=30),
)
