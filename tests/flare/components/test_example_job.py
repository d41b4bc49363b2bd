"""The job that examples/flare-fedavg exports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "flare-fedavg"
SITES = {"site-1": {"Mass", "Nodule"}, "site-2": {"Hernia", "Nodule"}, "site-3": {"Edema", "Mass", "Nodule"}}


def test_each_site_is_told_its_own_classes_only(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "job.py", "export", "--to", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    for site, own in SITES.items():
        files = [path for path in (tmp_path / "by-class" / f"app_{site}").rglob("*") if path.is_file()]
        assert {"client.py", "data.py", "net.py"} <= {path.name for path in files}
        text = "".join(path.read_text() for path in files)
        assert set(re.findall("Edema|Hernia|Mass|Nodule|Pneumonia", text)) == own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--client", "nope"], "--client nope: .* has no client.py; name a folder such as with_monai"),
        (["prod"], "prod needs --kit: the folder of an administrator's kit"),
        (["prod", "--kit", "nope"], "prod needs --kit"),
        (["--rounds", "1"], "--rounds: give 2 or more"),
        (["--method", "nope"], "unknown method 'nope'"),
        (["--method", "individual"], "choose a federated method"),
    ],
)
def test_what_cannot_run_ends_in_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "job.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert re.search(f"\njob.py: error: .*{says}", done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
