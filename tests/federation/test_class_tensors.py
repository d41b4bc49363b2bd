"""Tensors of classes, up and down, by name on both axes; the head that predicts; updates read twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rounds import reply_of
from suture.core.errors import RejectedUpdate
from suture.core.labels import LabelType
from suture.federation.loop import Loop
from suture.federation.server import collector
from suture.federation.server.global_model import read_model
from suture.federation.server.record import what_leaves
from suture.federation.server.server import Server
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.averaging import LocalAveraging, WeightedMean
from suture.methods.base import About, GlobalModel, LabelUse, LabelView, Method, RoundContext, hyperparameters
from suture.methods.fedavg import FedAvg
from suture.methods.source import code_hash
from suture.models.classifier import Layout
from suture.models.saved import load_model
from suture.protocol.check import check_reply
from suture.protocol.egress import CLASSES, Channel, Egress, list_declared
from suture.protocol.messages import Abstain, TaskData, Update, align_rows
from suture.protocol.packing import Packed, unpack
from suture_papers.missing_labels.fedmlp import FedMLP
from suture_papers.rare_classes.creff import CReFF
from suture_synthetic import method_checks as checks
from suture_synthetic.method_checks import SMALL, subject_of
from suture_synthetic.trial import Trial

LOCAL = LocalTraining(lr=1e-2, batch_size=8)
NUMBERS = {"Fibrosis": 1.0, "Hernia": 2.0, "Zwerchfellbruch": 2.0, "Mass": 3.0, "Nodule": 4.0}
PAIRS = (CLASSES, CLASSES, 2)


def pairs_of(labels: Iterable[str]) -> Tensor:
    """``[c, c, 2]``: for classes i and j a one, and the number that says which two they are."""
    number = torch.tensor([NUMBERS[name] for name in labels])
    code = number[:, None] * 10 + number
    return torch.stack([torch.ones_like(code), code], dim=-1)


@hyperparameters
class Pairs(LocalAveraging):
    """A site sends the pairs of its classes that it has; the server sends their means down."""

    about = About("pairs", "Pairs", "none")
    received: ClassVar[list[tuple[str, TaskData]]] = []
    walks: ClassVar[list[list[Update]]] = []
    view: LabelView = "own"

    @property
    def labels(self) -> LabelUse:
        return LabelUse(view=self.view)

    def egress(self, layout: Layout) -> Egress:
        up = Channel("pairs", "up", PAIRS, why="which classes a site has")
        return replace(super().egress(layout), channels=(up, Channel("pairs", "down", PAIRS)))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        self.received.append((site.name, received))
        update, kept = super().train(site, received, round_)
        images = torch.nan_to_num(site.samples["train"].y).sum(dim=0)
        has = (images >= max(site.min_count, 1)).float()
        pairs = pairs_of(received.labels) * has[:, None, None] * has[None, :, None]
        return replace(update, channels={"pairs": pairs}), kept

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = WeightedMean(previous.labels, {}, previous.channels)
        self.walks.append(list(updates))
        self.walks.append(list(updates))
        for update in updates:
            pairs = align_rows(update.channels["pairs"], update.labels, previous.labels, axis=1)
            mean.add_rows(update.labels, {"pairs": pairs}, pairs.flatten(1).any(dim=1))
        return replace(super().aggregate(previous, updates, ctx), channels=mean.head())


@hyperparameters
class Careless(Pairs):
    """It sends what it has of every class, however few images there are."""

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        return super().train(replace(site, min_count=0), received, round_)


@pytest.fixture(autouse=True)
def no_memory() -> None:
    Pairs.received.clear()
    Pairs.walks.clear()


@pytest.fixture
def federation(tiny: Any) -> Any:
    """`tiny`, for a method of this file."""

    def make(method: Method, *settings: Any, **more: Any) -> Any:
        made = tiny(method, *settings, **more)
        made.plan = replace(made.plan, code=code_hash(type(method)))
        return made

    return make


def spelt(federation: Any, **more: Any) -> Any:
    """A federation in which beta calls the Hernia by another name, and every site has another order."""
    labels = {
        "alpha": ("Mass", "Nodule"),
        "beta": ("Nodule", "Zwerchfellbruch"),
        "gamma": ("Nodule", "Fibrosis"),
    }
    table = federation(Pairs(), {**labels, "beta": ("Nodule", "Hernia")}).configs["beta"].data.table
    table.write_text(table.read_text().replace("Hernia", "Zwerchfellbruch"))
    method = Pairs(local=LOCAL, view=more.pop("view", "own"))
    return federation(method, labels, label_map={"Zwerchfellbruch": "Hernia"}, **more)


def check_pairs(pairs: Tensor, labels: tuple[str, ...]) -> None:
    """Every pair that a site has, Nodule and another, carries its number; of the others nothing is known."""
    for i, one in enumerate(labels):
        for j, other in enumerate(labels):
            share, code = pairs[i, j].tolist()
            if one == other or "Nodule" in (one, other):
                assert code == pytest.approx(share * (10 * NUMBERS[one] + NUMBERS[other]))
                assert share > 0
            else:
                assert (share, code) == (0, 0)


@pytest.mark.complete
@pytest.mark.parametrize("view", ["own", "all"])
def test_both_axes_go_up_and_down_by_name(view: str, federation: Any) -> None:
    small = spelt(federation, view=view)
    server = small.run()
    every = ("Fibrosis", "Hernia", "Mass", "Nodule")
    # With its own view a site sends pairs of its classes; with that of all, only its images say which it has.
    assert server.model.labels == every
    check_pairs(server.model.channels["pairs"], every)
    # Nodule is of three sites, each with one other class.
    assert server.model.channels["pairs"][3, :, 0].tolist() == pytest.approx([1 / 3] * 3 + [1])
    first, second = Pairs.received[:3], Pairs.received[3:]
    assert [site for site, _ in first] == [site for site, _ in second] == ["alpha", "beta", "gamma"]
    for _, payload in first:
        assert not payload.channels["pairs"].any()
    for site, payload in second:
        own = small.sites()[site].trainer.data[0].names
        assert sorted(payload.labels) == sorted(own) if view == "own" else set(own) < set(payload.labels)
        check_pairs(payload.channels["pairs"], payload.labels)


def test_by_name_by_hand() -> None:
    sent = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert align_rows(sent, ("B", "A"), ("A", "C", "B")).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert align_rows(sent, ("B", "A"), ("A", "C", "B"), axis=1).tolist() == [[2, 0, 1], [4, 0, 3]]
    assert align_rows(sent, ("B", "A"), ("A",)).tolist() == [[3, 4]]
    assert align_rows(sent, ("B", "A"), ("C",), axis=1).tolist() == [[0], [0]]


@pytest.mark.complete
def test_a_class_that_joins_begins_with_zeros_on_both_axes(federation: Any) -> None:
    two = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    before = federation(Pairs(local=LOCAL), two, rounds=1).run().model
    small = federation(Pairs(local=LOCAL), {**two, "gamma": ("Nodule", "Fibrosis")})
    server, loop = small.server(), Loop(small.sites())
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    assert (before.labels, server.model.labels) == (
        ("Hernia", "Mass", "Nodule"),
        ("Fibrosis", "Hernia", "Mass", "Nodule"),
    )
    pairs = server.model.channels["pairs"]
    assert torch.equal(pairs[1:, 1:], before.channels["pairs"])
    assert not pairs[0].any()
    assert not pairs[:, 0].any()


@pytest.mark.complete
def test_a_continued_federation_equals_a_whole_one(federation: Any) -> None:
    federation(Pairs(local=LOCAL), rounds=1).run()
    server, whole = (federation(Pairs(local=LOCAL), rounds=2).run(out) for out in ("run", "whole"))
    assert (server.round, len(server.record.run["labels"])) == (2, 4)
    assert torch.equal(server.model.channels["pairs"], whole.model.channels["pairs"])
    assert whole.model.channels["pairs"].any()
    stored = read_model(server.states.newest()[1], server.plan, "")  # type: ignore[index]
    assert torch.equal(stored.channels["pairs"], server.model.channels["pairs"])


@pytest.mark.complete
def test_a_class_that_nobody_sends_keeps_its_tensor(federation: Any) -> None:
    """No image of beta has a Hernia any more: its pairs stay, and are no NaN."""
    federation(Pairs(local=LOCAL), rounds=1).run()
    small = federation(Pairs(local=LOCAL), rounds=2)
    table = small.configs["beta"].data.table
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.rsplit(",", 1)[0] + ",0" for row in rows)]) + "\n")
    model = small.run().model
    hernia = model.labels.index("Hernia")
    kept = model.channels["pairs"][hernia]
    assert kept[hernia].tolist() == [1, 22]
    assert bool(torch.isfinite(model.channels["pairs"]).all())


def begun(federation: Any, **more: Any) -> tuple[Server, dict[str, Any], dict[str, TaskData]]:
    """A server that has sent round 1, its sites, and what they were sent."""
    small = federation(Pairs(local=LOCAL), **more)
    server, sites = small.server(), small.sites()
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    return server, sites, {name: _payload(packed) for name, packed in server.assign().items()}


def _payload(packed: Packed) -> TaskData:
    message = unpack(packed)
    assert isinstance(message, TaskData)
    return message


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"pairs": torch.ones(2, 4, 2)}, r"channels/pairs has shape \(2, 4, 2\) instead of \(2, 2, 2\)"),
        ({"pairs": torch.ones(3, 2, 2)}, r"has shape \(3, 2, 2\) instead of \(2, 2, 2\)"),
        ({"pairs": torch.ones(2, 2, 2, dtype=torch.float64)}, "is torch.float64 instead of torch.float32"),
        ({"pairs": torch.full((2, 2, 2), torch.inf)}, "channels/pairs is not finite"),
        ({"pairs": torch.full((2, 2, 2), torch.nan)}, "channels/pairs is not finite"),
        ({}, "channels/pairs is missing"),
        ({"pairs": torch.ones(2, 2, 2), "more": torch.ones(2)}, "channels/more was not declared"),
    ],
)
def test_the_sites_filter_and_the_server_refuse_another_form(
    tensors: Mapping[str, Tensor], why: str, federation: Any
) -> None:
    server, sites, payloads = begun(federation)
    site, task = sites["alpha"], payloads["alpha"]
    update = reply_of(site, task)
    expected = (site.answer(task).allowed, server.collector._allowed["alpha"])
    for one in expected:
        check_reply(update, one)
        with pytest.raises(RejectedUpdate, match=why):
            check_reply(replace(update, channels=tensors), one)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"pairs": torch.ones(2, 1, 2)}, "pairs of round 1 is (2, 1, 2) torch.float32 instead of (2, 2, 2) "),
        ({}, "pairs of round 1 is missing instead of (2, 2, 2) torch.float32; run the same version"),
    ],
)
def test_a_site_trains_on_no_tensors_of_another_form(
    tensors: Mapping[str, Tensor], why: str, federation: Any
) -> None:
    _, sites, payloads = begun(federation)
    answer = reply_of(sites["alpha"], replace(payloads["alpha"], channels=tensors))
    assert isinstance(answer, Abstain)
    assert (answer.reason, answer.error) == ("configuration", "ConfigError")
    assert why in (sites["alpha"].folder / "errors.jsonl").read_text()


@pytest.mark.complete
def test_a_site_that_clips_takes_no_part(federation: Any) -> None:
    path = federation(Pairs()).configs["alpha"].data.table.parent / "suture.toml"
    path.write_text(path.read_text() + "clip = 1.0\nnoise = 0.5\n")
    small = federation(Pairs(local=LOCAL))
    site = small.sites()["alpha"]
    for task in (TaskData("handshake"), TaskData("train", 1)):
        answer = reply_of(site, task)
        assert isinstance(answer, Abstain)
        assert answer.reason == "configuration"
    log = (site.folder / "errors.jsonl").read_text()
    assert "clip and noise do not cover pairs, which Pairs sends" in log


@pytest.mark.complete
def test_classes_below_the_smallest_count_are_sent_as_zeros(federation: Any) -> None:
    """alpha has 9 training images with a Mass, and one with a Nodule."""
    small = federation(Pairs(local=LOCAL))
    table = small.configs["alpha"].data.table
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    trained = [row for row in rows if row[2] == "train"]
    for i, row in enumerate(trained):
        row[3:] = [str(int(i < 9)), str(int(i == 0))]
    table.write_text("\n".join(",".join(row) for row in (header, *rows)) + "\n")
    path = table.parent / "suture.toml"
    path.write_text(path.read_text().replace("min_count = 0", "min_count = 5"))
    model = federation(Pairs(local=LOCAL), rounds=1).run().model
    nodule, mass = (model.labels.index(name) for name in ("Nodule", "Mass"))
    alpha, _ = next((u, None) for u in Pairs.walks[0] if u.labels == ("Mass", "Nodule"))
    assert alpha.channels["pairs"].tolist() == [[[1, 33], [0, 0]], [[0, 0], [0, 0]]]
    # gamma alone counts in the mean of Nodule beside Mass.
    assert model.channels["pairs"][nodule, mass].tolist() == [
        pytest.approx(1 / 2),
        pytest.approx(43 / 2),
    ]


@pytest.mark.complete
def test_the_check_of_the_smallest_count_finds_a_careless_method() -> None:
    check = checks.channels_respect_the_smallest_count
    with pytest.raises(AssertionError, match="pairs of classes with fewer images than min_count leaves"):
        check(subject_of(Careless()))
    check(subject_of(Pairs()))


@pytest.mark.complete
def test_updates_are_read_from_disk_at_each_walk(federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two walks are equal and share no memory; between them the server holds no tensor of a site."""
    reads: list[str] = []
    load = collector.load

    def counted(path: Path) -> Packed:
        reads.append(path.stem)
        return load(path)

    monkeypatch.setattr(collector, "load", counted)
    monkeypatch.setattr(collector, "IN_MEMORY", 0)
    server = federation(Pairs(local=LOCAL), rounds=1).run()
    # Two walks of the test, one over the tensors of classes, and one of the mean.
    assert reads == ["alpha", "beta", "gamma"] * 4
    one, two = Pairs.walks
    for a, b in zip(one, two, strict=True):
        assert (a.labels, a.weight) == (b.labels, b.weight)
        for group in ("shared", "head", "channels"):
            left, right = getattr(a, group), getattr(b, group)
            assert left.keys() == right.keys() != set()
            for name, tensor in left.items():
                assert torch.equal(tensor, right[name])
                assert tensor.data_ptr() != right[name].data_ptr()
    for reply in server.collector.answers.values():
        assert not getattr(reply, "channels", {})


