"""Results in JSON Lines files: their order, and experiments and processes that share them."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from suture.core.errors import DataError, SutureError
from suture.experiments import results
from suture.experiments.results import ResultStore

WRITER = """
import sys
from pathlib import Path
from suture.experiments.results import ResultStore

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


def test_experiments_share_records_and_each_is_stored_once(tmp_path: Path) -> None:
    first, second = ResultStore(tmp_path, "first"), ResultStore(tmp_path, "second")
    first.put("a", {"number": 1})
    assert second.find("a") == {"number": 1}
    second.put("a", {"number": 2})
    second.put("b", {"number": 3})
    assert first.find("a") == {"number": 2}
    assert names(tmp_path / "first.jsonl") == ["a"]
    assert names(tmp_path / "second.jsonl") == ["b"]


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


def test_the_form_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    former = tmp_path / "demo-surgical-s1-0123456789.json"
    former.write_text("{}")
    for use in (lambda store: store.find("a"), lambda store: store.put("a", {})):
        with pytest.raises(DataError, match=rf"^{former} is a result in the form of an earlier version"):
            use(ResultStore(tmp_path, "mine"))
    assert not (tmp_path / "mine.jsonl").exists()


def test_a_number_that_is_not_finite_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put("a", {"number": 1})
    with pytest.raises(DataError, match=r"result b: .*write an undefined number as null"):
        store.put("b", {"number": float("nan")})
    assert names(tmp_path / "mine.jsonl") == ["a"]
