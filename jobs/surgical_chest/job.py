"""Surgical Aggregation on NIH ChestX-ray14 and CheXpert as two sites: one model of twenty findings.

The settings of Kulkarni et al. 2024: DenseNet121 from ImageNet, the head warmed up for 15 epochs, then 150
rounds of one epoch; the hidden layer is its published program's. Both data sets must be on disk.

    suture run surgical_chest --set simulation.nih=DIR --set simulation.chexpert=DIR
"""

from suture.cli import run_job_file
from suture.data.augmentation import SURGICAL
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.chest_xrays.chest_sites import ChestSites

JOB = Job(
    name="surgical_chest",
    title="NIH and CheXpert as two sites, Surgical Aggregation",
    method=SurgicalAggregation(local=LocalTraining(lr=5e-5, batch_size=64, warmup_epochs=15)),
    model=ModelSpec("densenet121", size=224, weights="download", hidden=256, dropout=0.3),
    rounds=151,
    augmentation=SURGICAL,
    simulation=ChestSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
