"""Surgical Aggregation on text: Open-i's reports at four sites that know four of eight findings each.

Methods that look at no pixels run on documents as they are: `--set method=vanilla`, `partial`, `pfl`,
`individual`, `central` or `fedavg`. FedLSM and Fed-MAS need images, and a job that puts them to text is
refused.
Point it at the data with SUTURE_DATA (its folder openi_reports) or with `--set simulation.root=DIR`.
"""

from suture.cli import run_job_file
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.chest_xrays.openi_sites import OpeniSites

JOB = Job(
    name="surgical_openi",
    title="Open-i reports at four sites with different findings, Surgical Aggregation",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=32)),
    model=ModelSpec("lstm"),
    rounds=10,
    simulation=OpeniSites(),
)

if __name__ == "__main__":
    run_job_file(JOB)
