"""PMFL on the reports of MIMIC-CXR: five sites with a finding each, tested on three others.

Which findings train and in which order the sites are built follows the paper's published program; the paper
draws five at random and builds the most frequent first.

Point it at the data with SUTURE_DATA (its folder mimic_cxr) or with `--set simulation.root=DIR`: it holds
`mimic-cxr-2.0.0-chexpert.csv`, gzipped or not, and the reports as `files/` or `mimic-cxr-reports.zip`. The
sites with which the program tests the other five findings are in experiments/pmfl_mimic_b and _c.
"""

from suture.cli import run_job_file
from suture.learning.finetuning import FineTuning
from suture.models import ModelSpec
from suture.simulation.job import Job
from suture_papers.metafl.pmfl import PMFL
from suture_papers.metafl.single_target import SingleTargetSites

DISEASES = (
    *("Pleural Other", "Lung Lesion", "Pneumothorax", "Consolidation", "Pneumonia"),
    *("Atelectasis", "Pleural Effusion", "Lung Opacity"),
)
"""In the order in which they are built, the rarest first."""

JOB = Job(
    name="pmfl_mimic",
    title="MIMIC-CXR reports at five sites with a finding each, PMFL",
    method=PMFL(batches=100),
    model=ModelSpec("lstm"),
    rounds=2000,  # 20 passes, as in the published program
    selection="last",  # no site has validation data: a new task is the judge
    simulation=SingleTargetSites(
        corpus="mimic_reports",
        order=DISEASES,
        training=("Lung Lesion", "Pneumothorax", "Consolidation", "Pneumonia", "Lung Opacity"),
        targets=("Atelectasis", "Pleural Effusion", "Pleural Other"),
    ),
    finetuning=FineTuning(few=100),
)

if __name__ == "__main__":
    run_job_file(JOB)
