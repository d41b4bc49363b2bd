"""Results in JSON Lines files: their order, and tables and processes that share them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from suture.core.errors import DataError, SutureError
from suture_papers.tables import results
from suture_papers.tables.results import ResultStore, read_result
from suture_papers.tables.runs import Run

RUN = Run("r", None, "demo", {"seed": 1})
RECORD = {"run": {}, "metrics": {}, "validation_auroc": 0.5, "validation_loss": None, "seconds": 1.0}

WRITER = """
import sys
from pathlib import Path
from suture_papers.tables.results import ResultStore

folder, first = Path(sys.argv[1]), sys.argv[2]
for number in range(15):
    ResultStore(folder, "both").put(f"{first}{number}", {"number": number})
"""


def names(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text().split("\n")[:-1]]


def test_records_are_found_replaced_and_sorted(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "runs", "mine")
    assert store.find("a") is None
    assert not store.folder.exists()
    for name in ("b", "a", "c"):
        store.put(name, {"text": f"{name} ü \u2028 end", "number": 0.1})
    store.put("a", {"number": None})
    path = store.folder / "mine.jsonl"
    assert names(path) == ["a", "b", "c"]
    assert path.read_text().startswith('{"name":"a","number":null}\n{"name":"b","text":"b ü')
    assert store.find("a") == {"number": None}
    assert store.find("b") == {"text": "b ü \u2028 end", "number": 0.1}


def test_a_change_of_what_was_found_does_not_change_the_store(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put("a", {"metrics": {"auroc": 0.5}})
    found = store.find("a")
    assert found is not None
    found["metrics"]["auroc"] = 0.9
    assert store.find("a") == {"metrics": {"auroc": 0.5}}


def test_tables_share_records_and_each_is_stored_once(tmp_path: Path) -> None:
    first, second = ResultStore(tmp_path, "first"), ResultStore(tmp_path, "second")
    first.put("a", {"number": 1})
    assert second.find("a") == {"number": 1}
    second.put("a", {"number": 2})
    second.put("b", {"number": 3})
    assert first.find("a") == {"number": 2}
    assert names(tmp_path / "first.jsonl") == ["a"]
    assert names(tmp_path / "second.jsonl") == ["b"]


@pytest.mark.complete
def test_processes_and_threads_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), first]) for first in "xy"]
    with ThreadPoolExecutor(4) as pool:
        for number in range(15):
            pool.submit(ResultStore(tmp_path, "both").put, f"z{number}", {"number": number})
    assert [writer.wait(60) for writer in writers] == [0, 0]
    expected = sorted(f"{first}{number}" for first in "xyz" for number in range(15))
    assert names(tmp_path / "both.jsonl") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"both.jsonl", ".lock"}


def test_a_folder_that_another_process_holds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_LOCK_SECONDS", 0.2)
    with (
        results.hold(tmp_path / ".lock", 0.1),
        pytest.raises(SutureError, match="another process is using"),
    ):
        ResultStore(tmp_path, "mine").put("a", {})
    ResultStore(tmp_path, "mine").put("a", {})


def test_a_number_that_is_not_finite_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put("a", {"number": 1})
    with pytest.raises(DataError, match=r"result b: .*write an undefined number as null"):
        store.put("b", {"number": float("nan")})
    assert names(tmp_path / "mine.jsonl") == ["a"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"name":"\xe9"}',
        b'{"name":"b","n":NaN}',
        b'{"name":"b","n":-Infinity}',
        b'{"name":null}',
        b"[1]",
        b'{"n',
    ],
    ids=["not UTF-8", "not a number", "infinite", "no name", "a list", "torn"],
)
def test_a_damaged_line_is_named_and_the_file_is_not_rewritten(line: bytes, tmp_path: Path) -> None:
    store, path = ResultStore(tmp_path, "mine"), tmp_path / "mine.jsonl"
    content = b'{"name":"a","number":1}\n' + line + b"\n"
    path.write_bytes(content)
    for use in (lambda: store.find("a"), lambda: store.put("c", {}), lambda: store.put("a", {})):
        with pytest.raises(
            DataError, match=rf"^{path}, line 2 cannot be read.* delete the line, and its run"
        ):
            use()
    assert path.read_bytes() == content


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.mkdir()
    with pytest.raises(DataError, match=rf"^{path} cannot be read: .*directory.* move it elsewhere"):
        ResultStore(tmp_path, "mine").find("a")


def test_a_damaged_file_of_another_table_is_passed_over_and_never_rewritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = ResultStore(tmp_path, "mine"), tmp_path / "other.jsonl"
    content = '{"name":"a","number":1}\n{"name":\n'
    other.write_text(content)
    with caplog.at_level(logging.WARNING):
        store.put("b", {"number": 2})
        assert store.find("a") == {"number": 1}
        assert store.find("b") == {"number": 2}
    assert len(caplog.messages) == 1
    assert f"{other}, line 2 cannot be read" in caplog.text
    with pytest.raises(DataError, match=r"other\.jsonl, line 2 cannot be read"):
        store.put("a", {"number": 3})
    assert other.read_text() == content


def test_two_different_records_of_a_name_are_refused_and_equal_ones_are_one(tmp_path: Path) -> None:
    store, path = ResultStore(tmp_path, "mine"), tmp_path / "mine.jsonl"
    path.write_text('{"name":"a","n":1}\n{"name":"a", "n":1}\n')
    assert store.find("a") == {"n": 1}
    path.write_text('{"name":"a","n":1}\n\n{"name":"a","n":2}\n')
    message = rf"^{path}, lines 1 and 3 are both for a"
    for use in (lambda: store.find("a"), lambda: store.put("b", {})):
        with pytest.raises(DataError, match=message):
            use()


def test_blank_lines_and_what_editors_add_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"name":"b","n":1}\r\n  \n\t\r\n')
    store = ResultStore(tmp_path, "mine")
    store.put("a", {})
    assert path.read_bytes() == b'{"name":"a"}\n{"name":"b","n":1}\n'


def test_the_name_that_is_given_is_the_one_that_is_stored(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put("a", {"number": 1, "name": "z"})
    assert (tmp_path / "mine.jsonl").read_text() == '{"name":"a","number":1}\n'
    assert store.find("z") is None


@pytest.mark.parametrize(
    ("key", "value"), [("metrics", None), ("made_with", [1]), ("seconds", "long"), ("tests", 3), ("stray", 1)]
)
def test_a_record_of_another_form_is_refused_by_its_key(key: str, value: object, tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put(RUN.name, {**RECORD, key: value})
    place = rf"^{tmp_path}/mine.jsonl, {RUN.name} cannot be read: .*{key}"
    with pytest.raises(DataError, match=rf"{place}.* delete its line, and the run is done again$"):
        read_result(store, RUN)
