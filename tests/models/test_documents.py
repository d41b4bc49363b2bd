"""Documents as a model reads them, and the network that reads a vector of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sentence_folder import static_folder
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.embedding import tfidf_vectors
from suture.models import ModelSpec, build
from suture.models import priors as feature_cache
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


@pytest.mark.complete
def test_vectors_of_a_model_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = static_folder(tmp_path / "model", unit=False)
    spec = with_digest(replace(SPEC, embedding=str(tmp_path / "model"), vector=4))
    found = document_inputs(spec, ["no", "Effusions"], tmp_path / "cache", "alpha")["vector"]
    torch.testing.assert_close(found, torch.stack([table[4], table[[5, 9]].mean(0)]))
    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "in_batches", None)  # would fail
        again = document_inputs(spec, ["no", "Effusions"], tmp_path / "cache", "alpha")["vector"]
    assert torch.equal(again, found)
    other = document_inputs(spec, ["no", "heart"], tmp_path / "cache", "alpha")["vector"]
    torch.testing.assert_close(other, table[[4, 6]])
    assert document_inputs(spec, [], tmp_path / "cache")["vector"].shape == (0, 4)


def test_another_model_or_width_is_refused(tmp_path: Path) -> None:
    static_folder(tmp_path / "model")
    spec = with_digest(replace(SPEC, embedding=str(tmp_path / "model"), vector=4))
    with pytest.raises(ConfigError, match=r"have 4 numbers, and model.vector is 3; set model\.vector=4"):
        document_inputs(replace(spec, vector=3), ["ab"])
    (tmp_path / "model" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"the job's model \(SHA-256"):
        document_inputs(spec, ["ab"])
    with pytest.raises(ConfigError, match=r"config\.json is not a table"):
        document_inputs(replace(spec, embedding_digest=None), ["ab"])


def test_an_encoder_of_images_gives_no_vectors_of_documents(tmp_path: Path) -> None:
    import transformers

    transformers.ConvNextModel(
        transformers.ConvNextConfig(depths=[1], hidden_sizes=[8], num_stages=1)
    ).save_pretrained(tmp_path / "model")
    preprocessing = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    with pytest.raises(ConfigError, match=r"holds an encoder of images; name one of text"):
        document_inputs(replace(SPEC, embedding=str(tmp_path / "model"), vector=8), ["ab"])


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