@pytest.mark.complete
def test_the_server_keeps_an_open_update_on_disk_alone(
    federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "IN_MEMORY", 0)
    server, sites, payloads = begun(federation)
    receive = server.receiver()
    for name, site in sites.items():
        receive(name, site.answer(payloads[name]).packed)
    held = server.collector.answers["alpha"]
    assert isinstance(held, Update)
    assert (held.shared, held.head, held.channels) == ({}, {}, {})


def test_what_leaves_is_declared() -> None:
    head = {"head.weight": ((4,), "torch.float32")}
    layout = Layout({"backbone.weight": ((4, 4), "torch.float32")}, head)
    row = next(r for r in list_declared(Pairs().egress(layout)) if r["field"] == "pairs")
    assert row == {
        "field": "pairs",
        "shape": "for each class classes × 2 numbers",
        "why": "which classes a site has",
    }


@pytest.mark.complete
@pytest.mark.parametrize("method", [FedMLP(), CReFF()], ids=lambda method: method.about.name)
def test_a_run_says_how_many_numbers_of_each_class_leave(method: Method) -> None:
    """Before the model is known no length; after the start that of the tensors that sites send."""
    with Trial(method, SMALL, method.labels.types[0], rounds=1) as trial:
        name = method.egress(Layout({}, {})).going("up")[0].name
        unknown = {r["field"]: r["shape"] for r in what_leaves(trial.server.plan, Layout({}, {}))}
        assert unknown[name] == "numbers for each class"
        trial.run()
        sent = trial.server.model.head["head.weight"].shape[1]
        shapes = {r["field"]: r["shape"] for r in trial.server.record.run["egress"]}
    lengths = {"fedmlp": f"2 × {sent}", "creff": f"classes × {sent + 1}"}[method.about.name]
    assert shapes[name] == f"for each class {lengths} numbers"


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_a_run_lists_label_counts_only_where_they_are_sent(label_type: LabelType) -> None:
    with Trial(FedAvg(), SMALL, label_type, rounds=1) as trial:
        trial.run()
        listed = {row["field"] for row in trial.server.record.run["egress"]}
    assert ("counts" in listed) == (label_type == "multilabel")


