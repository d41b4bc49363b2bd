"""What computes beside a method's steps runs on a device, too, and a compiled backbone computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_site import LABELS, images_of, samples_of, small_site
from torch import Tensor

from simulated_device import NAME, WAITS, Simulated, live_bytes
from suture.core.errors import ConfigError
from suture.data.batch import MILD, Samples
from suture.federation.site import trainer as compiling
from suture.federation.site.trainer import compile_backbone
from suture.learning import training
from suture.learning.steps import masked_bce
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    SiteContext,
    fit,
    on_known,
    predict,
)
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from suture.models.encoders import TextLSTM
from suture_papers.fedmas.pretraining import Pretraining, Trainer
from suture_results.finetuning import FineTuning, finetune
from suture_results.model_export.explanation import explain
from suture_results.prediction import Model
from world import refused

SPEC = ModelSpec("cnn", size=32)
LOSS = on_known(masked_bce)


def site(device: str, spec: ModelSpec = SPEC) -> SiteContext:
    made = small_site(20, spec, batch_size=8)
    made.model.to(device)
    return replace(made, device=torch.device(device))


def saved(device: str) -> Model:
    return Model(site(device).model.eval(), SPEC, SPEC.preprocessing, device)


@pytest.mark.parametrize(("kept", "waits"), [(2**20, 1), (1, 3), (16, 3), (17, 2), (33, 1)])
def test_predicting_waits_once_for_all_logits_that_its_memory_bears(
    kept: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 images of two classes in batches of 8: 16, 16 and 8 logits."""
    monkeypatch.setattr(training, "_LOGITS", kept)
    with Simulated():
        there = site(NAME)
        predict(there, samples_of(1, 32))  # copies the constants of the normalisation
        WAITS.clear()
        found = predict(there, samples_of(20, 32))
        assert WAITS.total() == waits
        assert torch.equal(found, predict(site("cpu"), samples_of(20, 32)))


@pytest.mark.complete
def test_a_saved_model_predicts_and_says_where_it_looks() -> None:
    images = images_of(3, 32)
    with Simulated():
        there, here = saved(NAME), saved("cpu")
        assert torch.equal(there(images), here(images))
        one, two = (explain(model, images[0, 0].numpy()) for model in (there, here))
    assert one.probabilities == two.probabilities
    for name in LABELS:
        assert (one.maps[name] == two.maps[name]).all()


@pytest.mark.parametrize(("width", "waits"), [(None, 1), (6, 0)])
def test_a_model_of_text_waits_only_for_the_longest_of_a_batch(
    width: int | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but its LSTM, for which torch takes a kernel that GPUs alone have."""
    monkeypatch.setattr(TextLSTM, "_read", lambda *given: given[1])
    network, tokens, length = TextLSTM(9, width=width), torch.arange(8).view(2, 4), torch.tensor([4, 2])
    here = network(tokens, length)
    with Simulated():
        network.to(NAME)
        inputs = tokens.to(NAME), length.to(NAME)
        WAITS.clear()
        there = network(*inputs)
        assert WAITS.total() == waits
        assert torch.equal(there.cpu(), here)


def test_fine_tuning_runs_there() -> None:
    how = FineTuning(runs=1, epochs=1, batch_size=4, test=0.3, start="fresh")
    data = samples_of(30, 32)
    one = Samples(data.inputs, data.y[:, :1], data.patients)
    with Simulated():
        there, here = (next(finetune("Mass", SPEC, {}, one, how, 1, device))[1] for device in (NAME, "cpu"))
    assert (there.train, there.test, len(there.auroc)) == (here.train, here.test, 1)


@pytest.mark.parametrize("color", [False, True])
def test_a_step_of_pretraining_waits_for_nothing(color: bool) -> None:
    spec = Pretraining(size=32, color=color, batch_size=8, queue=16)
    with Simulated():
        trainer = Trainer(images_of(16, 32, 3 if color else 1), spec, 1, NAME)
        WAITS.clear()
        loss = trainer.step(torch.arange(8))
        assert not WAITS
        assert loss.device.type == NAME


@pytest.mark.complete
def test_between_rounds_a_site_holds_its_model_alone() -> None:
    """With the gradients of its last step it would hold twice as much."""
    with Simulated():
        before = live_bytes()
        there = site(NAME)
        model = live_bytes() - before
        local = LocalTraining(batch_size=8, epochs=1)
        fit(there, LOSS, LocalRound(local, "average", 1, 1))
        assert model <= live_bytes() - before <= 1.01 * model


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
