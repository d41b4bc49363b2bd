"""Records a newcomer's first study in docs/tutorial.md: commands, and what they print.

    python benchmarks/first_ten_minutes.py

Processors round differently in training: figures
are given to one digit (`~0.8`), times are left out, and `[...]` stands for lines like those of another site.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from harness import ROOT, suture

PAGE = ROOT / "docs" / "tutorial.md"
START, END = "<!-- recorded by benchmarks/first_ten_minutes.py -->\n", "<!-- end of the recording -->\n"
COMMANDS = (
    "suture init study --yes --site harbor=hospitals/harbor --site lakeside=hospitals/lakeside "
    "--site northfield=hospitals/northfield",
    "suture check study",
    "suture run study --env local --rounds 10 --out runs/first",
    "suture evaluate runs/first study/harbor",
    "suture predict runs/first hospitals/lakeside/images -o predictions.csv",
)
LEFT_OUT = (
    r"─+ lakeside ─.*?(?=─+ all sites)",
    r" +Images of each site .*?(?=in a federation)",
    r"round 2/.*(?=round 10: )",
)
"""Parts of the output that the page does not show."""


def said(command: str, cwd: Path) -> str:
    """What a command prints, on either stream."""
    return suture(*shlex.split(command)[1:], cwd=cwd, COLUMNS="84", NO_COLOR="1")


def rounded(text: str, place: Path) -> str:
    """The output with figures that hold on other machines, without times and this machine's folders."""
    text = text.replace(f"{place}/", "")
    text = re.sub(r"(round \d+/\d+) .*", r"\1", text)
    text = re.sub(r"\(([\d,]+)\s+cells\)", r"(\1 cells)", text)
    for part in LEFT_OUT:
        text = re.sub(part, "[...]\n", text, flags=re.DOTALL)
    text = re.sub(r"\d\.\d{3,}–\d\.\d{3,}", _short, text)
    text = re.sub(r"\d\.\d{3,}", _short, text)
    text = re.sub(r"(loss|AUROC) +~", r"\1 ~", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _short(found: re.Match[str]) -> str:
    ends = [f"{float(number):.1f}" for number in found[0].split("–")]
    return ("–".join(ends) if ends[1:] else f"~{ends[0]}").rjust(len(found[0]))


def record() -> str:
    """The recording as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        said("suture data simulate hospitals --out hospitals", place)
        shown = [
            "$ " + command.replace(" --site", " \\\n    --site") + "\n" + rounded(said(command, place), place)
            for command in COMMANDS
        ]
    return "```console\n" + "\n\n".join(shown) + "\n```\n"


def main() -> None:
    """Write the recording into the page."""
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + record() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
