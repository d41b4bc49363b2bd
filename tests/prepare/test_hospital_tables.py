"""Forms of tables of hospitals and archives, each read with the values that it means, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hospital_tables import CASES, assert_read


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_read_as_it_is_meant_or_refused(name: str, tmp_path: Path) -> None:
    assert_read(CASES[name], tmp_path)
