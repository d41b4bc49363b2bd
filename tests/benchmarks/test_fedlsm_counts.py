"""FedLSM's printed counts of positives: of which classes, and how they stand beside others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from fedlsm_counts import page

from suture.execution.partition import class_lists
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.skin_lesions.isic import LABELS as ISIC

PRINTED = tomllib.loads((Path(__file__).parents[2] / "benchmarks/fedlsm_counts.toml").read_text())


@pytest.mark.parametrize(("name", "labels", "clients"), [("nih", NIH, 8), ("isic", ISIC, 5)])
def test_the_jobs_sites_identify_the_classes_that_have_printed_counts(name, labels, clients) -> None:  # type: ignore[no-untyped-def]
    lists = class_lists("round_robin", labels, clients)
    known = {(c, client) for client, own in zip("ABCDEFGH", lists, strict=False) for c in own}
    assert known == {(c, client) for c, counts in PRINTED[name].items() for client in counts}


def test_a_printed_count_stands_in_brackets() -> None:
    grid = page({"a": {"A": 3}}, {"a": {"A": 4}}, "AB")
    assert grid.splitlines()[-1] == "| a | 4 (3) | – |"
    with pytest.raises(SystemExit, match=r"a: \['B'\] know it here, \['A'\] in the paper"):
        page({"a": {"A": 3}}, {"a": {"B": 4}}, "AB")
