"""FLARE's own FedAvg, with the mean of each class over the sites that annotate it.

python job.py                        in the simulator
python job.py poc                    in a proof of concept, which FLARE makes on this machine
python job.py prod --kit ADMIN_KIT   in a federation
python job.py export --to FOLDER     for `nvflare job submit -j FOLDER/by-class`
"""

import argparse
import os
import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, ProdEnv, SimEnv, set_per_site_config

from suture.sdk import (
    DeclaredResultFilter,
    MethodAggregator,
    SiteRowsFilter,
    SutureError,
    installed,
    read_kit,
)

LABELS = ["Edema", "Hernia", "Mass", "Nodule", "Pneumonia"]
SITES = {"site-1": ["Mass", "Nodule"], "site-2": ["Hernia", "Nodule"], "site-3": ["Edema", "Mass", "Nodule"]}
HERE = Path(__file__).resolve().parent

parser = argparse.ArgumentParser()
parser.add_argument("where", nargs="?", default="sim", choices=["sim", "poc", "prod", "export"])
parser.add_argument("--method", default="surgical")
parser.add_argument(
    "--client", default="with_torch", help="folder of the sites' network, or of their script, as with_monai"
)
parser.add_argument("--rounds", type=int, default=4, help="the first one collects the classes of the sites")
parser.add_argument("--kit", help="folder of an administrator's startup kit")
parser.add_argument("--to", default="workspace", help="folder of the simulator, or of the exported job")
args = parser.parse_args()
target, chosen = Path(args.to).resolve(), HERE / args.client
if not any((chosen / file).is_file() for file in ("client.py", "net.py")):
    parser.error(f"--client {args.client}: {chosen} has no net.py or client.py; try with_monai")
script = next(folder for folder in (chosen, HERE) if (folder / "client.py").is_file())
net = next(folder for folder in (chosen, HERE / "with_torch") if (folder / "net.py").is_file())
if args.where == "prod" and not (args.kit and Path(args.kit, "startup", "fed_admin.json").is_file()):
    parser.error("prod needs --kit: the folder of an administrator's kit, with startup/fed_admin.json")
if args.rounds < 2:
    parser.error("--rounds: give 2 or more, since the first one trains nothing")
kit = read_kit(Path(args.kit).resolve()) if args.where == "prod" else None
os.chdir(script)
sys.path.insert(0, str(net))
try:
    from net import HEAD, Net

    aggregator = MethodAggregator(args.method, LABELS, head=HEAD)
except (ModuleNotFoundError, SutureError) as error:
    parser.error(f"--client {args.client}, --method {args.method}: {error}")

recipe = FedAvgRecipe(
    name="by-class",
    model=Net(classes=len(LABELS)),
    min_clients=len(SITES),
    num_rounds=args.rounds,
    train_script="client.py",
    aggregator=aggregator,
)
# They are installed everywhere, so that the job needs no copies.
installed(recipe)
# A site is told its own classes only: as the arguments of its script, and in its filter.
set_per_site_config(recipe, {site: {"train_args": " ".join(own)} for site, own in SITES.items()})
recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])
for site, own in SITES.items():  # or each site names its classes in its own privacy.json
    guard = DeclaredResultFilter(args.method, own, head=HEAD, metrics={"accuracy": [0, 1]})
    recipe.add_client_input_filter(guard, tasks=["train"], clients=[site])
    recipe.add_client_output_filter(guard, tasks=["train"], clients=[site])
for file in (net / "net.py", HERE / "data.py"):
    recipe.add_client_file(str(file))

if args.where == "export":
    recipe.export(str(target))
elif args.where == "sim":
    print("Results:", recipe.execute(SimEnv(clients=list(SITES), workspace_root=str(target))).get_result())
elif args.where == "poc":  # whose folder, with the results, FLARE would remove at the end
    run = recipe.execute(PocEnv(num_clients=len(SITES), clients=list(SITES)))
    print("Results:", run.get_result(clean_up=False))
elif kit:
    env = ProdEnv(startup_kit_location=str(kit.folder), username=kit.name)
    print("Results:", recipe.execute(env).get_result())
