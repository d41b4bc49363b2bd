"""The head of a classifier: what its logits are made of, and where its rows begin."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.classifier import head_rows, make_head, name_vectors, relabel
from suture.models.saved import load_model, save_model

NAMES = ("Hernia", "Pleural Effusion", "Pleural Thickening")
LABELS = LabelSet(NAMES)


def test_anchors_are_of_length_1_where_an_image_has_one_label() -> None:
    """f = (1, 2), e = (3, 4), (1, 0): 11 and 1; of length 1: 11 / 5 = 2.2, and 1."""
    f, e = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = []
    for label_type in ("multilabel", "multiclass"):
        head = make_head("anchors", 2, LabelSet(("A", "B"), label_type))
        assert head.bias is None
        head.load_state_dict({"weight": e})
        found.append(head(f).tolist()[0])
    assert found[0] == [11.0, 1.0]
    assert found[1] == pytest.approx([2.2, 1.0], abs=1e-6)


def test_names_of_the_same_words_are_close() -> None:
    """A third of the runs of "Pleural Effusion" are in "Pleural Thickening"; none is in "Hernia"."""
    hernia, effusion, thickening = name_vectors(NAMES, 4096)
    assert torch.allclose(torch.stack([hernia, effusion, thickening]).norm(dim=1), torch.ones(3))
    grams = [
        {t[i : i + n] for n in (3, 4, 5) for i in range(len(t) - n + 1)}
        for t in (" pleural effusion ", " pleural thickening ")
    ]
    shared = len(grams[0] & grams[1]) / (len(grams[0]) * len(grams[1])) ** 0.5
    assert float(effusion @ thickening) == pytest.approx(shared, abs=0.05)
    assert abs(float(effusion @ hernia)) < 0.05


def test_a_vector_depends_on_its_name_alone() -> None:
    """ " ab " has the runs " ab", "ab " and itself; a bit of SHAKE-256 is +1 or -1, the highest bit first."""
    rows = [hashlib.shake_256(gram).digest(1)[0] for gram in (b" ab", b"ab ", b" ab ")]
    sums = [sum(1 if byte >> (7 - bit) & 1 else -1 for byte in rows) for bit in range(8)]
    length = sum(x * x for x in sums) ** 0.5
    assert name_vectors(("Ab",), 8)[0].tolist() == pytest.approx([x / length for x in sums], abs=1e-6)
    assert torch.equal(name_vectors(("Nodule", "AB"), 8)[1], name_vectors(("ab",), 8)[0])


def test_named_rows_are_those_of_every_seed_and_of_every_head_alone() -> None:
    spec = ModelSpec("cnn", size=16, head="linear", row_init="named")
    one, two = (build(spec, LABELS, seed, pretrained=False).head for seed in (1, 2))
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.weight, name_vectors(NAMES, 128))
    assert not torch.equal(one.bias, two.bias)
    second = head_rows(LABELS, 8, 1, "second_head", "named")
    assert torch.equal(
        second["second_head.weight"], head_rows(LABELS, 8, 1, "second_head")["second_head.weight"]
    )


def test_a_class_that_joins_begins_at_its_name() -> None:
    before = {"head.weight": torch.full((2, 16), 7.0)}
    after = relabel(before, NAMES[:2], NAMES, 1, "named")
    assert after.keys() == {"head.weight"}
    assert torch.equal(after["head.weight"][:2], before["head.weight"])
    assert torch.equal(after["head.weight"][2], name_vectors(NAMES[2:], 16)[0])


def test_vectors_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.safetensors"
    vectors = {name.lower(): torch.randn(128) for name in NAMES}
    save_file(vectors, path)
    spec = ModelSpec("cnn", size=16, row_init="named", name_vectors=str(path))
    head = build(spec, LABELS, 1, pretrained=True).head
    for row, vector in zip(head.weight, vectors.values(), strict=True):
        assert torch.allclose(row, F.normalize(vector, dim=0))
    # A site and a saved model get the rows, and neither the file nor its name.
    elsewhere = ModelSpec("cnn", size=16, row_init="named", name_vectors="/nowhere")
    build(elsewhere, LABELS, 1, pretrained=False)
    model = build(spec, LABELS, 1, pretrained=True)
    save_model(model, spec, tmp_path / "m", {})
    assert str(path) not in (tmp_path / "m" / "model.json").read_text()
    assert torch.equal(load_model(tmp_path / "m")[0].head.weight, head.weight)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (None, "does not exist"),
        ({}, "no vector for the class 'Hernia'"),
        ({"Hernia": torch.ones(4)}, r"shape \(4,\).*has 128 numbers; set model\.neck"),
        ({"Hernia": torch.zeros(128)}, "'Hernia' .* is 0 or not finite"),
        ({"Hernia": torch.full((128,), torch.nan)}, "not finite"),
        ({"Hernia": torch.ones(128).to(torch.float8_e5m2)}, "Hernia .*float8"),
        (b"no tensors", "cannot be read as safetensors"),
    ],
)
def test_a_faulty_file_of_vectors(tmp_path: Path, vectors: object, message: str) -> None:
    path = tmp_path / "names.safetensors"
    if isinstance(vectors, bytes):
        path.write_bytes(vectors)
    elif isinstance(vectors, dict):
        save_file(vectors, path)
    spec = ModelSpec("cnn", size=16, row_init="named", name_vectors=str(path))
    with pytest.raises(ConfigError, match=message):
        build(spec, LABELS, 1, pretrained=True)


def test_vectors_without_named_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set model\.row_init=named"):
        build(ModelSpec("cnn", size=16, name_vectors="x"), LABELS, 1, pretrained=False)
