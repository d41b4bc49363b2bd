"""suture.protocol.egress: channels that cannot hold what they are declared for are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from suture.core.errors import ConfigError
from suture.data.batch import Augmentation
from suture.federation.plan import Plan
from suture.methods import METHODS
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, hyperparameters
from suture.models import ModelSpec
from suture.protocol.egress import CLASSES, VARIABLE, Channel, Egress, Layout, Way, check_declared
from suture.testing import check_method

LAYOUT = Layout({"w": ((2,), "torch.float32")}, {"head.weight": ((2,), "torch.float32")})
ODD: Any = "sideways"

WRONG = {
    "and so does another channel": (Channel("a", "up"), Channel("a", "up", (3,))),
    "another channel: give each": (Channel("a", "down", LAYOUT), Channel("a/w", "server")),
    "way is 'sideways': set it to up, down": (Channel("a", ODD),),
    "type is 'torch.complex64'": (Channel("a", "up", (2,), "torch.complex64"),),
    "type is 'float32'": (Channel("a", "up", (2,), "float32"),),
    "rows are not classes: remove rows": (Channel("a", "up", LAYOUT, rows="own"),),
    "let its shape begin with CLASSES": (Channel("a", "up", (2, CLASSES), rows="own"),),
    "tells of each class: let its shape": (Channel("a", "facts", (2, CLASSES)),),
    "so does another channel: give each a": (Channel("a", "facts", (CLASSES,)), Channel("a", "down")),
    "axis VARIABLE and goes down": (Channel("a", "down", (CLASSES, VARIABLE)),),
    "axis VARIABLE and goes server": (Channel("a", "server", (CLASSES, VARIABLE)),),
}


@hyperparameters
class Declaring(LocalAveraging):
    """Declares what a test has set."""

    about = About("declaring", "Declaring", "none")
    labels = LabelUse()

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=CHANNELS)


CHANNELS: tuple[Channel, ...] = ()


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_channel_is_refused_with_the_remedy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CHANNELS", WRONG[fault])
    with pytest.raises(ConfigError, match=rf"^Declaring declares the channel 'a.*{fault}"):
        Plan(Declaring(), ModelSpec("cnn", size=16), Augmentation(), 1, "x", "code")
    with pytest.raises(ConfigError, match=rf"^Declaring declares .*{fault}"):
        check_method(Declaring())


def test_what_goes_up_may_be_called_as_what_goes_down_and_what_is_kept() -> None:
    ways: tuple[Way, ...] = ("up", "down", "site")
    channels = tuple(Channel("a", way, (CLASSES, 2)) for way in ways)
    check_declared(Egress({}, {}, channels), "Any")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_channels_that_hold(name: str) -> None:
    check_declared(METHODS[name]().egress(LAYOUT), name)
