"""FedMLP: the received model holds what is unknown, then prototypes of all sites tag it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from federated import same
from one_step import context_with
from rounds import begun, reply_of, train_round
from small_hospitals import EVERY
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import STRONG, WEAK, Augmentation, Batch, Samples
from suture.federation.loop import Loop
from suture.learning.steps import masked_bce
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, LabelStatistics, Phase, RoundContext
from suture.models.classifier import Classifier
from suture.protocol.messages import Abstain, Update
from suture.protocol.packing import Packed, unpack
from suture_papers.missing_labels.fedmlp import ABSENT, PRESENT, FedMLP, Tagging, objective, with_tags
from suture_papers.missing_labels.image_memory import recall, remember
from suture_papers.missing_labels.prototypes import (
    DEGREE,
    OF_DEGREE,
    OF_PROTOTYPES,
    PROTOTYPES,
    measure,
    similarity,
)
from world import refused

LOCAL = LocalTraining(lr=1e-2, batch_size=8)
WARM = LocalTraining(warmup_epochs=1)
PLAIN = Augmentation()
HALF, NONE = (Tagging(negative=share, positive=share) for share in (0.5, 0.0))
TAGGING = FedMLP(local=LOCAL, tagging=HALF)
STAGE_2 = RoundContext(2, Phase("stage-2", 3), 1)


def features_as_they_are(x: Tensor, y: Tensor, of: tuple[str, ...] = (), **more: Any) -> SiteContext:
    """A site whose images are features ``[n, d]``, with labels ``[n, c]``, NaN where unknown."""
    labels, who = LabelSet(("A", "B", "C")[: y.shape[1]]), tuple(map(str, range(len(y))))
    model = Classifier(nn.Identity(), x.shape[1], labels, reads=("x",)).to(x.dtype)
    samples = Samples({"x": x}, y, who, of or who)
    return context_with(model, samples, identified=~y.isnan().any(dim=0), **more)


def of_all(seed: int = 0) -> Tensor:
    """Prototypes ``[4, 2, d]`` of all classes."""
    return torch.rand(4, 2, 128, generator=torch.Generator().manual_seed(seed))


def logit(p: Tensor) -> Tensor:
    return torch.log(p / (1 - p))


def saying(p: Tensor) -> Any:
    """A model of these probabilities, whatever it sees."""
    return lambda _: logit(p)


# By hand


def test_stage_1_by_hand() -> None:
    """I = {0}, y = 1: ½ (-ln .8 - ln .7) = .289909; U: the means of ½ .01 + 0 and ½ .01 + ½ .04 are .015."""
    p = torch.tensor([[0.8, 0.6, 0.3], [0.7, 0.5, 0.4]], dtype=torch.float64)
    received = torch.tensor([[0.9, 0.5, 0.2]] * 2, dtype=torch.float64)
    batch = Batch({}, torch.tensor([[1.0, 0, 0]] * 2).double(), torch.tensor([[True, False, False]] * 2))
    assert float(objective(masked_bce, None)(saying(p), batch)) == pytest.approx(0.289909, abs=1e-6)
    both = objective(masked_bce, saying(received))
    assert float(both(saying(p), batch)) == pytest.approx(0.304909, abs=1e-6)


def test_prototypes_by_hand() -> None:
    x, y = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 1]]), torch.tensor([[0.0], [1], [0], [1]])
    sent = measure(features_as_they_are(x, y))
    assert sent[PROTOTYPES].tolist() == [[[1.0, 0.5], [1.0, 1.0]]]
    assert images_of(sent) == [[2, 2, 0]]
    assert sent[DEGREE].tolist() == [0]


def images_of(sent: Mapping[str, Tensor]) -> list[list[float]]:
    """The numbers of images behind P_c0, P_c1 and d_c of each class."""
    return torch.cat([sent[OF_PROTOTYPES], sent[OF_DEGREE].unsqueeze(1)], dim=1).tolist()  # type: ignore[no-any-return]


def an_update(prototypes: Tensor, images: Tensor, degree: Tensor, *labels: str) -> Update:
    tensors = {PROTOTYPES: prototypes, OF_PROTOTYPES: images[:, :2], DEGREE: degree, OF_DEGREE: images[:, 2]}
    n = torch.ones(len(labels)).double()
    return Update(1, labels, {"w": torch.zeros(1)}, {"b": torch.zeros(len(labels))}, n, channels=tensors)


def before(width: int, *labels: str, value: float = 0.0, dtype: torch.dtype = torch.float32) -> GlobalModel:
    tensors = {
        PROTOTYPES: torch.full((len(labels), 2, width), value, dtype=dtype),
        DEGREE: torch.full((len(labels),), value, dtype=dtype),
    }
    return GlobalModel(labels, {"w": torch.zeros(1)}, {"b": torch.zeros(len(labels))}, channels=tensors)


def test_owners_prototypes_count_by_their_images() -> None:
    """30 and 10 images with the class, P_1 = (1, 0) and (0, 1): (.75, .25)."""
    zero = torch.tensor([0.0])
    one = an_update(torch.tensor([[[2.0, 0], [1, 0]]]), torch.tensor([[70.0, 30, 0]]), zero, "A")
    two = an_update(torch.tensor([[[0.0, 2], [0, 1]]]), torch.tensor([[70.0, 10, 0]]), zero, "A")
    after = FedMLP().aggregate(before(2, "A"), [one, two], STAGE_2).channels
    assert after[PROTOTYPES].tolist() == [[[1.0, 1.0], [0.75, 0.25]]]


def test_the_learning_degree_is_that_of_the_sites_that_do_not_annotate_a_class() -> None:
    """.2 of 30 images and .6 of 10; the owner has no part in it: (6 + 6) / 40 = .3."""
    zero = torch.zeros(1, 2, 1)
    sent = [((0.0, 0, 30), 0.2), ((0.0, 0, 10), 0.6), ((50.0, 50, 0), 0.0)]
    updates = [an_update(zero, torch.tensor([n]), torch.tensor([d]), "A") for n, d in sent]
    after = FedMLP().aggregate(before(1, "A"), updates, STAGE_2).channels
    assert float(after[DEGREE]) == pytest.approx(0.3)


def test_similarity_by_hand() -> None:
    """P_0 = (1, 0), P_1 = (0, 1): f = (3, 4) has .6 - .8, f = (4, 3) the opposite, whatever their length."""
    site = features_as_they_are(torch.tensor([[3.0, 4], [4, 3]]), torch.tensor([[math.nan], [math.nan]]))
    for length in (1.0, 7.0):
        s = similarity(site, length * torch.eye(2).unsqueeze(0))
        assert s.flatten().tolist() == pytest.approx([-0.2, 0.2])


def test_shares_by_hand() -> None:
    """Of 1,000 candidates nearer to P_0 the 5 surest are absent, of 250 nearer to P_1 2 are present."""
    s = torch.cat([torch.arange(1000) / 1000, -torch.arange(1, 251) / 250])
    order = torch.randperm(1250, generator=torch.Generator().manual_seed(1))
    tags = Tagging().tags(s[order].unsqueeze(1), torch.ones(1250, 1, dtype=torch.bool)).flatten()
    assert sorted(order[tags == ABSENT].tolist()) == [995, 996, 997, 998, 999]
    assert sorted(order[tags == PRESENT].tolist()) == [1248, 1249]
    alike = Tagging().tags(torch.ones(1250, 1), torch.ones(1250, 1, dtype=torch.bool)).flatten()
    assert alike.nonzero().flatten().tolist() == [*range(6)]  # the first, on every machine
    assert 0.29 * 100 < 29
    assert Tagging().number(0.29, 100) == 29  # rounded down as it is written


@pytest.mark.parametrize(
    ("settings", "rounds", "phases"),
    [
        ({}, 500, [("stage-1", 50), ("stage-2", 450)]),  # of the program's 500
        ({}, 3, [("stage-1", 1), ("stage-2", 2)]),
        ({}, 1, [("stage-1", 1)]),
        ({"stage1": 0.0}, 3, [("stage-2", 3)]),
        ({"stage1": 1.0}, 3, [("stage-1", 3)]),
        ({"stage1": 0.5, "local": WARM}, 5, [("warm-up", 1), ("stage-1", 2), ("stage-2", 2)]),
        ({"stage1": 0.5, "local": WARM}, 1, [("warm-up", 1)]),
    ],
)
def test_phases(settings: dict[str, Any], rounds: int, phases: list[tuple[str, int]]) -> None:
    assert [(phase.name, phase.rounds) for phase in FedMLP(**settings).phases(rounds)] == phases


# Mistakes of the published program


def test_a_class_that_nobody_counted_keeps_its_prototypes() -> None:
    silent = an_update(torch.zeros(2, 2, 3), torch.zeros(2, 3), torch.zeros(2), "A", "B")
    after = FedMLP().aggregate(before(3, "A", "B", value=0.7), [silent], STAGE_2).channels
    assert torch.equal(after[PROTOTYPES], torch.full((2, 2, 3), 0.7))
    assert torch.equal(after[DEGREE], torch.full((2,), 0.7))


@pytest.mark.parametrize(("sign", "tag"), [(-1, PRESENT), (1, ABSENT)])
def test_images_are_tagged_present_where_none_is_absent_and_the_other_way_round(sign: int, tag: int) -> None:
    s = sign * torch.linspace(0.1, 1, 400).unsqueeze(1)
    tags = Tagging().tags(s, torch.ones(400, 1, dtype=torch.bool)).flatten()
    assert set(tags.tolist()) == {0, tag}


def test_small_sites_tag_only_where_a_minimum_says_so() -> None:
    s, candidates = torch.linspace(-1, 1, 98).unsqueeze(1), torch.ones(98, 1, dtype=torch.bool)
    assert not Tagging().tags(s, candidates).any()
    tags = Tagging(minimum=2).tags(s, candidates).flatten()
    assert tags.nonzero().flatten().tolist() == [0, 1, 96, 97]
    assert tags[[0, 1, 96, 97]].tolist() == [PRESENT, PRESENT, ABSENT, ABSENT]
    assert not replace(NONE, minimum=2).tags(s, candidates).any()
    assert int(Tagging(minimum=500).tags(s, candidates).abs().sum()) == 98


def test_a_run_notes_sites_that_are_too_small_to_tag() -> None:
    own = (("a", "A"), ("b", "B"), ("c", "A"), ("d", "AB"))
    counts: Any = {name: dict.fromkeys(of) for name, of in own}
    statistics = LabelStatistics(("A", "B"), {"a": 99, "b": 150, "c": 200, "d": 10}, counts)
    of_a, of_b = FedMLP().class_facts(statistics).notes
    assert (of_a[:2], of_b[:2]) == ("a ", "b ")
    assert ("absent or present" in of_a, "absent or present" in of_b) == (True, False)
    assert not FedMLP(tagging=Tagging(minimum=1)).class_facts(statistics).notes


def test_a_class_without_both_prototypes_is_never_tagged(tiny: Any) -> None:
    """The server's are zeros before owners have sent some; zeros are alike to no image."""
    prototypes = of_all()
    prototypes[0, 1] = 0  # of Fibrosis nobody has an image
    _, _, state = stage_2(tiny, FedMLP(local=LOCAL, tagging=Tagging(minimum=3)), prototypes)
    assert state["tags"].any(dim=1).tolist() == [False, True, False, False]  # two are the site's own


