"""The script of a site: half of the rows of each tensor arrive; their gradients and two losses leave."""

import sys

import numpy as np
import nvflare.client as flare
from shared import METHOD, MODEL, SETTINGS

from suture.data.text import clinical_vocabulary
from suture.sdk import LocalSite, receive, send

flare.init()
name, task, labels = flare.get_site_name(), sys.argv[1], ["Target"]
draw = np.random.default_rng([*name.encode()])  # made-up reports; read your own here
y = draw.integers(0, 2, (64, 1)).astype("float32")
words = draw.choice(["clear", "heart", "left", "lungs", "mild", "normal", "right", "stable"], (64, 8))
texts = [f"{' '.join(row)} {task if found else 'seen'}" for row, found in zip(words, y, strict=True)]
tokens, length = clinical_vocabulary().encode(texts, None)
site = LocalSite(name, METHOD, SETTINGS, MODEL, labels, {"tokens": tokens, "length": length}, y)

while (received := receive(labels)) is not None:
    update = site.train(received)
    model = flare.FLModel(params={**update.shared, **update.head}, metrics={"accuracy": site.accuracy})
    send(model, update.labels, scalars=update.scalars, train_loss=update.train_loss)  # of query and support
