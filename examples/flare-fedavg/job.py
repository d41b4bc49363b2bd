"""FLARE's own FedAvg, with the mean of each class over the sites that annotate it.

    python job.py                        in the simulator
    python job.py poc                    in a proof of concept of FLARE on this machine
    python job.py prod --kit ADMIN_KIT   in a federation
    python job.py export --to FOLDER     for `nvflare job submit -j FOLDER/by-class`
"""

import argparse

from data import LABELS, SITES
from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, ProdEnv, SimEnv, set_per_site_config

from suture.flare.components import DeclaredResultFilter, MethodAggregator, SiteRowsFilter

parser = argparse.ArgumentParser()
parser.add_argument("where", nargs="?", default="sim", choices=["sim", "poc", "prod", "export"])
parser.add_argument("--method", default="surgical")
parser.add_argument("--client", default="client.py", help="the script of the sites")
parser.add_argument("--rounds", type=int, default=4, help="the first one collects the classes of the sites")
parser.add_argument("--kit", help="folder of an administrator's startup kit")
parser.add_argument("--to", default="workspace", help="folder of the simulator, or of the exported job")
args = parser.parse_args()

recipe = FedAvgRecipe(
    name="by-class",
    model=Net(classes=len(LABELS)),
    min_clients=len(SITES),
    num_rounds=args.rounds,
    train_script=args.client,
    aggregator=MethodAggregator(args.method, LABELS),
)
set_per_site_config(recipe, {site: {} for site in SITES})
recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])
for site, own in SITES.items():  # or each site has its filter in its own privacy.json
    guard = DeclaredResultFilter(args.method, own, metrics={"accuracy": [0, 1]})
    recipe.add_client_input_filter(guard, tasks=["train"], clients=[site])
    recipe.add_client_output_filter(guard, tasks=["train"], clients=[site])
for file in ("net.py", "data.py"):
    recipe.add_client_file(file)

if args.where == "export":
    recipe.export(args.to)
else:
    env = {
        "sim": lambda: SimEnv(clients=list(SITES), workspace_root=args.to),
        "poc": lambda: PocEnv(num_clients=len(SITES), clients=list(SITES)),
        "prod": lambda: ProdEnv(startup_kit_location=args.kit),
    }[args.where]()
    print("The results are in", recipe.execute(env).get_result())
