"""The script of a site: it trains the rows of the site's classes and sends them.

The network, what it reads and a round of its training are in net.py of the folder that the job names. FLARE's
`patch` of Lightning would send a model without the names of its rows.
"""

import sys

import nvflare.client as flare
from net import Net, inputs, train

from data import load
from suture.sdk import receive, send

flare.init()
x, y = load(flare.get_site_name(), labels := sys.argv[1:])  # the job names to each site its own classes
x = inputs(x)

while (received := receive(labels, images=len(x))) is not None:
    model = Net(classes=len(received.meta["labels"]))
    model.load_state_dict(received.params)
    accuracy = ((model.eval()(x) > 0) == (y > 0)).float().mean().item()  # of the model as received
    train(model.train(), x, y)
    send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}), received.meta["labels"])