# Tags at a site


def stage_2(
    tiny: Any, method: FedMLP, prototypes: Tensor, state: Mapping[str, Tensor] | None = None
) -> tuple[SiteContext, Update, dict[str, Tensor]]:
    """A round of the second stage, from a state."""
    context, task = begun(tiny, method, prototypes=prototypes)
    packed = Packed(dict(state or {}), {"labels": list(EVERY), "phase": "stage-2"})
    return context, *train_round(method, context, task, STAGE_2, packed)


def test_tags_are_of_unknown_classes_and_for_ever(tiny: Any) -> None:
    context, _, one = stage_2(tiny, TAGGING, of_all())
    _, _, two = stage_2(tiny, TAGGING, of_all(1), one)
    first, second = one["tags"], two["tags"]
    assert first.shape == (4, len(context.samples["train"]))
    assert first.any(dim=1).tolist() == [name not in ("Mass", "Nodule") for name in EVERY]
    assert torch.equal(second[first != 0], first[first != 0])
    assert int((second != 0).sum()) > int((first != 0).sum())


def test_tags_are_labels_of_the_loss() -> None:
    """Where a label has come meanwhile, it counts: the first image has its first class."""
    y = torch.tensor([[1.0, math.nan, math.nan], [0.0, math.nan, math.nan]])
    tags = torch.tensor([[ABSENT, PRESENT, 0], [0, 0, ABSENT]], dtype=torch.int8)
    train = with_tags(features_as_they_are(torch.ones(2, 2), y), tags).samples["train"]
    found, known = train.targets(torch.tensor([0, 1]))
    assert known.tolist() == [[True, True, False], [True, False, True]]
    assert found.tolist() == [[1, 1, 0], [0, 0, 0]]


