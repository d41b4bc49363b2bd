"""The site info, whose counts a site sends once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.federation.site.site import FIRST_COUNTS, Site, first_counts
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Payload, SiteInfo

LOCAL = LocalTraining(lr=1e-2, batch_size=8)


def asked(site: Site) -> SiteInfo:
    info = site.answer(Payload("handshake"))
    assert isinstance(info, SiteInfo)
    return info


def test_a_second_handshake_reveals_nothing_new_of_data_that_changed(tiny: Any) -> None:
    """One more patient with a Mass: the numbers of the first answer stand, in this process or another."""
    federation = tiny(FedAvg(local=LOCAL))
    first = asked(federation.sites()["alpha"])
    table: Path = federation.configs["alpha"].data.table
    lines = table.read_text().splitlines()
    changed = [line.rsplit(",", 2)[0] + ",1,1" if "train" in line else line for line in lines]
    assert changed != lines
    table.write_text("\n".join(changed) + "\n")
    assert asked(federation.sites()["alpha"]) == first
    another = federation.sites("another_experiment")["alpha"]
    assert asked(another).counts != first.counts


def test_counts_that_an_earlier_version_sent_stand(tiny: Any) -> None:
    """After an upgrade between two jobs, too, a second count would differ by the patient that changed."""
    federation = tiny(FedAvg(local=LOCAL))
    site = federation.sites()["alpha"]
    first = asked(site)
    (site.folder / FIRST_COUNTS).rename(site.folder / "said.json")
    table: Path = federation.configs["alpha"].data.table
    lines = table.read_text().splitlines()
    table.write_text("\n".join(x.rsplit(",", 2)[0] + ",1,1" if "train" in x else x for x in lines) + "\n")
    assert asked(federation.sites()["alpha"]) == first


def test_a_class_that_is_new_is_counted_and_the_others_stand(tmp_path: Path) -> None:
    one = first_counts(LabelSet(("Mass",)), {"Mass": (7, 8)}, tmp_path)
    both = first_counts(LabelSet(("Edema", "Mass")), {"Edema": (9, 6), "Mass": (8, 7)}, tmp_path)
    assert (one, both) == ({"Mass": (7, 8)}, {"Edema": (9, 6), "Mass": (7, 8)})
    assert first_counts(LabelSet(("Mass",)), {"Mass": (1, 1)}, tmp_path) == one
    assert json.loads((tmp_path / FIRST_COUNTS).read_text())["counts"].keys() == {"Edema", "Mass"}


def test_a_count_that_was_withheld_stays_withheld(tmp_path: Path) -> None:
    """Else the round in which a class reaches the limit would say how often it occurs."""
    assert first_counts(LabelSet(("Mass",)), {"Mass": None}, tmp_path) == {"Mass": None}
    assert first_counts(LabelSet(("Mass",)), {"Mass": (5, 9)}, tmp_path) == {"Mass": None}


def test_a_method_that_asks_for_no_counts_leaves_no_trace_of_them(tiny: Any) -> None:
    site = tiny(SurgicalAggregation(local=LOCAL)).sites()["alpha"]
    assert asked(site).counts == {}
    assert not (site.folder / FIRST_COUNTS).exists()


@pytest.mark.parametrize(
    "content",
    [
        *(b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"counts": [1]}', b'{"counts": {"Mass": "17"}}'),
        *(b'{"counts": {"Mass": [1, 1e999]}}', b'{"counts": {"Mass": [1, -2]}}'),
    ],
)
def test_damaged_counts_are_named_and_not_replaced(content: bytes, tmp_path: Path) -> None:
    """New ones would reveal what changed since."""
    (tmp_path / FIRST_COUNTS).write_bytes(content)
    with pytest.raises(ConfigError, match=FIRST_COUNTS):
        first_counts(LabelSet(("Mass",)), {"Mass": (7, 8)}, tmp_path)
    assert (tmp_path / FIRST_COUNTS).read_bytes() == content
