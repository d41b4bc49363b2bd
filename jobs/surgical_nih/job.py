"""Surgical Aggregation on NIH ChestX-ray14, dealt to two sites with 11 and 7 of its 14 findings.

The class lists are those of the published program for two clients; four findings are known to both. Point
it at the data with SUTURE_DATA (its folder nih_cxr14_64px) or with `--set simulation.root=DIR`.

    suture run surgical_nih --env sim
    suture run surgical_nih --set model.name=densenet121 --set model.size=224 --set model.weights=PATH
"""

from suture.cli import run_job_file
from suture.data.augmentation import MILD
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.chest_xrays.chest_sites import NihSites

JOB = Job(
    name="surgical_nih",
    title="NIH ChestX-ray14 at two sites with 11 and 7 findings, Surgical Aggregation",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3, epochs=1, batch_size=64)),
    model=ModelSpec("cnn", size=64),
    rounds=10,
    augmentation=MILD,
    simulation=NihSites(clients=2),
)

if __name__ == "__main__":
    run_job_file(JOB)