def test_the_second_stage_learns_from_tags(tiny: Any) -> None:
    """One round with them and one without, from the same model."""
    methods = (FedMLP(local=LOCAL, tagging=tagging, weak=PLAIN) for tagging in (HALF, NONE))
    one, two = (stage_2(tiny, method, of_all())[1].head["head.weight"][0] for method in methods)
    assert not torch.equal(one, two)


def test_the_second_stage_may_hold_what_has_no_tag(tiny: Any) -> None:
    """By default only weight decay moves the row of a class that has neither labels nor tags."""
    for consistency in (False, True):
        method = FedMLP(local=LOCAL, tagging=NONE, consistency=consistency, weak=PLAIN)
        context, task = begun(tiny, method)
        update, _ = train_round(method, context, task, STAGE_2)
        moved = (update.head["head.bias"] - task.head["head.bias"])[:2]
        assert bool(moved.any()) == consistency


def test_prototypes_leave_from_the_end_of_the_first_stage_on(tiny: Any) -> None:
    """Those of the trained model, which the context holds then, and of plain images."""
    for name, round_, sends in (("stage-1", 1, False), ("stage-1", 2, True), ("stage-2", 1, True)):
        context, task = begun(tiny, TAGGING)
        update, _ = train_round(TAGGING, context, task, RoundContext(1, Phase(name, 2), 1, round_))
        for channel, tensor in measure(context).items():
            assert bool(update.channels[channel].any()) == sends or channel == DEGREE
            assert torch.equal(update.channels[channel], tensor) == sends or channel == DEGREE


