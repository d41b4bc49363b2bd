"""Draws the pictures of README and docs from runs that it makes, so that none shows an earlier version.

python benchmarks/pictures.py      # `make pictures`; needs chromium, and some minutes: two runs of the demo

Sections 4 and 6 of docs/walkthrough.md speak of what theirs show: read them again afterwards. The diagram
docs/federation.svg is drawn by hand; the curves of docs/results are written by `suture table`.
"""

from __future__ import annotations

import csv
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import ROOT, suture
from PIL import Image, ImageChops

DOCS = ROOT / "docs"
WALK = DOCS / "walkthrough"

JOB = """\
name = "groups"
rounds = 15
[method]
name = "surgical"
local = { lr = 4e-3, epochs = 2, batch_size = 16 }
[model]
name = "cnn"
size = 64
[decision]
sensitivity = 0.9
"""
SITE = """\
[data]
dataset = "hospital"
root = "{root}"
table = "labels.csv"
image_column = "image"
patient_column = "patient"
split_column = "split"
attribute_column = "sex"
"""

TOP = """
const kept = ["Results by class", "Labels of each site"];
const found = [...document.querySelectorAll("main > *")].filter((one) => {
  if (kept.includes(one.querySelector("h2")?.textContent.trim())) return true;
  one.remove();
});
if (found.length < kept.length) throw new Error();
document.querySelectorAll("footer").forEach((one) => one.remove());
"""
"""A script that leaves a report's head, labels and results."""

ROWS = """
const rows = [...table.tBodies[0].rows], kept = new Set();
let name = "";
for (const row of rows) {
  if (row.classList.contains("group")) name = row.textContent.trim();
  if (!NAMES.includes(name)) row.remove();
}
document.body.replaceChildren(table);
"""
PARTS = {
    "thresholds": (
        'const NAMES = ["Nodule", "Pneumothorax"];'
        "const table = document.querySelector('[aria-label^=\"Thresholds of each class\"] table');" + ROWS
    ),
    "groups": (
        'const NAMES = ["Nodule"];'
        "let at = [...document.querySelectorAll('h3')].find((h) => h.textContent === 'By group');"
        "while (!at.querySelector('table')) at = at.nextElementSibling;"
        "const table = at.querySelector('table');" + ROWS
    ),
    "curves": """
const head = [...document.querySelectorAll("h3")].find((h) => h.textContent === "Nodule"), parts = [];
for (let at = head; at && (at === head || at.tagName !== "H3"); at = at.nextElementSibling) parts.push(at);
document.body.replaceChildren(...parts);
""",
}
"""Scripts that leave one part of a report, by the name of its picture."""


def shot(page: Path, width: int, height: int) -> Image.Image:
    """A page as chromium shows it, in a window of that size."""
    picture = page.with_suffix(".png")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = ["chromium", *options, "--virtual-time-budget=2000", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    return Image.open(picture).convert("RGB")


def part(report: Path, script: str, margin: int = 8) -> Image.Image:
    """What a script leaves of a report, without the white around it.

    Raises:
        ValueError: the report no longer has it.
    """
    page = report.with_name("part.html")
    whole = report.read_text().replace("</body>", "")
    page.write_text(f'{whole}<script>try {{ {script} }} catch {{ document.body.textContent = "" }}</script>')
    picture = shot(page, 1100, 2400)
    around = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    box = ImageChops.difference(picture, around).getbbox()
    if box is None:
        raise ValueError(f"{report} has no such part; correct PARTS")
    left, top, right, bottom = box
    return picture.crop((max(left - margin, 0), max(top - margin, 0), right + margin, bottom + margin))


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture with few colours, so that it stays small."""
    picture.quantize(64).save(path, optimize=True)
    print(f"written: {path}")


def with_groups(run: Path, study: Path) -> None:
    """Write the sites of a run as a study, with a column of sexes that are drawn at random, and run it."""
    drawn = random.Random(0)
    for site in sorted(path.parent for path in (run / "sites").glob("*/labels.csv")):
        folder = study / site.name
        folder.mkdir(parents=True)
        (folder / "suture.toml").write_text(SITE.format(root=site / "images"))
        rows = list(csv.DictReader((site / "labels.csv").open()))
        sexes = {row["patient"]: drawn.choice(("female", "male")) for row in rows}
        with (folder / "labels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "sex"])
            writer.writeheader()
            writer.writerows({**row, "sex": sexes[row["patient"]]} for row in rows)
    (study / "job.toml").write_text(JOB)
    suture("run", str(study), "--env", "local", "--limits", "--out", str(study.parent / "groups"), cwd=study)


def maps(run: Path, place: Path) -> Image.Image:
    """The maps of a clear image, a false alarm, a nodule that was found and one that was missed."""
    site = run / "sites" / "harbor"
    decided = place / "decided.csv"
    words = ("predict", str(run / "model"), str(site / "images"), "-o", str(decided), "--decide", "harbor")
    suture(*words, cwd=place)
    above = {
        Path(row["image"]).name: row["Nodule decision"] == "above" for row in csv.DictReader(decided.open())
    }
    rows = [row for row in csv.DictReader((site / "labels.csv").open()) if row["split"] == "test"]
    kinds = {
        "clear": [r for r in rows if "1" not in list(r.values())[3:] and not above[r["image"]]],
        "false alarm": [r for r in rows if r["Nodule"] == "0" and above[r["image"]]],
        "found": [r for r in rows if r["Nodule"] == "1" and above[r["image"]]],
        "missed": [r for r in rows if r["Nodule"] == "1" and not above[r["image"]]],
    }
    (place / "wrong").mkdir()
    for name, found in kinds.items():
        shutil.copyfile(site / "images" / found[0]["image"], place / "wrong" / f"{name}.png")
    classes = ("--class", "Nodule", "--class", "Pneumothorax")
    suture("explain", str(run / "model"), "wrong", "-o", "maps", *classes, cwd=place)
    return Image.open(place / "maps" / "contact sheet.png").convert("RGB")


def main() -> None:
    """Run the demo twice, and write every picture."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        run = place / "walk"
        words = ("run", "demo", "--env", "local", "--set", "decision.sensitivity=0.9", "--out", str(run))
        suture(*words, cwd=place)
        save(part(run / "report.html", TOP, 40), DOCS / "report.png")
        with_groups(run, place / "study")
        for name, script in PARTS.items():
            report = (place / "groups" if name == "groups" else run) / "report.html"
            save(part(report, script), WALK / f"{name}.png")
        save(maps(run, place), WALK / "maps.png")


if __name__ == "__main__":
    main()
