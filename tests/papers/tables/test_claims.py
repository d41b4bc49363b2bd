"""Claims of papers: what an interval says of each, and which stored results it comes from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stored_by_hand import SPEC, result
from suture.core.errors import ConfigError
from suture_papers.tables.claims import average, decide, decision, load_claims, page_of, verdict
from suture_papers.tables.loading import load_spec
from suture_papers.tables.runs import final_runs

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "docs/results/claims.toml"
FIXED = "e0474addb821595d182cf5ce952a1cdf2775ad4efafe7110700768535d2ee1f8"


@pytest.mark.parametrize(
    ("low", "high", "more", "equal"),
    [
        (0.011, 0.05, "confirmed", "refuted"),
        (0.010, 0.05, "open", "open"),
        (-0.010, 0.010, "equivalent", "confirmed"),
        (-0.008, -0.002, "equivalent", "confirmed"),  # too small to matter
        (-0.030, -0.002, "refuted", "open"),
        (-0.030, -0.011, "refuted", "refuted"),
        (-0.030, 0.0, "open", "open"),
        (-0.030, 0.030, "open", "open"),
    ],
)
def test_each_verdict_by_hand(low: float, high: float, more: str, equal: str) -> None:
    assert verdict(low, high, 0.01, "more") == more
    assert verdict(low, high, 0.01, "equal") == equal


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0.001, 0.2))
def test_a_wider_interval_never_decides_what_a_narrower_one_leaves_open(
    middle: float, half: float, margin: float
) -> None:
    for expects in ("more", "equal"):
        if verdict(middle - half, middle + half, margin, expects) == "open":
            continue
        narrow = verdict(middle - half / 2, middle + half / 2, margin, expects)
        assert narrow != "open"


def test_three_differences_by_hand() -> None:
    """.02, .03, .04: mean .03, SD .01; t(.975, 2) = 4.302653: half the interval is 4.302653 x .01 / sqrt(3).

    The noncentral t of 2 degrees that exceeds 4.302653 with probability .8 has 5.6535: x .01 / sqrt(3).
    Half a SD is found four times in five with 34 pairs.
    """
    found = decision([0.02, 0.03, 0.04], 0.005, "more")
    assert (found.low, found.high) == pytest.approx((0.005159, 0.054841), abs=1e-6)
    assert found.detectable == pytest.approx(0.032640, abs=1e-6)
    assert (found.pairs, found.needed, found.verdict) == (3, 34, "confirmed")
    assert decision([0.02, 0.03, 0.04], 0.006, "more").verdict == "open"
    assert decision([0.02, 0.03, 0.04], 0.06, "more").verdict == "equivalent"
    assert decision([-0.02, -0.03, -0.04], 0.005, "more").verdict == "refuted"


def test_overlapping_splits_widen_the_interval() -> None:
    """30 tested on over 70 trained on: SD sqrt(1/3 + 3/7) = .0087287, times 4.302653."""
    found = decision([0.02, 0.03, 0.04], 0.005, "more", tested=30 / 70)
    assert found.high - found.difference == pytest.approx(0.0375563, abs=1e-6)
    assert (found.needed, found.verdict) == (None, "open")


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5]])
def test_few_runs_decide_nothing(values: list[float]) -> None:
    found = decision(values, 0.01, "more")
    assert (found.verdict, found.pairs) == ("open", len(values))
    assert math.isnan(found.low)


def test_the_detectable_difference_of_three_pairs_is_found_four_times_in_five() -> None:
    """t(.975) + t(.8) standard errors, for many pairs as good, are found in 77 %."""
    shift = decision([0.02, 0.03, 0.04], 0.005, "more").detectable
    draws = np.random.default_rng(1).normal(shift, 0.01, (4000, 3))
    assert np.mean(stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.015)


def test_equal_differences_have_no_power_to_tell_of() -> None:
    found = decision([0.5, 0.5, 0.5], 0.01, "more")
    assert (found.low, found.high, found.verdict) == (0.5, 0.5, "confirmed")
    assert math.isnan(found.detectable)


def test_studies_are_averaged_over_the_pairs_that_all_have() -> None:
    a = {("None", 1, 0): 0.1, ("None", 1, 1): 0.2, ("None", 1, 2): 0.3}
    b = {("None", 1, 0): 0.3, ("None", 1, 2): 0.5}
    assert average([a, b]) == pytest.approx([0.2, 0.4])
    assert average([a, {}]) == []


CLAIM: dict[str, Any] = {
    "paper": "a paper",
    "place": "Table 1",
    "says": "Ours is better.",
    "printed": "0.8 against 0.7",
    "row": "ours",
    "over": "theirs",
}


def write_list(folder: Path, column: str = "AUROC, classes of one site", **changes: Any) -> Path:
    """A claim on a table of two rows, in files."""
    (folder / "two.toml").write_text(tomli_w.dumps(SPEC))
    study = {"table": str(folder / "two.toml"), "preset": "tiny", "column": column}
    claim = {**CLAIM, "studies": [study], **changes}
    content = {"fixed": "2026-01-02T00:00:00Z", "margins": {"auroc": 0.01}, "claims": {"one": claim}}
    path = folder / "claims.toml"
    path.write_text(tomli_w.dumps(content))
    return path


@pytest.mark.parametrize(
    ("finished", "mark"), [("2026-01-03T00:00:00+00:00", ""), ("2026-01-01T00:00:00+00:00", " †")]
)
def test_a_claim_is_decided_by_the_stored_runs(finished: str, mark: str, tmp_path: Path) -> None:
    """Ours - theirs on the classes of one site: .02, .03, .04, as above."""
    path = write_list(tmp_path)
    claims, digest = load_claims(path)
    assert decide(claims.claims["one"], claims, tmp_path / "runs")[0].pairs == 0
    for run in final_runs(load_spec(str(tmp_path / "two.toml")).preset("tiny"), {}):
        b = 0.5 + (0.01 * (run.seed + 1) if run.row == "ours" else 0)
        result(run, tmp_path / "runs", {"A": 0.8, "B": b}, finished=finished)
    page = page_of(path, tmp_path / "runs")
    assert f"+.030 (+.005 to +.055){mark} | 3 | 0.033 | 10 | 0.01 | open" in page
    assert "0 of 1 claims are decided here" in page
    assert digest[:16] in page


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"row": "our"}, "unknown row of claim 'one'.*did you mean 'ours'"),
        ({"column": "AUROC, all clases"}, "unknown column of a claim.*did you mean 'AUROC, all classes'"),
        ({"studies": []}, "studies"),
        ({"expects": "less"}, "expects"),
    ],
)
def test_a_mistake_in_the_list_says_where(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_claims(write_list(tmp_path, **changes))


def test_a_metric_without_a_margin_is_refused(tmp_path: Path) -> None:
    columns = [{"name": "loss", "metric": "loss"}]
    path = write_list(tmp_path, column="loss")
    rows = {key: {k: v for k, v in row.items() if k != "published"} for key, row in SPEC["rows"].items()}
    (tmp_path / "two.toml").write_text(tomli_w.dumps({**SPEC, "rows": rows, "columns": columns}))
    with pytest.raises(ConfigError, match="unknown metric in margins, for claim 'one'"):
        load_claims(path)


@pytest.mark.complete
def test_the_list_is_the_one_that_was_fixed_and_its_page_is_of_the_stored_results() -> None:
    """Who changes the list changes the digest, and says why in the commit."""
    claims, digest = load_claims(LIST)
    assert digest == FIXED
    assert len(claims.claims) >= 25
    assert (LIST.parent / "claims.md").read_text() == page_of(LIST, LIST.parent / "runs")