def test_prototypes_are_of_labels_and_not_of_tags(tiny: Any) -> None:
    """Mass is the site's own, and six of its labels are missing: tags stand there in the loss alone."""
    context, task = begun(tiny, TAGGING, prototypes=of_all())
    train, mass = context.samples["train"], EVERY.index("Mass")
    y = train.y.clone()
    y[:6, mass] = math.nan
    partly = replace(context, samples={"train": replace(train, y=y)})
    update, kept = train_round(TAGGING, partly, task, STAGE_2)
    assert kept["tags"][mass].any()
    labels = [float((y[:, mass] == kind).sum()) for kind in (0, 1)]
    assert update.channels[OF_PROTOTYPES][mass].tolist() == labels
    assert torch.equal(update.channels[PROTOTYPES], measure(partly)[PROTOTYPES])


@pytest.mark.parametrize("phase", ["stage-1", "stage-2"])
def test_every_view_is_the_weak_one_and_not_the_jobs(tiny: Any, phase: str) -> None:
    """Another augmentation of the job gives the same update, another weak one does not."""
    sent = {}
    for job, weak in ((PLAIN, WEAK), (STRONG, WEAK), (PLAIN, STRONG)):
        method = FedMLP(local=LOCAL, weak=weak)
        context, task = begun(tiny, method)
        ctx = RoundContext(1, Phase(phase, 3), 1)
        sent[job, weak], _ = train_round(method, replace(context, augmentation=job), task, ctx)
    assert same(sent[PLAIN, WEAK], sent[STRONG, WEAK])
    assert not same(sent[PLAIN, WEAK], sent[PLAIN, STRONG])


