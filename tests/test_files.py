import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from suture.errors import SutureError
from suture.files import atomic_write, hold, write_json


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    atomic_write(path, b"old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write(tmp_path / "atomic", b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")]
    assert modes[0] == modes[1]


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    value = {"auroc": {"Edema": 0.5, "Hernia": None}, "note": "Müller"}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "Müller" in text


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_is_strict(tmp_path: Path, number: float) -> None:
    with pytest.raises(SutureError, match=r"a\.json.*as null"):
        write_json(tmp_path / "a.json", {"loss": number})
    assert os.listdir(tmp_path) == []


def test_a_lock_is_waited_for_and_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "state" / ".lock"
    script = "import time; from pathlib import Path; from suture.files import hold; "
    script += f"lock = hold(Path({str(path)!r}), 0); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(SutureError, match="another process is using"):
            hold(path, 0.2)
        other.kill()
    hold(path, 5).close()
