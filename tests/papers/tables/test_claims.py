"""Claims of papers: decided by stored runs, and what is refused of their list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from stored_by_hand import SPEC, result
from suture.core.errors import ConfigError
from suture_papers.tables.claims import decide, load_claims, page_of
from suture_papers.tables.loading import load_spec
from suture_papers.tables.runs import final_runs
from world import refused

ONE_SITE = "AUROC, classes of one site"
CLAIM = {
    "paper": "a paper",
    "place": "Table 1",
    "says": "Ours is better.",
    "printed": "0.8 against 0.7",
    "row": "ours",
    "over": "theirs",
}


def claims_file(folder: Path, spec: dict[str, Any], column: str = ONE_SITE, **changes: Any) -> Path:
    """A claim on a table of two rows, in files."""
    (folder / "two.toml").write_text(tomli_w.dumps(spec))
    source = {"table": str(folder / "two.toml"), "preset": "tiny", "column": column}
    claim = {**CLAIM, "studies": [source], **changes}
    content = {"fixed": "2026-01-02T00:00:00Z", "margins": {"auroc": 0.01}, "claims": {"one": claim}}
    path = folder / "claims.toml"
    path.write_text(tomli_w.dumps(content))
    return path


@pytest.mark.parametrize(
    ("finished", "mark"), [("2026-01-03T00:00:00+00:00", ""), ("2026-01-01T00:00:00+00:00", " †")]
)
def test_a_claim_is_decided_by_the_stored_runs(finished: str, mark: str, tmp_path: Path) -> None:
    """Ours - theirs on the classes of one site: .02, .03, .04, mean .03 ± .0248."""
    path = claims_file(tmp_path, SPEC)
    claims, digest = load_claims(path)
    assert decide(claims.claims["one"], claims, tmp_path / "runs")[0].difference.n == 0
    for run in final_runs(load_spec(str(tmp_path / "two.toml")).preset("tiny"), {}):
        b = 0.5 + (0.01 * (run.seed + 1) if run.row == "ours" else 0)
        result(run, tmp_path / "runs", {"A": 0.8, "B": b}, finished=finished)
    text = page_of(path, tmp_path / "runs")
    assert f"+.030 (+.005 to +.055){mark} | 3 | 0.033 | 10 | 0.01 | open" in text
    assert "0 of 1 claims" in text
    assert digest[:16] in text


def test_a_mistake_in_the_list_says_where(tmp_path: Path) -> None:
    rows = {key: {"name": row["name"], "set": row["set"]} for key, row in SPEC["rows"].items()}
    losses = {**SPEC, "rows": rows, "columns": [{"name": "loss", "metric": "loss"}]}
    for spec, edit, named in (
        (SPEC, {"row": "our"}, ("'one'", "'ours'")),
        (SPEC, {"column": "AUROC, all clases"}, ("'AUROC, all classes'",)),
        (SPEC, {"studies": []}, ("studies",)),
        (SPEC, {"expects": "less"}, ("expects",)),
        (losses, {"column": "loss"}, ("margins", "'one'", "'loss'")),
    ):
        with refused(*named, by=ConfigError):
            load_claims(claims_file(tmp_path, spec, **edit))