# What leaves a site


def test_a_class_of_few_images_is_not_told() -> None:
    """Three of A and three without: 4 withholds both, since n minus one is the other; n = 6 has a degree."""
    x = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)) + 1
    y = torch.tensor([[1.0, 1, math.nan]] * 3 + [[0.0, 1, math.nan]] * 3)
    for least, told in ((0, [True, True, True]), (4, [False, False, True]), (7, [False, False, False])):
        sent = measure(features_as_they_are(x, y, min_count=least))
        assert [any(images) for images in images_of(sent)] == told
        assert sent[PROTOTYPES].flatten(1).any(dim=1).tolist() == [*told[:2], False]
    assert images_of(measure(features_as_they_are(x, y))) == [[3, 3, 0], [0, 6, 0], [0, 0, 6]]


@pytest.mark.parametrize(
    ("present", "absent", "by", "told"),
    [(7, 14, 5, [15, 5, 0]), (18, 2, 10, [0, 20, 0]), (19, 0, 10, [0, 19, 0])],
)
def test_counts_are_rounded_but_never_to_more_than_all_images(
    present: int, absent: int, by: int, told: list[float]
) -> None:
    y = torch.tensor([[1.0]] * present + [[0.0]] * absent)
    sent = measure(features_as_they_are(torch.ones(len(y), 2), y, round_counts=by))
    assert images_of(sent) == [told]


# The equations as written


def literal_stage_1(
    pa: Tensor, pb: Tensor, qa: Tensor, qb: Tensor, y: Tensor, known: list[list[bool]]
) -> float:
    """C2, stage 1: views a and b of each image, received probabilities q, one entry at a time."""
    labelled, unlabelled = [], []
    for i in range(len(y)):
        for c in range(y.shape[1]):
            if known[i][c]:
                each = [-math.log(p[i, c] if y[i, c] == 1 else 1 - p[i, c]) for p in (pa, pb)]
                labelled.append(0.5 * each[0] + 0.5 * each[1])
            else:
                unlabelled.append(
                    0.5 * float(pa[i, c] - qa[i, c]) ** 2 + 0.5 * float(pb[i, c] - qb[i, c]) ** 2
                )
    return sum(labelled) / max(len(labelled), 1) + sum(unlabelled) / max(len(unlabelled), 1)


def literal_tags(
    f: Tensor, prototypes: Tensor, candidates: Tensor, negative: float, positive: float
) -> list[list[int]]:
    """Stage 2: class by class the surest candidates of either side."""

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

    tags = [[0] * len(prototypes) for _ in f]
    for c, (absent, present) in enumerate(prototypes):
        s = {i: cosine(f[i], absent) - cosine(f[i], present) for i in range(len(f)) if candidates[i, c]}
        like, unlike = [i for i in s if s[i] >= 0], [i for i in s if s[i] < 0]
        for i in sorted(like, key=lambda i: -s[i])[: math.floor(negative * len(like))]:
            tags[i][c] = ABSENT
        for i in sorted(unlike, key=lambda i: s[i])[: math.floor(positive * len(unlike))]:
            tags[i][c] = PRESENT
    return tags


def literal_prototypes(f: Tensor, y: Tensor, c: int, value: int) -> tuple[list[float], int]:
    chosen = [f[i] for i in range(len(f)) if y[i, c] == value]
    total = [sum(float(x[j]) for x in chosen) for j in range(f.shape[1])]
    return [t / max(len(chosen), 1) for t in total], len(chosen)


