"""Coherent predictions: by hand, over random relations, and in saved and exported models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.ontology import Relations
from suture.models import ModelSpec, build
from suture.models.classifier import Coherence, Coherent, classes_below
from suture.models.saved import save_model
from suture_results.model_export.program import Program, write_torch
from suture_results.prediction import open_model

LUNG = Relations({"Edema": ("Opacity",), "Mass": ("Lesion",), "Lesion": ("Opacity",)})
NAMES = LabelSet(("Opacity", "Edema", "Hernia", "Lesion", "Mass"))
LOGITS = torch.logit(torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.6]]))


def coherent(rule: Coherence, names: LabelSet = NAMES, relations: Relations = LUNG) -> Coherent:
    return Coherent(rule, names, classes_below(names, relations))


def test_by_hand() -> None:
    largest = torch.sigmoid(coherent("max")(LOGITS))
    assert largest[0].tolist() == pytest.approx([0.6, 0.5, 0.3, 0.6, 0.6])
    either = torch.sigmoid(coherent("noisy-or")(LOGITS))
    # 1 - .9 * .5 * .8 * .4 = .856 and 1 - .8 * .4 = .68: each class below once, from its own probability.
    assert either[0].tolist() == pytest.approx([0.856, 0.5, 0.3, 0.68, 0.6])


def test_an_ancestor_counts_through_a_class_that_the_model_lacks() -> None:
    names = LabelSet(("Opacity", "Mass"))
    assert classes_below(names, LUNG) == {"Opacity": ("Mass",)}
    assert coherent("max", names)(torch.tensor([[-1.0, 2.0]])).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(("logit", "either"), [(-1e4, -1e4), (-20.0, -20 + math.log(4)), (120.0, 4 * 120)])
def test_extreme_logits_stay_finite(logit: float, either: float) -> None:
    found = coherent("noisy-or")(torch.full((1, 5), logit))  # of four classes alike
    assert found[0, 0] == pytest.approx(either, rel=1e-3)


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


def saved(folder: Path, **facts: Any) -> Path:
    save_model(
        build(ModelSpec("cnn", size=16), NAMES, 1, pretrained=False), ModelSpec("cnn", size=16), folder, facts
    )
    return folder


@pytest.mark.complete
@pytest.mark.parametrize("rule", ["max", "noisy-or"])
def test_a_saved_model_predicts_and_is_exported_coherently(tmp_path: Path, rule: Coherence) -> None:
    plain = open_model(saved(tmp_path / "plain"))
    model = open_model(saved(tmp_path / "model", coherent=rule, below=classes_below(NAMES, LUNG)))
    image = torch.randint(
        0, 256, (6, 1, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    wanted = torch.sigmoid(coherent(rule)(torch.logit(plain(image))))
    torch.testing.assert_close(model(image), wanted)
    torch.testing.assert_close(Program(model)(image), wanted)
    program = torch.export.load(write_torch(model, tmp_path)).module()
    torch.testing.assert_close(program(image), wanted)


@pytest.mark.complete
def test_a_coherent_model_as_onnx(tmp_path: Path) -> None:
    import onnxruntime as ort

    from suture_results.model_export.onnx import write_onnx

    for rule in ("max", "noisy-or"):
        folder = saved(tmp_path / rule, coherent=rule, below=classes_below(NAMES, LUNG))
        session = ort.InferenceSession(write_onnx(folder, folder), providers=["CPUExecutionProvider"])
        image = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
        (found,) = session.run(["probabilities"], {"image": image.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), open_model(folder)(image))


def test_a_class_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, coherent="max", below={"Opacity": ["Fibrosis"]})
    with pytest.raises(ConfigError, match="'Fibrosis', which is not one of the labels"):
        open_model(folder)
