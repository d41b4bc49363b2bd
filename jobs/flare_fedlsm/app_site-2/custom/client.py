"""The script of a site: beside the weights travel label counts, once, and counts of pseudo-labels."""

import sys

import nvflare.client as flare
from shared import METHOD, MODEL, SETTINGS

from suture.sdk import LocalSite, receive, send
from suture_synthetic.phantom_scans import drawn

flare.init()
name, labels = flare.get_site_name(), sys.argv[1:]  # the job names to each site its own classes
images, y = drawn(name, labels, 32, MODEL["size"])  # drawn; read your own here
site = LocalSite(name, METHOD, SETTINGS, MODEL, labels, {"image": images}, y)

positive, negative = (y == 1).sum(0), (y == 0).sum(0)
counts = {label: (int(p), int(n)) for label, p, n in zip(labels, positive, negative, strict=True)}

while (received := receive(labels, len(y), counts)) is not None:  # answers the first task with these counts
    update = site.train(received)
    model = flare.FLModel(params={**update.shared, **update.head}, metrics={"accuracy": site.accuracy})
    # q_c: how often class c was drawn positive, by a label or a pseudo-label; it weights the site's row of c.
    send(model, update.labels, update.weight, update.class_weights.tolist(), update.scalars)
