"""The script of a site: beside the weights travels its rescue factor, one number."""

import sys

import nvflare.client as flare
from shared import METHOD, MODEL, SETTINGS

from suture.sdk import LocalSite, receive, send
from suture_synthetic.phantom_scans import drawn

flare.init()
name, labels = flare.get_site_name(), sys.argv[1:]
images, y = drawn(name, labels, 32, MODEL["size"])  # drawn; read your own here
site = LocalSite(name, METHOD, SETTINGS, MODEL, labels, {"image": images}, y)

while (received := receive(labels)) is not None:  # answers the first task with their names
    update = site.train(received)
    model = flare.FLModel(params={**update.shared, **update.head}, metrics={"accuracy": site.accuracy})
    send(model, update.labels, weight=update.weight)  # RF, the weight of the site in the mean
