"""Surgical Aggregation on frozen vectors of reports: thirteen findings of Open-i, dealt to three sites.

The setting of Shah et al., MIDL 2025 (PMLR 301): each site knows some of the findings, none known to two; a
network of two Dense blocks reads a vector of each report. By default the vectors are TF-IDF; the paper's are
all-MiniLM-L6-v2's, whose folder is a setting:

    suture run reports_openi
    suture run reports_openi --set model.embedding=DIR

Point it at the data with SUTURE_DATA (its folder openi_reports) or with `--set simulation.root=DIR`.
"""

from suture.cli import run_job_file
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.chest_xrays.openi_sites import OpeniSites

JOB = Job(
    name="reports_openi",
    title="Open-i reports at three sites that share no finding, Surgical Aggregation on vectors",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=32)),
    model=ModelSpec("vectors"),
    rounds=10,
    simulation=OpeniSites(findings=13, clients=3, classes="disjoint"),
)

if __name__ == "__main__":
    run_job_file(JOB)
