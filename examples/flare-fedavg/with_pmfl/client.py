"""A site of PMFL: half of the model is received and answered with a gradient, the other half stays here."""

import sys

import nvflare.client as flare
import torch
from net import Net
from torch.nn.functional import binary_cross_entropy_with_logits as cost

from data import load as load_data
from suture.sdk import gradients, load, receive, send

flare.init()
x, y = load_data(flare.get_site_name(), labels := sys.argv[1:])  # the job names to each site its own classes
model = Net(classes=len(labels))

while (received := receive(labels, images=len(x))) is not None:
    load(model, received)
    accuracy = ((model(x) > 0) == (y > 0)).float().mean().item()  # of the model as received
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):  # steps on the support half
        optimiser.zero_grad()
        (support := cost(model(x[::2]), y[::2])).backward()
        optimiser.step()
    optimiser.zero_grad()
    (query := cost(model(x[1::2]), y[1::2])).backward()
    answer = flare.FLModel(params=gradients(model, received), metrics={"accuracy": accuracy})
    losses = {"scalars": {"query_loss": query.item()}, "train_loss": support.item()}
    send(answer, received.meta["labels"], **losses)
