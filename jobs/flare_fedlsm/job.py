"""FLARE's FedAvg with FedLSM: counts of labels and pseudo-labels weight each site's row of a class.

python jobs/flare_fedlsm/job.py          # in FLARE's simulator, on drawn images
nvflare job submit -j jobs/flare_fedlsm  # at FLARE's console
"""

import os
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv, set_per_site_config
from shared import METHOD, MODEL, SETTINGS

from suture.sdk import DeclaredResultFilter, MethodAggregator, SiteRowsFilter, installed

SITES = {"site-1": ["Mass", "Nodule"], "site-2": ["Edema", "Nodule"]}
LABELS = ["Edema", "Mass", "Nodule"]

os.chdir(Path(__file__).parent)
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
set_per_site_config(recipe, {site: {"train_args": " ".join(own)} for site, own in SITES.items()})
recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])  # names the rows to each site
for site, own in SITES.items():  # nothing else leaves it
    guard = DeclaredResultFilter(METHOD, own, settings=SETTINGS, metrics={"accuracy": [0, 1]})
    recipe.add_client_input_filter(guard, tasks=["train"], clients=[site])
    recipe.add_client_output_filter(guard, tasks=["train"], clients=[site])

if __name__ == "__main__":
    print("Results:", recipe.execute(SimEnv(clients=list(SITES))).get_result())
