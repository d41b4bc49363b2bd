"""A compiled backbone is used where it computes the same, and refused where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_site import small_site
from torch import Tensor

from suture.core.errors import ConfigError
from suture.data.batch import MILD
from suture.federation.site import diagnostics as compiling
from suture.federation.site.diagnostics import compile_backbone
from suture.learning.losses import masked_bce
from suture.learning.training import SiteContext, on_known
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from world import refused


def context() -> SiteContext:
    return small_site(spec=ModelSpec("cnn", size=16, hidden=6, dropout=0.5), view=MILD)


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
def test_what_computes_something_else_or_cannot_be_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler\nof C++")

    compiled_by(off_by(1 + 1e-5), monkeypatch, context())
    for backend in (off_by(1.05), off_by(float("nan")), broken):
        with pytest.raises(ConfigError, match=r"^a: [^\n]*\[training\][^\n]*$"):
            compiled_by(backend, monkeypatch, context())
    mixed = context()  # mixed precision has a wider tolerance
    mixed.model.compute_in(torch.bfloat16)
    compiled_by(off_by(1.01), monkeypatch, mixed)


@pytest.mark.complete
def test_graphs_that_a_thread_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch fails without a word in any thread but the first, and FLARE computes in another."""

    def measured(site: SiteContext, model: Classifier, *_: Any) -> tuple[Tensor, Tensor]:
        assert model.backbone._compiled_call_impl is None  # fails as torch does
        return torch.ones(()), torch.ones(3)

    with refused('compile = "cuda_graphs"', by=ConfigError):  # they need a GPU
        compile_backbone(context(), on_known(masked_bce), "cuda_graphs")
    monkeypatch.setattr(compiling, "_measure", measured)
    monkeypatch.setattr(compiling, "ready_inputs", lambda _, batch: batch)
    site = replace(context(), device=torch.device("cuda"))
    with refused("AssertionError", 'compile = "kernels"', by=ConfigError):
        compile_backbone(site, on_known(masked_bce), "cuda_graphs")
