"""A working directory of somebody else: modules that must not be imported in the place of installed ones."""

from __future__ import annotations

from pathlib import Path

NAMES = ("torch", "nvflare", "numpy", "monai", "multiprocessing", "typer", "suture_cwd")


def plant(folder: Path) -> Path:
    """Write the modules, which end a process that imports them; return the file that then names them."""
    mark = folder / "imported"
    for name in NAMES:
        program = f"open({str(mark)!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        (folder / f"{name}.py").write_text(program)
    return mark
