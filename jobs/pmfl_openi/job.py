"""PMFL on Open-i's chest X-ray reports: five sites with a finding each, and three findings that no site has.

Point it at the data with SUTURE_DATA (its folder openi_reports) or with `--set simulation.root=DIR`. The
model of the last round is put to each target: trained on 90 % of its documents, or on 100 of them, and
tested on the rest, five times.
`--set method=metafl`, `--set method=fl` and `--set finetuning.start=fresh` are the rows that the paper
compares with.
"""

from suture.cli import run_job_file
from suture.learning.finetuning import FineTuning
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.metafl.pmfl import PMFL
from suture_papers.metafl.single_target import SingleTargetSites

JOB = Job(
    name="pmfl_openi",
    title="Open-i reports at five sites with a finding each, PMFL",
    method=PMFL(batches=20),  # the smallest site trains on 166 documents: batches of 8
    model=ModelSpec("lstm"),
    rounds=400,
    selection="last",  # no site has validation data: a new task is the judge
    simulation=SingleTargetSites(),
    finetuning=FineTuning(few=100),
)

if __name__ == "__main__":
    run_job_file(JOB)
