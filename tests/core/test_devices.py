"""Devices: what torch cannot compute on, and a site that names such a one."""

from __future__ import annotations

from typing import Any

import pytest

from suture.core.environment import unusable
from suture.core.errors import ConfigError
from suture.federation.site.site import check_consent
from suture.methods.surgical import SurgicalAggregation


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "cpu:x"])
def test_what_cannot_compute_says_why_in_one_line(device: str) -> None:
    assert unusable("cpu") == ""
    why = unusable(device)
    assert why
    assert "\n" not in why


def test_a_site_with_such_a_device_takes_no_part(tiny: Any) -> None:
    site = tiny(SurgicalAggregation()).sites()["alpha"]
    check_consent("alpha", site.plan, site.config)
    training = site.config.training.model_copy(update={"device": "gpu"})
    config = site.config.model_copy(update={"training": training})
    with pytest.raises(ConfigError, match=r"^alpha: device 'gpu' cannot be used: .*; correct device under"):
        check_consent("alpha", site.plan, config)


def test_groups_at_a_site_are_refused_as_they_do_nothing_there(tiny: Any) -> None:
    site = tiny(SurgicalAggregation()).sites()["alpha"]
    data = site.config.data.model_copy(update={"groups": {"head": ("Mass",)}})
    config = site.config.model_copy(update={"data": data})
    with pytest.raises(
        ConfigError, match=r"^alpha: \[data\.groups\] does nothing at a site; it is for the serv"
    ):
        check_consent("alpha", site.plan, config)
