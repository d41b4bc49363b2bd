"""FedAlign: names as anchors, two steps a batch, pseudo-labels, and F1 of each class both ways."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rounds import begun, precise, train_round
from small_hospitals import EVERY
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.data.batch import Samples
from suture.federation.server.global_model import initial, with_labels
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.models import ModelSpec
from suture.models.classifier import name_vectors
from suture.protocol.messages import Update
from suture_papers.missing_labels.fedalign import (
    F1,
    MEASURED,
    RELIABLE,
    FedAlign,
    Matching,
    class_shares,
    matching_loss,
    validation_f1,
)

CTX = RoundContext(1, Phase("main", 2), 0)
LOCAL = LocalTraining(lr=1e-2, epochs=2, batch_size=4)
NAN = float("nan")


# By hand


def test_the_loss_by_hand() -> None:
    """N+ = 3, N- = 1: v = 2/6 for y = 1, 4/6 for y = 0; at z = 0 an entry is v ln 2, an unknown one 0."""
    y = torch.tensor([[1.0], [1.0], [1.0], [0.0], [NAN]])
    positive, negative = class_shares(y)
    assert positive.tolist() == pytest.approx([1 / 3], abs=1e-6)
    assert negative.tolist() == pytest.approx([2 / 3], abs=1e-6)
    batch, known = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[True], [True], [False]])
    loss = matching_loss(y, "multilabel")(torch.zeros(3, 1), batch, known)
    assert float(loss) == pytest.approx((1 / 3 + 2 / 3) * 0.693147 / 3, abs=1e-6)


def test_the_loss_of_one_label_an_image_by_hand() -> None:
    """z = (2, 1, 3, 0), class 0, of which the site annotates 0 and 1: ln(sum e^z) - 2 = 1.440190.

    The softmax is over all classes, and the mean over all images, whose labels are unknown or not.
    """
    z, y = torch.tensor([[2.0, 1, 3, 0]] * 2), torch.tensor([[1.0, 0, NAN, NAN], [0.0, 0, NAN, NAN]])
    loss = matching_loss(y, "multiclass")
    assert float(loss(z[:1], y[:1], ~y[:1].isnan())) == pytest.approx(1.440190, abs=1e-6)
    assert float(loss(z, y.nan_to_num(7), ~y.isnan())) == pytest.approx(1.440190 / 2, abs=1e-6)


def test_pseudo_labels_by_hand() -> None:
    """Of z = 3, .4, -1 and a threshold of .5: .4 is a probability of .599, and a similarity below .5."""
    z, y = torch.tensor([[3.0], [0.4], [-1.0]]), torch.full((3, 1), NAN)
    foreign, sure, unsure = torch.tensor([True]), torch.tensor([0.8]), torch.tensor([0.75])

    def made(f1: Tensor = sure, **how: Any) -> list[float]:
        found = Matching(**{"rank": 0.5, **how}).labels(z, y, foreign, f1, "multilabel")
        return found.nan_to_num(-1).squeeze(1).tolist()

    assert made() == [1, -1, 0]
    assert made(compare="similarity") == [1, -1, 0]  # below min(.5, median .4) is -1 alone
    assert made(compare="similarity", rank=1.0) == [-1, 0, 0]
    assert made(rank=1.0) == [-1, -1, 0]  # no image is above the largest
    assert made(unsure) == [-1, -1, 0]  # an F1 of .75 is not above .75


def test_pseudo_labels_of_unlabelled_images_by_hand() -> None:
    """Class 1 is foreign; the last image is labelled with class 0: it gets none, and counts for the rank.

    Of s = .4, .3, .2, .1 and .9 the median is .3, and the first image alone is above; of the first four it
    would be .25. No F1 is waited for.
    """
    s = torch.tensor([[0.0, 0.4], [0.1, 0.3], [0.5, 0.2], [0.6, 0.1], [0.8, 0.9]])
    y = torch.tensor([[0.0, NAN]] * 4 + [[1.0, NAN]])
    foreign, f1 = torch.tensor([False, True]), torch.zeros(2)
    found = Matching(nearest=0.5).labels(s, y, foreign, f1, "multiclass")
    assert found[:, 1].nan_to_num(-1).tolist() == [1, -1, -1, -1, -1]
    assert torch.equal(found[:, 0], y[:, 0])
    found = Matching(nearest=0.25).labels(s, y, foreign, f1, "multiclass")
    assert found[:, 1].nan_to_num(-1).tolist() == [1, 1, -1, -1, -1]  # of the third, class 0 is more similar


def test_one_label_an_image_is_matched_by_cosines(tiny: Any) -> None:
    """Two images of the same direction, one with features of ten times the length, are equally near."""
    context, task = begun(tiny, FedAlign(local=LOCAL))
    train = context.samples["train"]
    y = torch.zeros(len(train), 4).masked_fill(train.y.isnan(), NAN)
    seen: list[Tensor] = []

    class Watching(Matching):
        def labels(self, z: Tensor, y: Tensor, *_: Any) -> Tensor:
            seen.append(z)
            return y

    context.model.labels = LabelSet(EVERY, "multiclass")
    one = replace(context, samples={"train": replace(train, y=y)})
    FedAlign(local=LOCAL, matching=Watching())._with_pseudo_labels(one, task)
    with torch.no_grad():
        f = context.model.features({"image": context.prepare(train.inputs["image"])})
    expected = torch.nn.functional.cosine_similarity(f[:, None], context.model.head.weight[None], dim=2)
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert seen[0].abs().max() <= 1 + 1e-6


def test_anchors_by_owners_and_f1_by_who_measured_it() -> None:
    """Row B: its owners send 4 and 6, mean 5; the third site's 100 earns nothing. F1 of A: (.2 + .8) / 2."""
    before = GlobalModel(
        ("A", "B", "C"),
        {"w": torch.zeros(1)},
        {"head.weight": torch.tensor([[1.0], [2.0], [3.0]])},
        channels={F1: torch.tensor([0.0, 0.4, 0.9])},
    )

    def sent(w: float, rows: list[float], own: list[float], f1: list[float], measured: list[float]) -> Update:
        tensors = {F1: torch.tensor(f1), MEASURED: torch.tensor(measured)}
        head = {"head.weight": torch.tensor(rows)[:, None]}
        weights = torch.tensor(own).double()
        return Update(1, before.labels, {"w": torch.tensor([w])}, head, weights, channels=tensors)

    updates = [
        sent(1.0, [10, 4, 50], [1, 1, 0], [0.2, 0.9, 0.0], [1, 0, 0]),
        sent(2.0, [20, 6, 50], [1, 1, 0], [0.8, 0.6, 0.0], [1, 1, 0]),
        sent(6.0, [60, 100, 50], [0, 0, 0], [1.0, 1.0, 1.0], [0, 0, 0]),
    ]
    after = FedAlign().aggregate(before, updates, CTX)
    assert after.shared["w"].tolist() == [3.0]
    assert after.head["head.weight"].squeeze(1).tolist() == [15.0, 5.0, 3.0]
    assert after.channels[F1].tolist() == pytest.approx([0.5, 0.6, 0.9])
    # A site that claims to have measured more often counts as much as the others.
    claimed = {F1: torch.tensor([1.0, 0, 0]), MEASURED: torch.tensor([99.0, 0, 0])}
    loud = replace(updates[0], channels=claimed)
    assert FedAlign().aggregate(before, [loud, updates[1]], CTX).channels[F1][0] == pytest.approx(0.9)