# The head that predicts


@hyperparameters
class Negated(FedAvg):
    """FedAvg that predicts with the negative of the merged head: each AUROC becomes one minus it."""

    about = About("negated", "Negated", "none")

    def egress(self, layout: Layout) -> Egress:
        egress, minus = super().egress(layout), Channel("minus", "down", (CLASSES, layout.features + 1))
        return replace(egress, channels=(*egress.channels, minus))

    def predictor(
        self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        rows = channels["minus"]
        assert {"head.weight", "head.bias"} < tensors.keys()
        return {"head.weight": rows[:, :-1], "head.bias": rows[:, -1]}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        rows = torch.cat([merged.head["head.weight"], merged.head["head.bias"][:, None]], dim=1)
        return replace(merged, channels={"minus": -rows})


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["last", "server_metric"])
def test_the_predictor_is_measured_selected_and_exported_and_training_goes_on_from_the_merged_rows(
    selection: str, federation: Any
) -> None:
    sites = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Mass")}
    labels = {**sites, "server": ("Mass", "Nodule")} if selection == "server_metric" else sites
    settings = {"labels": labels, "rounds": 3, "selection": selection, "n": 60}
    plain = federation(FedAvg(local=LOCAL), **settings).run("plain")
    minus = federation(Negated(local=LOCAL), **settings).run("minus")
    for group in ("shared", "head"):
        for name, tensor in getattr(plain.model, group).items():
            assert torch.equal(tensor, getattr(minus.model, group)[name])
    rounds = [
        [json.loads(x) for x in (s.record.folder / "history.jsonl").read_text().splitlines()]
        for s in (plain, minus)
    ]
    key = "server_auroc" if selection == "server_metric" else "auroc"
    measured = [[line["validation"][key] for line in lines] for lines in rounds]
    assert [1 - a for a in measured[0]] == pytest.approx(measured[1])
    best = measured[1].index(max(measured[1])) + 1 if selection == "server_metric" else 3
    assert minus.selected_round == best
    served = minus.select_model().head
    exported, _ = load_model(minus.record.folder / "model")
    stored = read_model(minus.states.read_best(best), minus.plan, "")
    for name, tensor in stored.head.items():
        assert torch.equal(served[name], -tensor)
        assert torch.equal(exported.state_dict()[name], -tensor)
    tested = [json.loads((s.record.folder / "metrics.json").read_text()) for s in (plain, minus)]
    if plain.selected_round == minus.selected_round:
        for name, area in tested[0]["auroc"].items():
            assert tested[1]["auroc"][name] == pytest.approx(1 - area)
