"""A model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import load_model, save_model


def test_round_trip(tmp_path: Path) -> None:
    spec = ModelSpec("cnn", size=32, hidden=8)
    model = build(spec, LabelSet(("Edema", "Mass")), 1, pretrained=False).eval()
    save_model(model, spec, tmp_path / "m", {"round": 3})
    again, prepare = load_model(tmp_path / "m")
    assert again.labels.names == ("Edema", "Mass")
    assert prepare == spec.preprocessing
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model({"image": x}), again({"image": x}))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert len(modes) == 1  # whoever may read the description may read the weights


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.json"):
        load_model(tmp_path)
    spec = ModelSpec("cnn", size=32)
    save_model(build(spec, LabelSet(("Edema",)), 1, pretrained=False), spec, tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_model(tmp_path)