# A literal, slow transcription, in double precision


def slow_pseudo_labels(how: Matching, z: Any, y: Any, foreign: Any, f1: Any, several: bool) -> Any:
    """As the equations say, image by image and class by class."""
    n, m = z.shape
    out = y.copy()
    unlabelled = [i for i in range(n) if several or not any(y[i, c] == 1 for c in range(m))]
    for c in range(m):
        if not foreign[c]:
            continue
        sigmoid = several and how.compare == "probability"
        column = [1 / (1 + np.exp(-z[i, c])) if sigmoid else z[i, c] for i in range(n)]
        for i in unlabelled:
            s = column[i]
            if several:
                cut = np.quantile(column, how.rank)
                if s > max(how.threshold, cut) and f1[c] > RELIABLE:
                    out[i, c] = 1.0
                elif s < min(how.threshold, cut):
                    out[i, c] = 0.0
            elif all(s > z[i, d] for d in range(m) if d != c) and s > np.quantile(column, how.nearest):
                out[i, c] = 1.0
    return out


def slow_loss(z: Any, y: Any, every: Any, several: bool) -> float:
    """L of a batch, NaN where unknown; `every` are the labels of all images."""
    n, m = z.shape
    total = 0.0
    for i in range(n):
        if several:
            for c in range(m):
                plus = 1 + sum(v == 1 for v in every[:, c])
                minus = 1 + sum(v == 0 for v in every[:, c])
                p = 1 / (1 + np.exp(-z[i, c]))
                if y[i, c] == 1:
                    total += minus / (plus + minus) * -np.log(p)
                elif y[i, c] == 0:
                    total += plus / (plus + minus) * -np.log(1 - p)
        else:
            whole = sum(np.exp(z[i, c]) for c in range(m))
            total += sum(-np.log(np.exp(z[i, c]) / whole) for c in range(m) if y[i, c] == 1)
    return total / (n * m) if several else total / n


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
@pytest.mark.parametrize("seed", range(4))
def test_the_equations_transcribed(label_type: Any, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    several, n, m = label_type == "multilabel", 23, 4
    z = 3 * torch.randn(n, m, generator=g, dtype=torch.float64)
    y = torch.randint(0, 2, (n, m), generator=g).double()
    if not several:
        y = torch.eye(m, dtype=torch.float64)[torch.randint(0, m, (n,), generator=g)]
    foreign = torch.tensor([True, False, True, False])
    y[:, foreign] = NAN
    y[::5, 1] = NAN
    f1 = torch.tensor([0.9, 0.9, 0.1 if seed % 2 else 0.9, 0.9])
    for compare, rank in product(("probability", "similarity"), (0.5, 0.8)):
        how = Matching(compare=compare, rank=rank, nearest=rank)
        fast = how.labels(z, y, foreign, f1, label_type)
        slow = slow_pseudo_labels(how, z.numpy(), y.numpy(), foreign.numpy(), f1.numpy(), several)
        assert torch.equal(fast.nan_to_num(-1), torch.from_numpy(slow).nan_to_num(-1))
        assert fast[:, foreign].isfinite().any()
        loss = matching_loss(fast, label_type)(z, fast.nan_to_num(0), ~fast.isnan())
        assert float(loss) == pytest.approx(slow_loss(z.numpy(), slow, slow, several), abs=1e-10)


@pytest.mark.parametrize("rate", [1.0, 5.0])
def test_two_optimisers_transcribed(tiny: Any, rate: float) -> None:
    """A round of two Adams, each over one half of the model, with the other half taken out of the graph."""
    method = FedAlign(local=LOCAL, anchor_rate=rate)
    context, task = begun(tiny, method)
    context = precise(context)
    slow = copy.deepcopy(context.model)
    _, state = train_round(method, context, task, CTX)
    adams = _two_adams(slow, rate)
    labelled = _first_pseudo_labels(method, context, slow)
    _slow_round(slow, adams, context, labelled, 1)
    for name, tensor in context.model.state_dict().items():
        assert torch.allclose(tensor.double(), slow.state_dict()[name].double(), rtol=0, atol=1e-10), name
    # The moments of both are kept, under the names of their parameters.
    for adam, half in zip(adams, _halves(slow), strict=True):
        for name, parameter in half:
            kept, moment = state[f"{name}/exp_avg_sq"], adam.state[parameter]["exp_avg_sq"]
            assert torch.allclose(kept, moment, rtol=0, atol=1e-10)
            assert state[f"{name}/step"] == adam.state[parameter]["step"]


def _halves(model: Any) -> tuple[list[Any], list[Any]]:
    named = list(model.named_parameters())
    return [x for x in named if not x[0].startswith("head.")], [x for x in named if x[0].startswith("head.")]


def _two_adams(model: Any, rate: float) -> list[torch.optim.Adam]:
    f, anchors = ([p for _, p in half] for half in _halves(model))
    return [torch.optim.Adam(f, LOCAL.lr), torch.optim.Adam(anchors, rate * LOCAL.lr)]


def _first_pseudo_labels(method: FedAlign, context: SiteContext, model: Any) -> Tensor:
    train = context.samples["train"]
    with torch.no_grad():
        z = model.eval()({"image": context.prepare(train.inputs["image"])}).float()
    foreign = np.array([True, True, False, False])
    y = train.y.numpy()
    return torch.from_numpy(slow_pseudo_labels(method.matching, z.numpy(), y, foreign, np.zeros(4), True))


def _slow_round(model: Any, adams: Any, context: SiteContext, y: Tensor, number: int) -> None:
    """Each batch first with fixed anchors, then with a fixed f."""
    train, shuffle = context.samples["train"], generator_for(0, context.name, number, "shuffle")
    shares = class_shares(y)
    for _ in range(LOCAL.epochs):
        model.train()
        for rows in _orders(len(train), shuffle):
            x, known = context.prepare(train.inputs["image"][rows]), ~y[rows].isnan()
            of = y[rows].nan_to_num().double()
            v = torch.where(of == 1, *(s.double() for s in shares))
            for turn, adam in enumerate(adams):
                f, e = model.features({"image": x}), model.head.weight
                p = torch.sigmoid(f @ e.detach().T if turn == 0 else f.detach() @ e.T)
                each = v * -(of * p.log() + (1 - of) * (1 - p).log())
                adam.zero_grad()
                (each * known).mean().backward()
                adam.step()


def _orders(n: int, shuffle: torch.Generator) -> list[Tensor]:
    order = torch.randperm(n, generator=shuffle)
    cuts = list(range(0, n, LOCAL.batch_size))
    if n - cuts[-1] == 1:
        cuts.pop()
    return [order[a:b] for a, b in zip(cuts, [*cuts[1:], n], strict=True)]


# The parts of a round


def test_f1_of_the_sites_own_validation_data(tiny: Any) -> None:
    """Mass: TP 2, FP 1, FN 1: 4 / 6. Nodule has no negative image; Fibrosis is of others."""
    context, _ = begun(tiny, FedAlign(local=LOCAL))
    z = torch.tensor([[9.0, 0, 1, 1], [9, 0, 2, 1], [9, 0, 3, 1], [9, 0, -1, 1], [9, 0, -2, 1]])
    y = torch.tensor([[1.0, NAN, 1, 1], [1, NAN, 1, 1], [0, NAN, 0, 1], [0, NAN, 1, 1], [0, NAN, 0, 1]])
    of = with_validation(context, z, y)
    f1, measured = validation_f1(of)
    assert f1.tolist() == pytest.approx([0, 0, 4 / 6, 0], abs=1e-6)
    assert measured.tolist() == [0, 0, 1, 0]
    for silent in (replace(of, samples={}), replace(of, min_count=3)):  # two negatives
        assert [t.tolist() for t in validation_f1(silent)] == [[0] * 4, [0] * 4]
    context.model.labels = LabelSet(EVERY, "multiclass")  # it would decide nothing
    assert [t.tolist() for t in validation_f1(of)] == [[0] * 4, [0] * 4]


def test_f1_leaves_a_site_that_has_limits_rounded(tiny: Any) -> None:
    """Of 20 images 10 are Mass, of which 7 are found: 14 / 17, where a patient counts for 2 of 17.

    So F1 may move by 2 / 15, and the next coarser grid is .2. If the 10 are one patient's, all of it may.
    """
    context, _ = begun(tiny, FedAlign(local=LOCAL))
    z, y = torch.full((20, 4), -1.0), torch.full((20, 4), NAN)
    y[:, 2] = 0.0
    z[:7, 2], y[:10, 2] = 1.0, 1.0
    limited = replace(with_validation(context, z, y), min_count=5)
    f1, measured = validation_f1(limited)
    assert (float(f1[2]), float(measured[2])) == (pytest.approx(0.8), 1.0)
    assert float(validation_f1(replace(limited, min_count=0))[0][2]) == pytest.approx(14 / 17)
    part = limited.samples["validation"]
    one = replace(part, patients=("p",) * 10 + part.patients[10:])
    f1, measured = validation_f1(replace(limited, samples={"validation": one}))
    assert (float(f1[2]), float(measured[2])) == (0.0, 0.0)


def with_validation(context: SiteContext, z: Tensor, y: Tensor) -> SiteContext:
    """The site with validation images of which its model says z."""
    context.model.forward = lambda inputs: z[inputs["image"]]  # type: ignore[method-assign]
    patients = tuple(f"p{i}" for i in range(len(y)))
    samples = {"validation": Samples({"image": torch.arange(len(y))}, y, patients)}
    return replace(context, samples=samples, prepare=lambda image: image)  # type: ignore[arg-type]


def test_without_foreign_classes_there_are_no_pseudo_labels() -> None:
    z, y = torch.randn(9, 2), torch.full((9, 2), NAN)
    for label_type in ("multilabel", "multiclass"):
        found = Matching().labels(z, y, torch.tensor([False, False]), torch.ones(2), label_type)  # type: ignore[arg-type]
        assert found.isnan().all()


def test_positive_pseudo_labels_wait_for_the_f1_of_their_class(tiny: Any) -> None:
    """The site sees them from the F1 that came with the round; its own classes get none."""
    method = FedAlign(local=LOCAL, matching=Matching(threshold=0.0, rank=0.5))
    made = {}
    for f1 in (0.0, 1.0):
        context, task = begun(tiny, method, f1=torch.full((4,), f1))
        seen: list[Tensor] = []
        observed = replace(context, observe=lambda _, guessed, seen=seen: seen.append(guessed))
        update, _ = train_round(method, observed, task, CTX)
        made[f1] = seen[0].sum(dim=0)
        assert update.class_weights.tolist() == [0, 0, 1, 1]
        assert update.channels[MEASURED][:2].tolist() == [0, 0]
    assert made[0.0].tolist() == [0, 0, 0, 0]
    assert made[1.0][:2].min() > 0
    assert made[1.0][2:].tolist() == [0, 0]


def test_anchors_begin_at_names_and_so_does_a_class_that_joins(tiny: Any) -> None:
    plan = tiny(FedAlign(local=LOCAL)).plan
    assert (plan.model.neck, plan.model.head, plan.model.row_init) == (256, "anchors", "named")
    assert FedAlign().adapted(ModelSpec("cnn", neck=64)).neck == 64
    begun = initial(plan, EVERY)
    assert begun.head.keys() == {"head.weight"}
    assert torch.equal(begun.head["head.weight"], name_vectors(EVERY, 256))
    grown = with_labels(replace(begun, channels={F1: torch.full((4,), 0.9)}), (*EVERY, "Edema"), plan)
    assert torch.equal(grown.head["head.weight"][4], name_vectors(("Edema",), 256)[0])
    assert grown.channels[F1].tolist() == pytest.approx([0.9] * 4 + [0.0])
