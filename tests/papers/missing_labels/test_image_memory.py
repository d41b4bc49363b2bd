"""What a site remembers of its images: of these images alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fedmlp import features_as_they_are

from rounds import reply_of
from suture.core.errors import ConfigError
from suture.federation.loop import Loop
from suture.learning.training import SiteContext
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import unpack
from suture_papers.missing_labels.fedmlp import FedMLP
from suture_papers.missing_labels.image_memory import recall, remember


def site_of(*names: str) -> SiteContext:
    return features_as_they_are(torch.ones(len(names), 2), torch.ones(len(names), 3), of=names)


def test_it_is_remembered_as_it_was() -> None:
    site, values = site_of("a", "b"), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    found = recall(site, remember(site, guess=values), "guess")
    assert found is not None
    assert torch.equal(found, values)
    assert recall(site, {}, "guess") is None


@pytest.mark.parametrize("names", ["ab", "abx", "acb", "abcd"])
def test_of_other_images_it_is_refused(names: str) -> None:
    """Fewer, others, in another order, or more."""
    before = remember(site_of("a", "b", "c"), guess=torch.ones(3, 3))
    now = f"alpha had 3 training images in earlier rounds and now has {len(names)}"
    with pytest.raises(ConfigError, match=now):
        recall(replace(site_of(*names), name="alpha"), before, "guess")


def test_without_a_checksum_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="in another order"):
        recall(site_of("a", "b"), {"guess": torch.ones(3, 2), "images": torch.tensor(0)}, "guess")


def test_a_site_whose_images_changed_abstains(tiny: Any) -> None:
    """It labelled 15 images in the first round; before the second one of them is taken out of its table."""
    federation = tiny(FedMLP(stage1=0.0), rounds=2)
    server, sites = federation.server(), federation.sites()
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    table = federation.configs["alpha"].data.table
    rows = table.read_text().splitlines()
    assert rows[1].split(",")[2] == "train"
    table.write_text("\n".join([rows[0], *rows[2:]]))
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    site = federation.sites()["alpha"]
    answer = reply_of(site, task)
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert (
        "alpha had 15 training images in earlier rounds and now has 14"
        in (site.folder / "errors.jsonl").read_text()
    )
