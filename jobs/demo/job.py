"""The demo: three made-up hospitals that annotate different findings train one model together.

suture demo                        # or: suture run demo --env sim
suture run demo --set method=vanilla
python jobs/demo/job.py --rounds 3
"""

from suture.cli import run_job_file
from suture.data.batch import MILD
from suture.execution.job import Job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_synthetic.phantom_hospitals import PhantomSites

JOB = Job(
    name="demo",
    title="Three sites with different findings, Surgical Aggregation",
    method=SurgicalAggregation(local=LocalTraining(lr=4e-3, epochs=2, batch_size=16)),
    model=ModelSpec("cnn", size=64),
    rounds=15,
    augmentation=MILD,
    simulation=PhantomSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