@pytest.mark.complete
@given(st.integers(0, 10**6))
def test_the_equations_as_written(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    n, c, d = 7, 3, 4
    pa, pb, qa, qb = (0.05 + 0.9 * drawn(n, c) for _ in range(4))
    y, known = (drawn(n, c) < 0.5).double(), drawn(n, c) < 0.6
    batch = Batch({}, torch.where(known, y, 0.0).repeat(2, 1), known.repeat(2, 1))
    found = objective(masked_bce, saying(torch.cat([qa, qb])))(saying(torch.cat([pa, pb])), batch)
    assert float(found) == pytest.approx(literal_stage_1(pa, pb, qa, qb, y, known.tolist()), abs=1e-10)

    f, prototypes = drawn(40, d), drawn(c, 2, d)
    site = features_as_they_are(f, torch.full((40, c), math.nan))
    s, candidates = similarity(site, prototypes), drawn(40, c) < 0.8
    tags = Tagging(negative=0.25, positive=0.5).tags(s, candidates)
    assert tags.tolist() == literal_tags(f, prototypes, candidates, 0.25, 0.5)

    updates, sums = [], {(k, v): ([0.0] * d, 0) for k in range(c) for v in (0, 1)}
    for _ in range(3):
        f, y = drawn(9, d), (drawn(9, c) < 0.3).double()
        images, means = torch.zeros(c, 3), torch.zeros(c, 2, d, dtype=torch.float64)
        for k, v in sums:
            mean, count = literal_prototypes(f, y, k, v)
            total, counted = sums[k, v]
            sums[k, v] = [t + count * m for t, m in zip(total, mean, strict=True)], counted + count
            images[k, v], means[k, v] = count, torch.tensor(mean, dtype=torch.float64)
        sent = measure(features_as_they_are(f, y))
        assert torch.allclose(sent[PROTOTYPES].double(), means, atol=1e-6)
        assert torch.equal(sent[OF_PROTOTYPES], images[:, :2])
        updates.append(an_update(means, images, torch.zeros(c).double(), "A", "B", "C"))
    merged = FedMLP().aggregate(before(d, "A", "B", "C", dtype=torch.float64), updates, STAGE_2)
    for (k, v), (total, counted) in sums.items():
        expected = [t / max(counted, 1) for t in total]
        assert merged.channels[PROTOTYPES][k, v].tolist() == pytest.approx(expected, abs=1e-10)


# What a site remembers of its images


def remembering(*names: str) -> SiteContext:
    return features_as_they_are(torch.ones(len(names), 2), torch.ones(len(names), 3), of=names)


def test_it_is_remembered_as_it_was() -> None:
    site, values = remembering("a", "b"), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    found = recall(site, remember(site, guess=values), "guess")
    assert found is not None
    assert torch.equal(found, values)
    assert recall(site, {}, "guess") is None


@pytest.mark.parametrize("names", ["ab", "abx", "acb", "abcd"])
def test_of_other_images_it_is_refused(names: str) -> None:
    """Fewer, others, in another order, or more."""
    before = remember(remembering("a", "b", "c"), guess=torch.ones(3, 3))
    with refused("alpha", "3 training images", len(names), by=ConfigError):
        recall(remembering(*names), before, "guess")


def test_a_site_whose_images_changed_abstains(tiny: Any) -> None:
    """It labelled 15 images in the first round; before the second one of them is taken out of its table."""
    federation = tiny(FedMLP(stage1=0.0), rounds=2)
    server, loop = federation.server(), Loop(federation.sites())
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    table = federation.configs["alpha"].data.table
    rows = table.read_text().splitlines()
    assert rows[1].split(",")[2] == "train"
    table.write_text("\n".join([rows[0], *rows[2:]]))
    task: Any = unpack(server.assign()["alpha"])
    site = federation.sites()["alpha"]
    answer = reply_of(site, task)
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert "15 training images" in (site.folder / "errors.jsonl").read_text()
