"""MetaFL, PMFL and their baseline at a site: its batches, where its half begins, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rounds import reply_of
from suture.core.errors import ConfigError, DataError, FederationError
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.data.batch import Augmentation, Samples
from suture.data.config import TrainingConfig
from suture.learning.training import SiteContext
from suture.methods import METHODS
from suture.methods.base import Share, SharingSpec
from suture.models import ModelSpec, build
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import load
from suture_papers.metafl.fl import FL
from suture_papers.metafl.inner_loop import INNER, batch_of
from suture_papers.metafl.metafl import MetaFL
from suture_papers.metafl.pmfl import PMFL

SPEC = ModelSpec("cnn", size=16)


def context(name: str, train: Samples) -> SiteContext:
    model = build(SPEC, LabelSet(("x",)), 1, pretrained=False)
    return SiteContext(name, model, {"train": train}, SPEC.preprocessing, Augmentation(), torch.device("cpu"))


def numbered(y: torch.Tensor) -> Samples:
    """Rows that say which they are."""
    return Samples({"row": torch.arange(len(y))}, y[:, None], tuple(map(str, range(len(y)))))


def test_batches_share_the_data_out_and_come_again() -> None:
    data = numbered(torch.zeros(24))
    site = context("a", data)
    order = torch.randperm(24, generator=generator_for(0, "a", "batches")).tolist()

    def rows(round_: int, of: SiteContext = site, seed: int = 0) -> list[int]:
        return [int(i) for half in batch_of(of, round_, 5, seed) for i in half.inputs["row"]]

    passed = [row for round_ in range(1, 6) for row in rows(round_)]
    # 24 rows in 5 batches of 4; the last 4 of the order are left out.
    assert passed == order[:20]
    assert rows(7) == rows(2)
    assert rows(2, context("b", data)) != rows(2) != rows(2, seed=1)
    with pytest.raises(DataError, match=r"a has 24 training samples, too few for 13 batches.*batches=3"):
        batch_of(site, 1, 13, 0)


def test_a_table_that_is_sorted_by_its_label_gives_mixed_batches() -> None:
    site = context("a", numbered((torch.arange(200) >= 100).float()))
    halves = [half for round_ in range(1, 11) for half in batch_of(site, round_, 10, 0)]
    assert all(0 < half.y.sum() < len(half) for half in halves)


def halves(made: Any, out: str) -> dict[str, dict[str, torch.Tensor]]:
    """What sites hold after a round of steps too small to see, shared rows and own ones together."""
    made.run(out)
    return {
        name: {
            key: tensor
            for key, tensor in load(
                made.folder / out / "sites" / name / "round-000001.safetensors"
            ).tensors.items()
            if key.endswith("weight") and "head" not in key
        }
        for name in ("alpha", "beta")
    }


@pytest.mark.complete
@pytest.mark.parametrize("init", ["server", "own"])
def test_a_sites_own_half_begins_where_the_job_says(init: Any, tiny: Any) -> None:
    method = PMFL(local=replace(INNER, lr=1e-30), batches=2, share=Share(init=init))
    made = tiny(method, {"alpha": ("Mass",), "beta": ("Nodule",)}, rounds=1)
    found = halves(made, "one")
    assert len(found["alpha"]) > 3
    for name, mine in found["alpha"].items():
        theirs, half = found["beta"][name], len(mine) // 2
        assert torch.equal(mine[:half], theirs[:half])
        if mine.dim() > 1:  # batch norm begins with ones everywhere
            assert torch.equal(mine[half:], theirs[half:]) == (init == "server")
    again = halves(made, "two")
    assert all(torch.equal(t, again[s][name]) for s, own in found.items() for name, t in own.items())


@pytest.mark.parametrize("name", ["fl", "metafl", "pmfl"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"local": replace(INNER, optimiser="adam")},
        {"local": replace(INNER, iterations=None)},
        {"local": replace(INNER, clip=1.0)},
        {"local": replace(INNER, batch_size=8)},
        {"local": replace(INNER, epochs=2)},
        {"local": replace(INNER, betas=(0.5, 0.999))},
        {"local": replace(INNER, warmup_epochs=1)},
        {"batch_norm": "average"},
    ],
)
def test_settings_that_the_inner_loop_would_ignore_are_refused(name: str, wrong: dict[str, Any]) -> None:
    kind: Any = METHODS[name]
    with pytest.raises(ConfigError, match=r"inner loop|batch norm"):
        kind(**wrong)


@pytest.mark.complete
@pytest.mark.parametrize(("weights", "sent"), [("equal", [1.0, 1.0]), ("images", [15.0, 6.0])])
def test_a_site_of_fl_sends_its_number_of_images_where_that_counts(
    weights: Any, sent: list[float], tiny: Any
) -> None:
    """The server takes no other weight from it than it announced: exactly 1, or its 15 or 6 images."""
    made = tiny(FL(batches=2, weights=weights), {"alpha": ("Mass",), "beta": ("Nodule",)})
    table = made.configs["beta"].data.table
    table.write_text("\n".join(table.read_text().splitlines()[:11]) + "\n")  # 6 of its 15 training images
    made.run()
    lines = (made.folder / "run" / "history.jsonl").read_text().splitlines()
    assert [[site["weight"] for site in json.loads(line)["sites"].values()] for line in lines] == [sent] * 2


def test_a_part_without_any_row_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"share\.fraction=1e-06 .* set it higher"):
        tiny(PMFL(share=Share(1e-6), batches=2)).run()


@pytest.mark.parametrize("training", [{"batch_size": 8}, {"amp": True}, {"compile": "kernels"}])
def test_what_a_site_sets_in_vain_is_refused(training: dict[str, Any], tiny: Any) -> None:
    made = tiny(MetaFL(batches=2))
    own = TrainingConfig.model_validate(training)
    made.configs["alpha"] = made.configs["alpha"].model_copy(update={"training": own})
    site = made.sites()["alpha"]
    answer = reply_of(site, TaskData("handshake"))
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert f"remove {next(iter(training))} under [training]" in (site.folder / "errors.jsonl").read_text()


def test_a_full_memory_is_not_tried_again_with_the_same_batch(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def hungry(*_: Any) -> None:
        tried.append(1)
        raise MemoryError("no more")

    monkeypatch.setattr(MetaFL, "train", hungry)
    with pytest.raises(FederationError, match="out_of_memory"):
        tiny(MetaFL(batches=2), {"alpha": ("Mass",)}, max_failed_rounds=1).run()
    assert tried == [1]


def test_half_of_the_units_of_an_lstm() -> None:
    rows = Share(of="units").rows("backbone.lstm.weight_ih_l0", 128).tolist()
    assert rows == [u + gate for gate in (0, 32, 64, 96) for u in range(16)]
    assert Share(of="units").rows("backbone.embedding.weight", 21).tolist() == list(range(10))


def test_rows_go_back_to_their_places() -> None:
    share, whole = Share(0.5), {"x": torch.arange(5.0), "head.bias": torch.zeros(1)}
    part = SharingSpec(share=share).parts(whole, {})[0]
    assert part.keys() == {"x"}
    again = SharingSpec(share=share).put(whole, {"x": torch.tensor([7.0, 8.0])})
    assert again["x"].tolist() == [7, 8, 2, 3, 4]
    assert torch.equal(SharingSpec(share=share).put(whole, part)["x"], whole["x"])
