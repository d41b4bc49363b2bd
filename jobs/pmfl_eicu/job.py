"""PMFL on eICU: three sites with a diagnosis each, and one, CVA, that no site has.

Point it at the data with SUTURE_DATA (its folder eicu_demo) or with `--set simulation.root=DIR`. Documents
are drugs, past history and medication; the paper's are drugs at admission and the admission diagnosis, which
names the label. The defaults fit the demo of 2,520 stays; the paper's documents, with the sites and the
rounds of its published program, are

    suture run pmfl_eicu --set simulation.root=DIR --set 'simulation.texts=["admissionDrug"]' \\
        --set simulation.leaking_text=true --set simulation.first=negatives \\
        --set simulation.cap=3001 --set method.batches=200 --set rounds=4000 --set finetuning.test=0.1
"""

from suture.cli import run_job_file
from suture.learning.finetuning import FineTuning
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.metafl.pmfl import PMFL
from suture_papers.metafl.single_target import SingleTargetSites

JOB = Job(
    name="pmfl_eicu",
    title="eICU at three sites with a diagnosis each, PMFL",
    method=PMFL(batches=20),  # the smallest site trains on 167 stays: batches of 8
    model=ModelSpec("lstm"),
    rounds=400,
    selection="last",  # no site has validation data: a new task is the judge
    simulation=SingleTargetSites(
        corpus="eicu",
        order=("CVA", "CHF", "Pneumonia", "Pulmonary", "Sepsis"),
        training=("Pulmonary", "CHF", "Pneumonia"),
        targets=("CVA",),
    ),
    finetuning=FineTuning(test=0.3, few=40),  # a tenth of CVA's 108 stays would be 11
)

if __name__ == "__main__":
    run_job_file(JOB)
