"""Ark: server and loss by hand, a site's own rows, and what predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from federated import LOCAL, ROUND, at_site, moved, random_batch, same
from rounds import conformant
from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.learning.training import Fitted, SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext, with_channels
from suture.models.classifier import frozen_copy
from suture.protocol.egress import add_prefix, strip_prefix
from suture.protocol.messages import Update, ones
from suture_papers.ark import ark
from suture_papers.ark.ark import LAG, ROWS, Ark, own_rows
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

CTX = RoundContext(1, Phase("main", 3), 7)
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


def sent(labels: tuple[str, ...], w: float, *rows: float) -> Update:
    head = {"head.weight": torch.tensor([[row] for row in rows]), "head.bias": torch.tensor(rows)}
    return Update(1, labels, {"w": torch.tensor([w])}, head, ones(labels))


def predicted(model: GlobalModel) -> dict[str, list[float]]:
    found = Ark().predictor({**model.shared, **model.head}, model.channels)
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


def test_the_server_by_hand() -> None:
    """w = 1 becomes (3 + 5) / 2 = 4 and then 6; w^T = .9 + .4 = 1.3 and then 1.17 + .6 = 1.77.

    The row of B, 2 of both sites at first, becomes (4 + 8) / 2 = 6 and stays: psi^T = 2.4 and then 2.76.
    """
    head = {"head.weight": torch.tensor([[1.0], [2.0], [3.0]]), "head.bias": torch.tensor([1.0, 2.0, 3.0])}
    model = with_channels(GlobalModel(("A", "B", "C"), {"w": torch.ones(1)}, head), Ark())
    begun = {"w": [1.0], "head.weight": [1.0, 2.0, 3.0], "head.bias": [1.0, 2.0, 3.0]}
    assert predicted(model) == begun
    model = Ark().aggregate(model, [sent(("A", "B"), 3.0, 1.0, 4.0), sent(("B",), 5.0, 8.0)], CTX)
    assert (model.shared["w"].item(), model.head["head.bias"].tolist()) == (4.0, [1.0, 6.0, 3.0])
    assert predicted(model)["w"] == pytest.approx([1.3])
    assert predicted(model)["head.weight"] == pytest.approx([1.0, 2.4, 3.0])
    model = Ark().aggregate(model, [sent(("B",), 6.0, 6.0)], CTX)
    assert predicted(model)["w"] == pytest.approx([1.77])
    assert predicted(model)["head.bias"] == pytest.approx([1.0, 2.76, 3.0])


def test_the_merged_row_has_the_mean_of_the_logits_of_the_sites() -> None:
    """Of class B, which both annotate: at x = 3 their logits are 4 * 3 + 4 = 16 and 8 * 3 + 8 = 32."""
    head = {"head.weight": torch.ones(2, 1), "head.bias": torch.ones(2)}
    model = with_channels(GlobalModel(("A", "B"), {"w": torch.ones(1)}, head), Ark())
    model = Ark().aggregate(model, [sent(("A", "B"), 3.0, 1.0, 4.0), sent(("B",), 5.0, 8.0)], CTX)
    assert model.head["head.weight"][1].item() * 3 + model.head["head.bias"][1].item() == 24.0


def test_a_site_goes_on_from_the_rows_that_it_kept() -> None:
    """Of a class of which it kept none, from the received one."""
    received = {"head.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "head.bias": torch.tensor([5.0, 6.0])}
    kept = {"head.weight": torch.tensor([[0.0, 0.0], [0.0, 9.0]]), "head.bias": torch.tensor([0.0, 0.0])}
    found = {name: rows.tolist() for name, rows in own_rows(received, kept).items()}
    assert found == {"head.weight": [[1.0, 2.0], [0.0, 9.0]], "head.bias": [5.0, 0.0]}


@BOTH
def test_the_loss_is_the_cross_entropy_and_the_distance_to_the_teacher(label_type: LabelType) -> None:
    """The distance image by image and number by number."""
    site, task = at_site(Ark(local=LOCAL), label_type)
    batch = random_batch(7, len(task.labels), label_type)
    teacher = frozen_copy(site.model)
    moved(site.model)
    site.model.eval()
    z, target = (model.features(batch.inputs).tolist() for model in (site.model, teacher))
    assert len(z[0]) == 256  # behind the projector
    numbers = [
        (a - b) ** 2 for of_z, of_t in zip(z, target, strict=True) for a, b in zip(of_z, of_t, strict=True)
    ]
    known = Ark().loss(site.model(batch.inputs), batch.y, batch.known, label_type).item()
    found = Ark(consistency=0.3).objective(site.model, batch, teacher)
    assert found.item() == pytest.approx(known + 0.3 * sum(numbers) / (7 * 256), abs=1e-12)
    found.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in teacher.parameters())


def test_a_site_starts_from_the_student_and_compares_with_the_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The student's tensors are as received, the rows its own; the teacher is the student plus the lag."""
    site, task = at_site(Ark(local=LOCAL))
    site.model.float()
    lag = {name: torch.full_like(t, 0.5) for name, t in {**task.shared, **task.head}.items()}
    begun: dict[str, Any] = {}

    def record(self: Ark, model: Any, batch: Batch, reference: Any) -> Tensor:
        begun.update(model=model.state_dict(), teacher=reference.state_dict(), training=reference.training)
        return torch.zeros(())

    def one_step(context: SiteContext, objective: Any, _: Any) -> Fitted:
        objective(context.model, random_batch(2, len(task.labels), "multilabel"))
        return Fitted(0.0, {}, 1)

    monkeypatch.setattr(Ark, "objective", record)
    monkeypatch.setattr(ark, "fit", one_step)
    received = replace(task, channels=add_prefix(LAG, lag))
    kept = add_prefix(ROWS, {name: torch.full_like(t, 7.0) for name, t in task.head.items()})
    update, state = Ark().train(site, received, replace(ROUND, kept=kept))
    assert not begun["training"]
    for name, tensor in task.shared.items():
        assert torch.equal(begun["model"][name], tensor)
        assert torch.equal(begun["teacher"][name], tensor + 0.5)
    for name, rows in task.head.items():
        assert bool((begun["model"][name] == 7.0).all())
        assert torch.equal(begun["teacher"][name], rows + 0.5)
    own = strip_prefix(ROWS, state)
    assert own.keys() == update.head.keys()
    assert all(torch.equal(own[name], rows) for name, rows in update.head.items())


@pytest.mark.complete
def test_the_teacher_predicts_and_the_student_trains() -> None:
    method = conformant("ark")
    with Trial(method, SMALL, "multilabel", rounds=1) as federation:
        start = federation.payload("alpha")
        federation.run()
        student, chosen = federation.server.model, federation.server.select_model()
        for name, tensor in chosen.shared.items():
            expected = 0.9 * start.shared[name] + 0.1 * student.shared[name]
            assert torch.allclose(tensor, expected, atol=1e-6), name
        assert not same(student, chosen)
