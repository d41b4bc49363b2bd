"""Documents as a model reads them, and the network that reads a vector of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embedding_model import embedding
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.embedding import tfidf_vectors
from suture.models import ModelSpec, build
from suture.models.documents import document_inputs, with_digest

SPEC = ModelSpec("vectors")


def test_the_network_of_the_paper() -> None:
    """384 x 512 + 512 and 512 x 256 + 256 are 328,448 parameters; a class has 257."""
    sizes = []
    for names in (("A",), ("A", "B")):
        model = build(SPEC, LabelSet(names), 1, pretrained=False)
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[0] == 328_448 + 257
    assert sizes[1] - sizes[0] == 257
    assert model({"vector": torch.randn(3, 384)}).shape == (3, 2)
    kinds = [type(layer).__name__ for layer in model.backbone]  # type: ignore[union-attr]
    assert kinds == ["Linear", "ReLU", "Dropout"] * 2
    assert model.backbone.dropout1.p == 0.2  # type: ignore[union-attr]


def test_words_or_a_vector() -> None:
    texts = ["No effusion.", "Old fracture"]
    words = document_inputs(ModelSpec("lstm", vocabulary=("No", "fracture")), texts)
    assert words["tokens"].tolist() == [[1, 0, 0], [0, 2, 0]]
    assert torch.equal(document_inputs(SPEC, texts)["vector"], tfidf_vectors(texts, 384))


def test_vectors_of_a_model_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = embedding(tmp_path / "model", monkeypatch)
    spec = with_digest(replace(SPEC, embedding=str(tmp_path / "model"), vector=2))
    for _ in range(2):
        found = document_inputs(spec, ["ab", "abc"], tmp_path / "cache", "alpha")["vector"]
        assert found.tolist() == [[2.0, 1.0], [3.0, 1.0]]
    assert calls == [2]
    document_inputs(spec, ["ab", "other"], tmp_path / "cache", "alpha")
    assert calls == [2, 2]
    assert document_inputs(spec, [], tmp_path / "cache")["vector"].shape == (0, 2)


def test_another_model_or_width_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding(tmp_path / "model", monkeypatch)
    spec = with_digest(replace(SPEC, embedding=str(tmp_path / "model"), vector=2))
    with pytest.raises(ConfigError, match=r"have 2 numbers, and model.vector is 3; set model\.vector=2"):
        document_inputs(replace(spec, vector=3), ["ab"])
    (tmp_path / "model" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"the job's model \(SHA-256"):
        document_inputs(spec, ["ab"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("cnn", embedding="folder"), "not for cnn; set model.name=vectors"),
        (ModelSpec("vectors", longest=5), "reads whole documents"),
    ],
)
def test_settings_that_would_do_nothing(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(spec, LabelSet(("A",)), 1, pretrained=False)
