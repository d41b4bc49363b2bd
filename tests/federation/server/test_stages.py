"""What the server does, one after the other, is what the page of the architecture says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suture.federation.server import server
from suture.federation.server.server import Stage
from suture.methods.surgical import SurgicalAggregation
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_the_page_has_each_stage_and_what_follows_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    words = {stage.value: {one.value for one in following} for stage, following in server._NEXT.items()}
    assert {name: {*re.findall(r"\w+", of)} for name, of in rows if name in words} == words
    assert words.keys() == {stage.value for stage in Stage}


def test_an_exchange_that_is_not_open_cannot_be_closed() -> None:
    with Trial(SurgicalAggregation(), SMALL, "multilabel") as trial:
        trial.run()
        assert trial.server.stage is Stage.FINISHED
        with pytest.raises(RuntimeError, match="finished cannot be idle"):
            trial.server.close_test({})
