"""Writing a study folder: a suture.toml for each site, its splits, and a job."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import tomli_w

from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.files import atomic_write
from suture.core.names import as_job
from suture.core.printable import escaped, printable
from suture.core.spreadsheets import no_formula
from suture.data.config import SiteConfig, StorageConfig, load_site_config, parse_data
from suture.data.discovery import Answers, Discovery, discover
from suture.data.readers import read_table
from suture.data.readers.hospital_labels import inline
from suture.simulation.study import CONFIG, check_names

SPLITS = "splits.csv"
"""Name of the file of a site's splits, where its table has none."""

_JOB = """\
# What is trained. Every key of a job may be set here; docs/reference/configuration.md lists them.
{name}  # of its runs; every party sees it
{title}
rounds = 15

[method]
name = "surgical"                      # `suture list` shows the others
local = {{ lr = 1e-3, epochs = 1, batch_size = 16 }}

[model]
name = "cnn"                           # or densenet121, resnet50, ...
size = 64                              # of the images that it sees, in pixels
"""

_REST = """
[privacy]
label_view = "own"   # "all": this site agrees to see every class name of the federation
min_count = 5        # in a federation, figures of rarer classes are withheld

[training]
device = "cpu"       # "cuda" where there is a GPU
"""


def look(sites: Mapping[str, Path], answers: Mapping[str, Answers] | None = None) -> dict[str, Discovery]:
    """Look at the data of each site, by its name.

    Args:
        answers: what a person has said about a site.

    Raises:
        ConfigError: a site has a name that cannot be used.
        DataError: the data of one cannot be made out; names the site.
    """
    check_names(sites)
    found = {}
    for name, path in sites.items():
        try:
            found[name] = discover(path, (answers or {}).get(name, Answers()))
        except (DataError, LabelError) as error:
            raise DataError(f"{name}: {error}") from error
    return found


@contextmanager
def labelled_data(path: Path) -> Iterator[tuple[SiteConfig, bool]]:
    """Give the configuration of labelled data, and whether it says which images are for test.

    Args:
        path: a suture.toml, a folder with one, or a table or folder as `suture init` reads it, whose decoded
            images are deleted at the end.

    Raises:
        ConfigError, DataError: it cannot be read.
    """
    described = path / CONFIG if path.is_dir() else path
    if path.suffix == ".toml" or (path.is_dir() and described.is_file()):
        yield load_site_config(described), True
        return
    guess = discover(path)
    data = parse_data(guess.data if guess.has_splits else guess.data | {"split": "patients"}, str(path))
    with tempfile.TemporaryDirectory(prefix="suture-") as folder:
        storage = StorageConfig(state=Path(folder), cache=Path(folder))
        yield SiteConfig(data=data, storage=storage), guess.has_splits


def refuse_existing(study: Path, sites: Iterable[str]) -> None:
    """Refuse to write a study over another.

    Raises:
        ConfigError: the study is a file, or a site has a suture.toml already.
    """
    if study.exists() and not study.is_dir():
        raise ConfigError(f"{study} is a file; name a folder for the study")
    there = [path for name in sites if (path := study / name / CONFIG).exists()]
    if there:
        raise ConfigError(f"{there[0]} existsexists; edit it, or remove it to write a new one")


def write_study(study: Path, found: Mapping[str, Discovery]) -> list[Path]:
    """Write the folder of each site, and a job.toml where there is none; return the files.

    Raises:
        ConfigError: a site has a suture.toml already; then nothing is written.
    """
    refuse_existing(study, found)
    written = []
    for name, guess in found.items():
        folder = study / name
        folder.mkdir(parents=True, exist_ok=True)
        if not guess.has_splits:
            atomic_write(folder / SPLITS, splits(guess).encode())
            written.append(folder / SPLITS)
        atomic_write(folder / CONFIG, as_toml(movable(guess, folder)).encode())
        written.append(folder / CONFIG)
    if not any((study / name).exists() for name in ("job.toml", "job.py")):
        title = study.resolve().name
        names = {"name": as_job(title), "title": printable(title)}
        lines = {key: tomli_w.dumps({key: text}).rstrip() for key, text in names.items()}
        atomic_write(study / "job.toml", _JOB.format(**lines).encode())
        written.append(study / "job.toml")
    return written


def splits(guess: Discovery) -> str:
    """Return a CSV of the split of each patient: 70 % train, 10 % validation, 20 % test, by seed."""
    # Of all patients: an image that is missing today may be there tomorrow.
    values = guess.data | {"split": "patients", "partial": False}
    table = read_table(parse_data(values, str(values["table"]))).table
    by_patient = dict(zip(table.patients, table.split, strict=True))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("patient", "split"))
    writer.writerows((no_formula(patient), part) for patient, part in sorted(by_patient.items()))
    return text.getvalue()


def movable(guess: Discovery, folder: Path) -> Discovery:
    """Return the guess for a site's folder of a study, with paths of data in the study from there on.

    A study that holds its data can then be moved as a whole.
    """
    here = folder.resolve()
    inside = {k: v for k in ("root", "table") if Path(v := guess.data[k]).is_relative_to(here.parent)}
    near = {key: Path(os.path.relpath(path, here)).as_posix() for key, path in inside.items()}
    return replace(guess, data=guess.data | near)


def as_toml(guess: Discovery) -> str:
    """Return a suture.toml that says of each key why it is so."""
    data, reasons = dict(guess.data), dict(guess.reasons)
    if not guess.has_splits:
        data |= {"split": "file", "split_file": SPLITS}
        reasons["split"] = "the table has no splits; they were made once, by patient"
    lines = ["# Written by `suture init` after a look at the data. Check each line.", ""]
    for warning in guess.warnings:
        lines += [f"# {escaped(line)}" for line in warning.split("\n")]
    if guess.left_out:
        lines += ["# Columns that are not labels:"]
        lines += [f"#   {escaped(f'{name!r}: {why}')}" for name, why in guess.left_out.items()]
    lines.append("[data]")
    for key, value in data.items():
        text = inline(key, value) if isinstance(value, dict) else tomli_w.dumps({key: value}).rstrip()
        why = f"# {escaped(reasons[key])}" if key in reasons else ""
        lines += [f"{text}  {why}".rstrip()] if "\n" not in text else [*filter(None, [why]), text]
    return "\n".join(lines) + "\n" + _REST
