"""A compiled backbone is used where it computes the same, and refused where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import MILD, Samples
from suture.federation.site import diagnostics as compiling
from suture.federation.site.diagnostics import compile_backbone
from suture.learning.losses import masked_bce
from suture.learning.training import SiteContext, on_known
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier

SPEC = ModelSpec("cnn", size=16, hidden=6, dropout=0.5)


def context() -> SiteContext:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (9, 1, 16, 16), generator=g, dtype=torch.uint8)
    samples = Samples({"image": pixels}, torch.randint(0, 2, (9, 2), generator=g).float(), tuple("abcdefghi"))
    model = build(SPEC, LabelSet(("Edema", "Mass")), 1, pretrained=False)
    return SiteContext("alpha", model, {"train": samples}, SPEC.preprocessing, MILD, torch.device("cpu"))


def off_by(factor: float) -> Callable[..., Any]:
    """A compiler whose code is wrong by a factor."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(out * factor for out in graph(*args))

    return backend


def compiled_by(backend: Any, monkeypatch: pytest.MonkeyPatch, site: SiteContext) -> SiteContext:
    monkeypatch.setattr(compiling, "OPTIONS", {"kernels": {"backend": backend}})
    compile_backbone(site, on_known(masked_bce), "kernels")
    return site


@pytest.mark.complete
def test_what_computes_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    site, runs = context(), []
    before = {name: t.clone() for name, t in site.model.state_dict().items()}

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: runs.append(1) or graph(*args)

    compiled_by(counting, monkeypatch, site)
    assert site.model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in site.model.state_dict().items())
    assert all(p.grad is None for p in site.model.parameters())
    runs.clear()
    site.model({"image": torch.zeros(9, 1, 16, 16)})
    assert runs == [1]


@pytest.mark.complete
@pytest.mark.parametrize(("factor", "refused"), [(1 + 1e-5, False), (1.05, True), (float("nan"), True)])
def test_what_computes_something_else_is_refused(
    factor: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not refused:
        compiled_by(off_by(factor), monkeypatch, context())
        return
    with pytest.raises(ConfigError, match=r"alpha: .*compiled.* by .* more than 0.001; write"):
        compiled_by(off_by(factor), monkeypatch, context())


@pytest.mark.complete
def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler\nof C++")

    with pytest.raises(
        ConfigError, match=r'alpha: the backbone cannot be compiled here .*write compile = "no"'
    ) as e:
        compiled_by(broken, monkeypatch, context())
    assert "\n" not in str(e.value)


@pytest.mark.complete
def test_graphs_that_a_thread_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch fails without a word in any thread but the first, and FLARE computes in another."""

    def measured(site: SiteContext, model: Classifier, *_: Any) -> tuple[Tensor, Tensor]:
        assert model.backbone._compiled_call_impl is None  # fails as torch does
        return torch.ones(()), torch.ones(3)

    monkeypatch.setattr(compiling, "_measure", measured)
    monkeypatch.setattr(compiling, "ready_inputs", lambda _, batch: batch)
    site = replace(context(), device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"compiled here \(AssertionError.*") as refused:
        compile_backbone(site, on_known(masked_bce), "cuda_graphs")
    assert 'write compile = "kernels" or compile = "no" under [training]' in str(refused.value)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match='compile = "cuda_graphs" needs a GPU'):
        compile_backbone(context(), on_known(masked_bce), "cuda_graphs")


@pytest.mark.complete
def test_mixed_precision_has_a_wider_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = context()
    mixed.model.compute_in(torch.bfloat16)
    compiled_by(off_by(1.01), monkeypatch, mixed)
