"""A saved model as ONNX, checked with onnxruntime before it gets its name.

Both packages are optional: `pip install "suture[onnx]"`.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.core.entry_points import needed
from suture.core.errors import ConfigError
from suture.core.files import read_json, replacing
from suture_results.model_export.program import OUTPUT, Run, check, export, input_names
from suture_results.prediction import Model, open_model

_OPSETS = range(18, 24)
"""The versions of ONNX's operators that torch's exporter writes."""


def write_onnx(source: Path, folder: Path, opset: int | None = None) -> Path:
    """Write ``model.onnx`` and return its path.

    Its inputs are those of `Program`, with a first axis of any size; its output is `OUTPUT`. Its metadata
    are the classes, the kind of labels, the preprocessing, the operating points where the model has any,
    and the digest of the weights.

    Args:
        source: the folder of the saved model.
        opset: version of ONNX's operators; None for the exporter's own choice.

    Raises:
        ConfigError: a package is missing, `opset` is none of `_OPSETS` or unknown to onnxruntime, `source`
            holds no model, or one that reads words.
        SutureError: the file gives other probabilities than the model; it is then not written.
        DiskError: it cannot be written.
    """
    runtime = needed("onnxruntime", "ONNX", "onnx")
    needed("onnxscript", "ONNX", "onnx")  # for torch's exporter
    if opset is not None and opset not in _OPSETS:
        raise ConfigError(
            f"opset {opset} cannot be written; torch writes {_OPSETS.start} to {_OPSETS.stop - 1}"
        )
    model = open_model(source)
    with redirect_stdout(StringIO()):  # the exporter reports its steps
        program = torch.onnx.export(
            export(model),
            input_names=list(input_names(model)),
            output_names=[OUTPUT],
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props.update(metadata(model, read_json(source / "model.json")))
    path = folder / "model.onnx"
    with replacing(path) as temporary:
        program.save(str(temporary))
        check(model, _session(runtime, temporary, opset), path.name)
    return path


def metadata(model: Model, facts: dict[str, Any]) -> dict[str, str]:
    """Return what a reader of the file has to know, as text; values that are not text are JSON."""
    found = {key: facts[key] for key in ("preprocessing", "decisions") if facts.get(key)}
    found |= {"modalities": list(model.spec.modalities)} if model.spec.modalities else {}
    return {
        "producer": f"suture {facts.get('suture')}",
        "labels": json.dumps(list(model.labels)),
        "label_type": model.network.labels.label_type,
        "digest": model.digest,
    } | {key: json.dumps(value) for key, value in found.items()}


def _session(runtime: Any, path: Path, opset: int | None) -> Run:
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own errors have no common base
        asked = "" if opset is None else f" (opset {opset}; leave it out, or choose an older one)"
        raise ConfigError(
            f"onnxruntime {runtime.__version__} cannot load the file{asked}: {error}"
        ) from error
    names = [one.name for one in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        values = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run([OUTPUT], values)[0])

    return run
