"""The base of all rooms: errors, names, labels, vocabulary, seeds, files, validation, environment."""

import os

VERSION = "0.1.0"

NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime, which has an id of the device and its maker's host
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, for timm, transformers and peft
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "FLWR_TELEMETRY_ENABLED": "0",  # with Ray, of benchmarks/anchors
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What keeps libraries from reporting to their makers. It must be set before they are imported, so here; what
the user has set stays."""

for _name, _value in NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)
