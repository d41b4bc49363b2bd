from pathlib import Path

import pytest

from example_run import history_records, metrics_record, run_record, write_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, run_record(), history_records(), metrics_record())
