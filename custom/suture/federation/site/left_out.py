"""What a site left out of its data. It stays at the site, and no message has a field for it.

A simulation runs on the machine of the data: it shows what each of its sites has written.
"""

from __future__ import annotations

from pathlib import Path

from suture.core.files import read_json, write_json
from suture.federation.store import experiment_folder

LEFT_OUT_FILE = "left_out.json"


def write_left_out(folder: Path, sentences: list[str]) -> None:
    """Write what a site left out of its data beside its states.

    Args:
        folder: of the experiment at the site.

    Raises:
        DiskError: the folder cannot be written.
    """
    write_json(folder / LEFT_OUT_FILE, {"left_out": sentences}, private=True)


def read_left_out(run: Path, experiment: str) -> list[str]:
    """Return what the sites of a simulation left out of their data, each sentence with its site.

    Args:
        run: folder of the simulation's run.

    Raises:
        DataError: a file is damaged.
    """
    found: list[str] = []
    for site in sorted((run / "sites").glob("*")):
        path = experiment_folder(site / "state", experiment) / LEFT_OUT_FILE
        sentences = read_json(path, "left_out")["left_out"] if path.is_file() else ()
        found += [f"{site.name}: {sentence}" for sentence in sentences]
    return found
