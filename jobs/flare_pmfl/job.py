"""FLARE's FedAvg with PMFL: losses and gradients of half of each tensor's rows, which the server steps along.

python jobs/flare_pmfl/job.py          # in FLARE's simulator, on made-up reports
nvflare job submit -j jobs/flare_pmfl  # at FLARE's console
"""

import os
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv, set_per_site_config
from shared import METHOD, MODEL, SETTINGS

from suture.sdk import DeclaredResultFilter, MethodAggregator, SiteRowsFilter, installed

SITES = {"site-1": "effusion", "site-2": "edema"}  # the task of each
LABELS = ["Target"]

os.chdir(Path(__file__).parent)
recipe = FedAvgRecipe(
    name="flare_pmfl",
    model={"class_path": "suture.sdk.network", "args": {"labels": LABELS, "spec": MODEL}},
    min_clients=len(SITES),
    num_rounds=4,  # the first one asks the sites for their classes
    train_script="client.py",
    aggregator=MethodAggregator(METHOD, LABELS, settings=SETTINGS),
)
installed(recipe)  # Suture is, at every party
recipe.add_server_file("shared.py")  # without code of its own, FLARE lets a job name none but its own classes
set_per_site_config(recipe, {site: {"train_args": task} for site, task in SITES.items()})
recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])  # names the rows to each site
for site in SITES:  # nothing else leaves it
    guard = DeclaredResultFilter(METHOD, LABELS, settings=SETTINGS, metrics={"accuracy": [0, 1]})
    recipe.add_client_input_filter(guard, tasks=["train"], clients=[site])
    recipe.add_client_output_filter(guard, tasks=["train"], clients=[site])

if __name__ == "__main__":
    print("Results:", recipe.execute(SimEnv(clients=list(SITES))).get_result())
