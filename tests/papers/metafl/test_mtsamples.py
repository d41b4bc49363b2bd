"""suture_papers.metafl.mtsamples: notes that stand under several specialties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture_papers.metafl.mtsamples import MtsamplesConfig

TABLE = """note_id,description,medical_specialty,transcription
1,x, Surgery,"PREOP: ,Pain.,POSTOP: ,Pain, 1,000 ml."
2,x, Urology,Another.
3,x, Urology,"PREOP: ,Pain.,POSTOP: ,Pain, 1,000 ml."
4,x, Surgery,
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mtsamples.csv"
    path.write_text(TABLE)
    return path


def config(path: Path, **more: Any) -> MtsamplesConfig:
    return MtsamplesConfig(table=path, **more)


def test_rows_of_one_text_are_one_document_of_several_labels(path: Path) -> None:
    reading = read_table(config(path))
    table = reading.table
    assert reading.absent == 1
    assert table.images == table.patients == ("1", "2")
    assert table.labels.names == ("Surgery", "Urology")
    assert table.y.tolist() == [[1, 1], [0, 1]]
    assert table.texts == ("PREOP: , Pain., POSTOP: , Pain, 1, 000 ml.", "Another.")
    assert load_table(config(path, labels=("urology",))).labels.names == ("Urology",)


def test_what_is_wrong_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'Urology'"):
        load_table(config(path, labels=("Urolgy",)))
    path.write_text(TABLE.splitlines()[0] + "\n1,x,Surgery,\n")
    with pytest.raises(DataError, match="no text in column 'transcription'"):
        load_table(config(path))
    path.write_text(TABLE.replace("medical_specialty", "specialty"))
    with pytest.raises(DataError, match="no column 'medical_specialty'"):
        load_table(config(path))


@pytest.mark.complete
@pytest.mark.data
def test_the_whole_table_is_read(data_root: Path) -> None:
    table = load_table(config(data_root / "mtsamples" / "mtsamples.csv.gz"))
    assert len(table) == 2357
    assert len(table.labels) == 40
    assert (table.y == 1).sum() == 4964
