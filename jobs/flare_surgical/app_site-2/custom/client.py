"""The script of a site: beside the weights travel the names of its classes; only their rows arrive."""

import sys

import nvflare.client as flare
from shared import METHOD, MODEL, SETTINGS

from suture.sdk import LocalSite, receive, send
from suture_synthetic.phantom_scans import drawn

flare.init()
name, labels = flare.get_site_name(), sys.argv[1:]  # the job names to each site its own classes
images, y = drawn(name, labels, 32, MODEL["size"])  # drawn; read your own here
site = LocalSite(name, METHOD, SETTINGS, MODEL, labels, {"image": images}, y)

while (received := receive(labels)) is not None:  # answers the first task with the names
    update = site.train(received)
    model = flare.FLModel(params={**update.shared, **update.head}, metrics={"accuracy": site.accuracy})
    send(model, update.labels)  # the names of the rows
