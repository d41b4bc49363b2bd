"""The script of a site: it trains the rows of the site's classes and sends them."""

import sys

import nvflare.client as flare
import torch
from net import Net

from data import load
from suture.sdk import receive, send

flare.init()
x, y = load(flare.get_site_name(), labels := sys.argv[1:])  # the job names to each site its own classes

while (received := receive(labels, images=len(x))) is not None:
    model = Net(classes=len(received.meta["labels"]))
    model.load_state_dict(received.params)
    accuracy = ((model(x) > 0) == (y > 0)).float().mean().item()  # of the model as received
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimiser.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimiser.step()
    send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}), received.meta["labels"])
