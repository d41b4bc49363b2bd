"""Draws docs/report.png, the top of the report of the demo, which README and the home page show.

python benchmarks/screenshot.py [RUN]     # needs chromium; without RUN it runs the demo first
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "report.png"
WIDTH, HEIGHT = 1100, 1345
"""Of the part that is shown, in pixels."""


def main() -> None:
    """Write the picture, with few colours, so that it stays small."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1] if sys.argv[1:] else f"{folder}/run").resolve()
        if not sys.argv[1:]:
            command = [sys.executable, "-m", "suture", "run", "demo", "--env", "local", "--out", str(run)]
            subprocess.run(command, check=True)
        shot = Path(folder) / "shot.png"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        page = (run / "report.html").as_uri()
        subprocess.run(["chromium", *options, f"--screenshot={shot}", page], check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
