"""``xrv:FILE``: a DenseNet121 of torchxrayvision, whose tensors its user has written as safetensors.

Cohen et al., TorchXRayVision, MIDL 2022 (arXiv:2111.00595). The files of torchxrayvision are pickles of whole
models, which Suture does not load; `_CONVERSION` writes one that it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import nn

from suture.core.errors import ConfigError, as_word
from suture.core.files import named_regular, parse_json
from suture.core.validation import parse
from suture.models import Description
from suture.models.weights import load_weights
from suture_encoders.foreign import check_backbone, read_normalisation

if TYPE_CHECKING:
    from suture.models import ModelSpec

_CONVERSION = (
    "python -c 'import json, torchxrayvision as xrv; from safetensors.torch import save_file; "
    'm = xrv.models.DenseNet(weights="densenet121-res224-all"); '
    'save_file({k: v.contiguous() for k, v in m.state_dict().items()}, "xrv.safetensors", '
    '{"labels": json.dumps(m.pathologies), "range": "[-1024, 1024]", "size": "224"})\''
)
"""What a user runs in an environment that has torchxrayvision."""


def read_file(path: Path) -> tuple[str, Description]:
    """Return the network of a file: classes, range of its input and size of its images, from the metadata.

    Raises:
        ConfigError: there is no such file, or it is none that `_CONVERSION` writes.
    """
    remedy = f"write it where torchxrayvision is installed: {_CONVERSION}"
    if not path.is_file():
        raise ConfigError(f"model.name=xrv:{path}: there is no such file; {remedy}")
    try:
        with named_regular(path) as opened, safe_open(opened, framework="pt") as file:
            found = file.metadata() or {}
        low, high = parse_json(found["range"])
        labels, size = parse_json(found.get("labels", "[]")), parse_json(found.get("size", "null"))
        mean, std = read_normalisation(float(low), float(high), 1)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model.name: {path} is not a safetensors file with the range of its input as metadata "
            f"({as_word(error)}); {remedy}"
        ) from error
    values = {"arguments": {}, "mean": mean, "std": std, "size": size, "labels": labels}
    return "densenet121", parse(Description, values, f"the metadata of {path}")


def build_network(
    kind: str, described: Description, spec: ModelSpec, weights: str | None
) -> tuple[nn.Module, int]:
    """Build torchxrayvision's DenseNet121: torchvision's, on gray images.

    Raises:
        ConfigError: the weights are another network's.
    """
    from torchvision.models import densenet121

    network = densenet121(weights=None)
    network.features.conv0 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    network.classifier = nn.Identity()
    if weights:
        load_weights(network, weights, f"xrv's {kind}", ("classifier.", "op_threshs"))
    return check_backbone(network, spec, described.size)
