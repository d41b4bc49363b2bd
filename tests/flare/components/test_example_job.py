"""The job that examples/flare-fedavg exports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
