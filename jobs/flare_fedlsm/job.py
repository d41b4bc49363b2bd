"""FLARE's FedAvg with FedLSM: counts of labels and pseudo-labels weight each site's row of a class.

python jobs/flare_fedlsm/job.py          # in FLARE's simulator, on drawn images
nvflare job submit -j jobs/flare_fedlsm  # at FLARE's console
"""

import os
import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from suture.sdk import DeclaredResultFilter, MethodAggregator, SiteRowsFilter, installed

os.chdir(Path(__file__).parent / "app" / "custom")  # what all parties run
sys.path.insert(0, os.getcwd())
from shared import LABELS, METHOD, MODEL, SETTINGS, SITES  # noqa: E402

recipe = FedAvgRecipe(
    name="flare_fedlsm",
    model={"class_path": "suture.sdk.network", "args": {"labels": LABELS, "spec": MODEL}},
    min_clients=len(SITES),
    num_rounds=4,  # the first one asks the sites for their classes and label counts
    train_script="client.py",
    aggregator=MethodAggregator(METHOD, LABELS, settings=SETTINGS),
)
installed(recipe)  # Suture is, at every party
recipe.add_server_file("shared.py")  # without code of its own, FLARE lets a job name none but its own classes
recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])  # names the rows to each site
guard = DeclaredResultFilter(METHOD, SITES, settings=SETTINGS, metrics={"accuracy": [0, 1]})
recipe.add_client_input_filter(guard, tasks=["train"])
recipe.add_client_output_filter(guard, tasks=["train"])  # nothing else leaves a site

if __name__ == "__main__":
    print("Results:", recipe.execute(SimEnv(clients=list(SITES))).get_result())
