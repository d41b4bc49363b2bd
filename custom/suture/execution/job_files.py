"""Where the files of jobs lie, by their names; nothing here runs one of them, or imports torch."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

from suture.core.entry_points import of_this_distribution
from suture.core.errors import ConfigError, unknown
from suture.core.files import read_regular, read_toml


def _installed_jobs() -> Path:
    """Return the folder of the jobs that come with Suture; in a clone suture_jobs is a link to jobs/."""
    return (Path(__file__).resolve().parents[2] / "suture_jobs").resolve()


def jobs_folder() -> Path:
    """Return the folder of the jobs: those that are installed, else that of the working directory."""
    return _installed_jobs() if _installed_jobs().is_dir() else Path("jobs").resolve()


def known_jobs() -> dict[str, Path]:
    """Return the job files in jobs/ by name."""
    return {path.parent.name: path for path in _files() if not _is_flares(path)}


def jobs_of_flare() -> dict[str, Path]:
    """Return by name the programs in jobs/ that run FLARE's own workflow."""
    return {path.parent.name: path for path in _files() if _is_flares(path)}


def _files() -> list[Path]:
    return sorted(path for name in ("job.py", "job.toml") for path in jobs_folder().glob(f"*/{name}"))


def _is_flares(path: Path) -> bool:
    """Whether a job.py has the script of a site beside it, as FLARE's recipes want."""
    return path.name == "job.py" and (path.parent / "client.py").is_file()


def job_file(job: str | Path, *, trust: bool = False) -> Path:
    """Return the absolute path of the file of the job of that name in jobs/, or of that file or folder.

    Args:
        trust: whether the job of a folder may be code. A .py file that `job` names itself always may.

    Raises:
        ConfigError: there is none (names the nearest job), the folder holds two, or its job is code.
    """
    path, jobs = Path(job).expanduser(), known_jobs()
    if path.suffix not in (".py", ".toml"):
        inside = [file for name in ("job.py", "job.toml") if (file := path / name).is_file()]
        if len(inside) > 1:
            raise ConfigError(
                f"{path} contains both job.py and job.toml; name the one to run, or remove the other"
            )
        path = inside[0] if inside else jobs.get(str(job), path)
    if _is_flares(path) or str(job) in jobs_of_flare():
        program = jobs_of_flare().get(str(job), path)
        raise ConfigError(
            f"{job} is a job of FLARE's own workflow; run it: python {shlex.quote(str(program))}"
        )
    if not path.is_file() and not jobs:
        raise ConfigError(
            f"no job {str(job)!r}: {jobs_folder()} contains no jobs; give the path of a job file"
        )
    if path.is_dir() and (path / "suture.toml").is_file():
        raise ConfigError(
            f"{path} is one site; a job runs on all sites of a study: name {path.absolute().parent}"
        )
    if (path / "run.json").is_file() or (path / "model.json").is_file():
        raise ConfigError(
            f"{path} is a trained model, not a job; to export the model: suture model export "
            f"{shlex.quote(str(path))}. To export or run a job, name it or its study"
        )
    if path.is_dir():
        raise ConfigError(
            f"{path} contains neither job.toml nor job.py; `suture init` writes one for data of hospitals"
        )
    if not path.is_file():
        studies = (str(file.parent) for file in path.parent.glob("*/job.toml"))
        raise unknown("job or study folder", str(job), [*jobs, *studies])
    if not trust and Path(job).suffix != ".py":
        refuse_code(path.resolve())
    return path.resolve()


def refuse_code(path: Path) -> None:
    """Refuse a job's file, an absolute path without links, that is code and does not belong to this package.

    Raises:
        ConfigError: it is; names the file and the remedy.
    """
    if path.suffix != ".toml" and not path.is_relative_to(_installed_jobs()):
        raise ConfigError(
            f"{path} is code that would run with your rights. Read it first; then name the file itself, "
            "or add --trust (in Python: trust=True). Or ask its author for a job.toml, which is data "
            "only"
        )


def summary(path: Path) -> str:
    """Return the first line of the docstring of a job.py, or of the comment of a job.toml, and its presets.

    Raises:
        ConfigError: the file cannot be read, or is not Python or TOML.
    """
    if path.suffix == ".toml":
        first = read_regular(path).decode(errors="replace").partition("\n")[0]
        line = first.removeprefix("#").strip() if first.startswith("#") else ""
        notes = (f"--preset {name}: {preset['note']}" for name, preset in _presets(path).items())
        return " ".join([line, *notes])
    return (ast.get_docstring(_parse(path)[0]) or "").partition("\n")[0]


def preset_settings(job: str | Path, name: str | None, *, trust: bool = False) -> list[str]:
    """Return the settings of a preset of a job, as --set has them; none without a name.

    Raises:
        ConfigError: there is no such job or preset, or the job's presets are not as a job.toml has them.
    """
    if name is None:
        return []
    presets = _presets(job_file(job, trust=trust))
    if name not in presets:
        raise unknown(f"preset of {job}", name, presets)
    return [f"{key}={json.dumps(value)}" for key, value in presets[name]["set"].items()]


def _presets(path: Path) -> dict[str, dict[str, Any]]:
    """Return by name the presets of a job.toml: ``note``, what one needs, and ``set``, its settings."""
    presets = read_toml(path).get("presets", {}) if path.suffix == ".toml" else {}
    for preset in presets.values() if isinstance(presets, dict) else [presets]:
        given = {key: type(value) for key, value in preset.items()} if isinstance(preset, dict) else None
        if given != {"note": str, "set": dict}:
            raise ConfigError(f"{path}: a preset is a section [presets.NAME] with a note and a table set")
    return presets


def may_register(path: Path) -> bool:
    """Whether a job's file may bring methods of its own: it names `register`, or imports more than Suture.

    Raises:
        ConfigError: the file cannot be read, or is no Python.
    """
    if path.suffix == ".toml":
        return False
    module, source = _parse(path)
    imported = [name.name for node in ast.walk(module) if isinstance(node, ast.Import) for name in node.names]
    imported += [node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return b"register" in source or not all(map(of_this_distribution, imported))


def _parse(path: Path) -> tuple[ast.Module, bytes]:
    """Return a file, which is not run, as syntax and as it is."""
    try:
        source = read_regular(path)
        return ast.parse(source), source
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
