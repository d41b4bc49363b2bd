"""A classifier: the rows of its head, settings, coherent probabilities, and documents as it reads them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from safetensors.torch import save_file
from torch import nn

from sentence_folder import static_folder
from small_models import CNN_16, EDEMA_MASS, built_model, saved_model
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.ontology import Relations
from suture.core.validation import parse
from suture.data.embedding import tfidf_vectors
from suture.methods.base import SharingSpec
from suture.models import ModelSpec
from suture.models import priors as feature_cache
from suture.models.classifier import (
    Classifier,
    Coherence,
    Coherent,
    Layout,
    classes_below,
    head_rows,
    make_head,
    name_vectors,
    relabel,
    split_state,
)
from suture.models.documents import document_inputs, with_digest
from suture.models.saved import load_model, save_model
from suture_results.model_export.program import Program, write_torch
from suture_results.prediction import open_model
from world import refused

AB = LabelSet(EDEMA_MASS)
NAMES = ("Hernia", "Pleural Effusion", "Pleural Thickening")


def test_a_class_begins_alike_whatever_the_others_are() -> None:
    one, two = head_rows(AB, 8, seed=3), head_rows(LabelSet(("Nodule", "Mass", "Hernia")), 8, seed=3)
    assert torch.equal(one["head.weight"][1], two["head.weight"][1])
    assert torch.equal(one["head.bias"][1], two["head.bias"][1])
    assert not torch.equal(one["head.weight"][0], one["head.weight"][1])
    assert not torch.equal(one["head.weight"], head_rows(AB, 8, seed=4)["head.weight"])
    assert bool((one["head.weight"].abs() <= 8**-0.5).all())


def test_build_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = built_model()
    assert torch.equal(torch.rand(1), expected)
    two = built_model()
    assert all(torch.equal(t, two.state_dict()[k]) for k, t in one.state_dict().items())


def test_the_rows_of_every_head_are_classes() -> None:
    def layout_of(**settings: Any) -> tuple[Layout, dict[str, torch.Tensor]]:
        model = built_model(ModelSpec("cnn", **settings))
        shared, head = split_state(model.state_dict())
        return Layout.of({name: shared[name] for name in SharingSpec("average").shared(model)}, head), head

    layout, head = layout_of(hidden=4, dropout=0.3)
    assert {name.split(".")[0] for name in layout.shared} == {"backbone", "hidden"}
    assert layout.head == {"head.weight": ((4,), "torch.float32"), "head.bias": ((), "torch.float32")}
    assert layout.shared["hidden.0.weight"] == ((4, 128), "torch.float32")
    layout, head = layout_of(projection=5, second_head=True)
    assert {name: shape for name, (shape, _) in layout.head.items()} == {
        "head.weight": (128,),
        "head.bias": (),
        "second_head.weight": (5,),
        "second_head.bias": (),
    }
    assert not {name for name in layout.shared if "head" in name}
    assert torch.equal(head["second_head.weight"], head_rows(AB, 5, 1, "second_head")["second_head.weight"])
    grown = relabel(head, AB.names, ("Hernia", "Edema", "Mass"), 1)
    assert all(torch.equal(grown[name][1:], rows) for name, rows in head.items())
    assert grown["second_head.weight"].shape == (3, 5)


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


def test_named_rows_are_those_of_every_seed_of_every_head_alone_and_of_classes_that_join() -> None:
    spec = replace(CNN_16, row_init="named")
    one, two = (built_model(spec, NAMES, seed=seed).head for seed in (1, 2))
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.weight, name_vectors(NAMES, 128))
    assert not torch.equal(one.bias, two.bias)
    second, plain = (head_rows(LabelSet(NAMES), 8, 1, "second_head", *init) for init in (("named",), ()))
    assert torch.equal(second["second_head.weight"], plain["second_head.weight"])
    before = {"head.weight": torch.full((2, 16), 7.0)}
    after = relabel(before, NAMES[:2], NAMES, 1, "named")
    assert after.keys() == {"head.weight"}
    assert torch.equal(after["head.weight"][:2], before["head.weight"])
    assert torch.equal(after["head.weight"][2], name_vectors(NAMES[2:], 16)[0])


def test_vectors_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.safetensors"
    vectors = {name.lower(): torch.randn(128) for name in NAMES}
    save_file(vectors, path)
    spec = replace(CNN_16, row_init="named", name_vectors=str(path))
    model = built_model(spec, NAMES, pretrained=True)
    for row, vector in zip(model.head.weight, vectors.values(), strict=True):
        assert torch.allclose(row, F.normalize(vector, dim=0))
    # A site and a saved model get the rows, and neither the file nor its name.
    built_model(replace(spec, name_vectors="/nowhere"), NAMES)
    save_model(model, spec, tmp_path / "m", {})
    assert str(path) not in (tmp_path / "m" / "model.json").read_text()
    assert torch.equal(load_model(tmp_path / "m")[0].head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("vectors", "named"),
    [
        (None, "names.safetensors"),
        ({}, "'Hernia'"),
        ({"Hernia": torch.ones(4)}, "model.neck"),
        ({"Hernia": torch.zeros(128)}, "'Hernia'"),
        ({"Hernia": torch.full((128,), torch.nan)}, "'Hernia'"),
        ({"Hernia": torch.ones(128).to(torch.float8_e5m2)}, "float8"),
        (b"no tensors", "names.safetensors"),
    ],
)
def test_a_faulty_file_of_vectors_is_refused(vectors: object, named: str, tmp_path: Path) -> None:
    path = tmp_path / "names.safetensors"
    if isinstance(vectors, bytes):
        path.write_bytes(vectors)
    elif isinstance(vectors, dict):
        save_file(vectors, path)
    with refused(named, by=ConfigError):
        built_model(replace(CNN_16, row_init="named", name_vectors=str(path)), NAMES, pretrained=True)


def test_gray_images_are_repeated_for_a_backbone_of_colour() -> None:
    prepare = ModelSpec("densenet121", size=32).preprocessing
    out = prepare(torch.full((2, 1, 32, 32), 255, dtype=torch.uint8))
    assert out.shape == (2, 3, 32, 32)
    assert out[0, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, abs=1e-5)
    cnn = ModelSpec("cnn", size=32).preprocessing
    assert cnn(torch.zeros(1, 1, 32, 32, dtype=torch.uint8)).unique().tolist() == [-2.0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "densnet121"}, "'densenet121'"),
        ({"name": "densenet121", "size": 28}, "model.size 28"),
        ({"name": "resnet18", "size": 32}, "33"),
        ({"name": "resnet18", "weights": "package"}, "model.weights"),
        ({"name": "efficientnet_lite0", "weights": "download"}, "model.weights"),
        ({"name": "lstm", "weights": "x.pth"}, "model.weights"),
        ({"dropout": 0.3}, "model.dropout"),
        ({"second_head": True}, "model.second_head"),
        ({"mean": (0.5, 0.5, 0.5)}, "model.mean"),
        ({"name": "densenet121", "std": (0.2,)}, "model.std"),
        ({"name": "lstm", "modalities": ("DX",)}, "model.modalities"),
        ({"name": "lstm", "norm_momentum": 0.1}, "model.norm_momentum"),
        ({"embedding": "folder"}, "model.name=vectors"),
        ({"name": "vectors", "longest": 5}, "model.longest"),
        ({"name_vectors": "x"}, "model.row_init=named"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], named: str) -> None:
    with refused(named, by=ConfigError):
        built_model(ModelSpec(**{"name": "cnn", **settings}))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        *(({"std": (std,)}, "std.0") for std in (0.0, -1.0, math.nan, math.inf)),
        *(
            ({"modalities": (wrong,)}, "modalities.0")
            for wrong in ("dx", "", " DX", "X-RAY", "A" * 17, "DX\n")
        ),
    ],
)
def test_values_that_are_none_are_refused(values: dict[str, Any], named: str) -> None:
    with refused(named, by=ConfigError):
        parse(ModelSpec, values, "model")


def test_no_recurrent_network_computes_in_mixed_precision() -> None:
    parts = (nn.LSTM(2, 2), nn.GRU(2, 2), nn.RNN(2, 2), nn.LSTMCell(2, 2), nn.GRUCell(2, 2), nn.ReLU())
    models = [Classifier(nn.Sequential(nn.Linear(2, 2), part), 2, AB) for part in parts]
    for model in models:
        model.compute_in(torch.bfloat16)
    assert [model.amp_dtype for model in models] == [*[None] * 5, torch.bfloat16]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_precision_ends_with_the_backbone(half: torch.dtype) -> None:
    model = Classifier(nn.Linear(2, 4), 4, AB, hidden=3, neck=5, reads=("x",))
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    inputs = {"x": torch.rand(3, 2)}
    for asked in (half, None):
        model.compute_in(asked)
        assert model(inputs).dtype == model.features(inputs).dtype == torch.float32
        assert seen.pop("backbone") == (asked or torch.float32)
        assert set(seen.values()) == {torch.float32}


LUNG = Relations({"Edema": ("Opacity",), "Mass": ("Lesion",), "Lesion": ("Opacity",)})
TREE = LabelSet(("Opacity", "Edema", "Hernia", "Lesion", "Mass"))


def coherent(rule: Coherence, names: LabelSet = TREE, relations: Relations = LUNG) -> Coherent:
    return Coherent(rule, names, classes_below(names, relations))


def test_coherent_probabilities_by_hand() -> None:
    logits = torch.logit(torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.6]]))
    largest = torch.sigmoid(coherent("max")(logits))
    assert largest[0].tolist() == pytest.approx([0.6, 0.5, 0.3, 0.6, 0.6])
    either = torch.sigmoid(coherent("noisy-or")(logits))
    # 1 - .9 * .5 * .8 * .4 = .856 and 1 - .8 * .4 = .68: each class below once, from its own probability.
    assert either[0].tolist() == pytest.approx([0.856, 0.5, 0.3, 0.68, 0.6])
    # An ancestor counts through a class that the model lacks.
    names = LabelSet(("Opacity", "Mass"))
    assert classes_below(names, LUNG) == {"Opacity": ("Mass",)}
    assert coherent("max", names)(torch.tensor([[-1.0, 2.0]])).tolist() == [[2.0, 2.0]]
    for logit, all_four in ((-1e4, -1e4), (-20.0, -20 + math.log(4)), (120.0, 4 * 120)):  # and stay finite
        found = coherent("noisy-or")(torch.full((1, 5), logit))
        assert found[0, 0] == pytest.approx(all_four, rel=1e-3)


@st.composite
def relations(draw: st.DrawFn) -> Relations:
    """A random DAG over A to F: parents come earlier."""
    names = "ABCDEF"
    return Relations(
        {name: tuple(sorted(draw(st.sets(st.sampled_from(names[:i]))))) for i, name in enumerate(names) if i}
    )


@pytest.mark.complete
@given(relations(), st.permutations("ABCDEF"), st.sampled_from(["max", "noisy-or"]), st.integers(0, 99))
def test_a_class_is_at_least_as_probable_as_each_below_it(
    random: Relations, order: list[str], rule: Coherence, seed: int
) -> None:
    names = LabelSet(tuple(order))
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed)) * 20
    found = coherent(rule, names, random)(logits)
    for child, parents in random.parents.items():
        for parent in parents:
            assert bool((found[:, names.index(parent)] >= found[:, names.index(child)]).all())
    assert bool((found >= logits).all())
    leaves = [names.index(name) for name in names if name not in classes_below(names, random)]
    assert torch.equal(found[:, leaves], logits[:, leaves])


@pytest.mark.complete
@pytest.mark.parametrize("rule", ["max", "noisy-or"])
def test_a_saved_model_predicts_and_is_exported_coherently(rule: Coherence, tmp_path: Path) -> None:
    plain = open_model(saved_model(tmp_path / "plain", CNN_16, TREE.names))
    facts = {"coherent": rule, "below": classes_below(TREE, LUNG)}
    model = open_model(saved_model(tmp_path / "model", CNN_16, TREE.names, **facts))
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (6, 1, 16, 16), generator=generator, dtype=torch.uint8)
    wanted = torch.sigmoid(coherent(rule)(torch.logit(plain(image))))
    program = torch.export.load(write_torch(model, tmp_path)).module()
    for read in (model, Program(model), program):
        torch.testing.assert_close(read(image), wanted)
    lacking = saved_model(
        tmp_path / "lacking", CNN_16, TREE.names, coherent=rule, below={"Opacity": ["Scar"]}
    )
    with refused("'Scar'", by=ConfigError):
        open_model(lacking)


VECTORS = ModelSpec("vectors")


def test_documents_are_words_or_a_vector() -> None:
    texts = ["No effusion.", "Old fracture"]
    words = document_inputs(ModelSpec("lstm", vocabulary=("No", "fracture")), texts)
    assert words["tokens"].tolist() == [[1, 0, 0], [0, 2, 0]]
    assert torch.equal(document_inputs(VECTORS, texts)["vector"], tfidf_vectors(texts, 384))


def test_vectors_of_a_model_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, cache = static_folder(tmp_path / "model", unit=False), tmp_path / "cache"
    spec = with_digest(replace(VECTORS, embedding=str(tmp_path / "model"), vector=4))
    found = document_inputs(spec, ["no", "Effusions"], cache, "alpha")["vector"]
    torch.testing.assert_close(found, torch.stack([table[4], table[[5, 9]].mean(0)]))
    with monkeypatch.context() as patched:
        patched.setattr(feature_cache, "in_batches", None)  # would fail
        again = document_inputs(spec, ["no", "Effusions"], cache, "alpha")["vector"]
    assert torch.equal(again, found)
    other = document_inputs(spec, ["no", "heart"], cache, "alpha")["vector"]
    torch.testing.assert_close(other, table[[4, 6]])
    assert document_inputs(spec, [], cache)["vector"].shape == (0, 4)


def test_another_embedding_or_width_is_refused(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    static_folder(folder)
    spec = with_digest(replace(VECTORS, embedding=str(folder), vector=4))
    with refused("4 numbers", "model.vector=4", by=ConfigError):
        document_inputs(replace(spec, vector=3), ["ab"])
    (folder / "config.json").write_text("[]")
    with refused("SHA-256", by=ConfigError):
        document_inputs(spec, ["ab"])
    with refused("config.json", by=ConfigError):
        document_inputs(replace(spec, embedding_digest=None), ["ab"])
    config = transformers.ConvNextConfig(depths=[1], hidden_sizes=[8], num_stages=1)
    transformers.ConvNextModel(config).save_pretrained(tmp_path / "images")
    preprocessing = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "images" / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    with refused(tmp_path / "images", by=ConfigError):
        document_inputs(replace(VECTORS, embedding=str(tmp_path / "images"), vector=8), ["ab"])
