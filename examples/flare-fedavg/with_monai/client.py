"""A site that trains with MONAI's network, data and transforms."""

import sys

import nvflare.client as flare
import torch
from monai.data import ArrayDataset, DataLoader
from monai.transforms import RandGaussianNoise
from net import Net

from data import load
from suture.sdk import receive, send

flare.init()
x, y = load(flare.get_site_name(), labels := sys.argv[1:])  # the job names to each site its own classes
images = x[:, None, None].repeat(1, 1, 8, 1)  # [64, 1, 8, 8]
loader = DataLoader(ArrayDataset(images, RandGaussianNoise(prob=0.5), y), batch_size=16)

while (received := receive(labels, images=len(x))) is not None:
    model = Net(classes=len(received.meta["labels"]))
    model.load_state_dict(received.params)
    accuracy = ((model.eval()(images) > 0) == (y > 0)).float().mean().item()  # of the model as received
    optimiser = torch.optim.Adam(model.train().parameters(), lr=0.01)
    for _ in range(5):
        for image, label in loader:
            optimiser.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(image), label).backward()
            optimiser.step()
    send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}), received.meta["labels"])
