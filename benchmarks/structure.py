"""How large the code is and how much hangs together: `python benchmarks/structure.py` prints one table.

- A line of code is neither blank, nor a comment, nor part of a docstring. Depth is the longest chain of
  imports of modules. A public name stands at the top of a module, without leading underscore.
- A setting is a key that a user can write into a job, a suture.toml, a table or a pretraining: a field of
  their classes, at any depth, counted in the class that first declares it. Nothing uses one if no file of
  jobs/, examples/, benchmarks/, the papers' tables and the tests' forms of tables writes or reads it.
- A task: what runs between the call of a site and its answer to a `train` task, in the thread that answers:
  the first task, which makes the model, and one of round 2. A move is a function that is entered in another
  file of custom/ than the one before it. A whole run: handshake, two rounds, three sites and the test,
  without the command around it; its code lines are those of the functions that run, and of their files.
- Seconds are the processor's. The start of a site is what its process in FLARE's simulator has used as round
  1 begins; memory is the largest resident set there, with 0.25 MB of weights.

`--tree DIR` measures another checkout, `--quick` leaves out what needs FLARE's simulator.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import resource
import statistics
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, get_args

from harness import ROOT, apart, command, show, suture

ENGINE = "suture"
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
WRITTEN = (
    *("Job", "SiteConfig", "ServerConfig", "TableSpec", "Pretraining"),
    *("DatasetConfig", "SimulatedSites", "SingleTargetSites", "StudySites"),
)
"""The classes of what a user writes, or their base."""
USES = (
    *("jobs/**/*", "custom/suture_papers/*/tables/**/*", "custom/suture_papers/studies/*", "examples/**/*"),
    *("benchmarks/**/*", "tests/hospital*.py"),
)
TINY = "run demo --env local --workers 1 --rounds 2 --set simulation.images=30 --set simulation.held_out=30"

Row = tuple[str, object]


# What stands in the files


def modules(tree: Path) -> dict[str, Path]:
    """Every module of every package by its dotted name; a package is its `__init__`."""
    found = {}
    for path in sorted((tree / "custom").glob("suture*/**/*.py")):
        parts = path.relative_to(tree / "custom").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if "suture_jobs" not in name}


def imports(module: ast.AST, known: Mapping[str, Path]) -> set[str]:
    """The modules of the packages that a module imports, wherever in its text, but for its types."""
    found: set[str] = set()
    guarded = [n for n in ast.walk(module) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    for node in set(ast.walk(module)) - {inner for guard in guarded for inner in ast.walk(guard)}:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known.keys()
            found |= {node.module} if names - known.keys() else set()
    return found & known.keys()


@cache
def code_lines(path: Path) -> set[int]:
    """The numbers of the lines of code."""
    text, lines = path.read_text(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def depth(graph: Mapping[str, set[str]]) -> int:
    """Modules in the longest chain of imports; a cycle is entered once."""

    @cache
    def longest(module: str) -> int:
        open_.add(module)
        found = 1 + max((longest(other) for other in graph[module] if other not in open_), default=0)
        open_.discard(module)
        return found

    open_: set[str] = set()
    return max(map(longest, graph))


def public_names(module: ast.Module) -> int:
    """How many functions, classes and constants a module defines for others."""
    names: list[str] = []
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [n.id for one in targets for n in ast.walk(one) if isinstance(n, ast.Name)]
    return sum(not name.startswith("_") for name in names)


def of_files(tree: Path) -> Iterator[Row]:
    """Sizes of the packages, and how the engine hangs together."""
    known = modules(tree)
    parsed = {name: ast.parse(path.read_text()) for name, path in known.items()}
    graph = {name: imports(parsed[name], known) - {name} for name in known}
    packages = dict.fromkeys(name.partition(".")[0] for name in known)
    for package in packages:
        own = [path for name, path in known.items() if name.partition(".")[0] == package]
        yield f"{package}: code lines, files", f"{sum(len(code_lines(p)) for p in own):,}, {len(own)}"
    engine = [name for name in known if name.partition(".")[0] == ENGINE]
    yield "all: code lines, files", f"{sum(map(len, map(code_lines, known.values()))):,}, {len(known)}"
    yield "engine: imports a module", round(statistics.mean(len(graph[name]) for name in engine), 2)
    yield "all: imports a module", round(statistics.mean(map(len, graph.values())), 2)
    yield "engine: depth of imports", depth({name: graph[name] & {*engine} for name in engine})
    yield "all: depth of imports", depth(graph)
    yield "engine: public names", sum(public_names(parsed[name]) for name in engine)
    for folder in ("benchmarks", "examples", "tests"):
        own = sorted((tree / folder).rglob("*.py"))
        yield f"{folder}: code lines, files", f"{sum(len(code_lines(p)) for p in own):,}, {len(own)}"


# Settings


def settings(tree: Path) -> tuple[int, int, list[str]]:
    """How many values and tables of values a user can write, and the values that nothing uses."""
    found: dict[tuple[str, str], bool] = {}
    for kind in written_classes(tree):
        for name, info in typed_fields(kind).items():
            first = next(
                base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", {})
            )
            if not info.exclude:
                found[first.__name__, name] = any(map(typed_fields, classes_in(info.annotation)))
    texts = [
        path.read_text(errors="replace")
        for pattern in USES
        for path in tree.glob(pattern)
        if path.suffix in (".py", ".toml", ".json", ".md", ".sh", ".ipynb")
    ]
    pairs = re.findall(r"(\w+)[\"']?\s*[=:]|\.(\w+)", "\n".join(texts))
    used = {word for pair in pairs for word in pair}
    unused = [f"{kind}.{name}" for (kind, name), table in found.items() if not table and name not in used]
    return len(found) - sum(found.values()), sum(found.values()), sorted(unused)


def written_classes(tree: Path) -> set[Any]:
    """The classes of what a user writes, with all that are within them or extend them."""
    runnable = [n for n in modules(tree) if not n.endswith("__main__") and "bundle_files" not in n]
    loaded = [importlib.import_module(name) for name in runnable]
    left = [kind for module in loaded for name, kind in vars(module).items() if name in WRITTEN]
    reached: set[Any] = set()
    while left:
        kind = left.pop()
        if kind not in reached:
            reached.add(kind)
            left += kind.__subclasses__()
            left += [one for info in typed_fields(kind).values() for one in classes_in(info.annotation)]
    return reached


def typed_fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a pydantic model or a validated dataclass; none of what is neither."""
    found: Mapping[str, Any] = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", {})
    return found


def classes_in(annotation: Any) -> list[Any]:
    """The classes that an annotation names, but for those of Python."""
    if isinstance(annotation, type) and annotation.__module__.startswith(ENGINE):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in classes_in(part)]


# What runs


class Walk:
    """what runs between a call and its return: the functions in the order in which they are entered."""

    def __init__(self) -> None:
        self.entered: list[CodeType] = []

    @property
    def functions(self) -> set[CodeType]:
        """Each once."""
        return {*self.entered}

    @property
    def moves(self) -> int:
        """How often a function is entered in another file than the one before it."""
        return sum(a.co_filename != b.co_filename for a, b in pairwise(self.entered))

    @property
    def files(self) -> set[str]:
        """The files that they are in."""
        return {code.co_filename for code in self.functions}

    def lines(self) -> tuple[int, int]:
        """Lines of code of the functions, and of their files."""
        own = set[tuple[str, int]]()
        for code in self.functions:
            text, first = inspect.getsourcelines(code)
            own |= {(code.co_filename, line) for line in range(first, first + len(text))}
        own &= {(file, line) for file in self.files for line in code_lines(Path(file))}
        return len(own), sum(len(code_lines(Path(file))) for file in self.files)


def walks(tree: Path) -> dict[str, Walk]:
    """The walks of a small run of the demo in the loop: of a site's tasks, and of the whole run."""
    found: dict[str, Walk] = {}
    open_: dict[str, FrameType] = {}
    here = f"{tree / 'custom'}{os.sep}"

    def is_function(code: CodeType) -> bool:  # and neither a comprehension nor what an import runs
        flags, name = code.co_flags, code.co_name
        return code.co_filename.startswith(here) and bool(flags & inspect.CO_OPTIMIZED) and name[0] != "<"

    def begins(frame: FrameType) -> str:
        name = frame.f_code.co_qualname
        if name == "federate":
            return "run"
        if name == "Site.answer" and frame.f_locals["task"].task == "train" and "run" in found:
            return "task" if "task" not in found else f"task of round {frame.f_locals['task'].round}"
        return ""

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not is_function(code):
            return
        if event == "call":
            name = begins(frame)
            if name and name not in found:
                found[name], open_[name] = Walk(), frame
            for name in open_:
                found[name].entered.append(code)
        elif event == "return":
            for name in [name for name, first in open_.items() if first is frame]:
                del open_[name]

    main = importlib.import_module(f"{ENGINE}.cli").main
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments, sys.argv = sys.argv, [ENGINE, *TINY.split(), "--out", f"{folder}/run"]
        sys.setprofile(note)
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
            sys.argv = arguments
    return found


def of_walks(tree: Path) -> Iterator[Row]:
    """The table's rows of the walks."""
    found = walks(tree)
    for name, key in (("first", "task"), ("second", "task of round 2")):
        walk = found[key]
        figures = (len(walk.files), walk.moves, len(walk.functions))
        yield f"a site's {name} `train` task: files, moves, functions", "{}, {}, {}".format(*figures)
    run = found["run"]
    yield "a whole run: files, functions", f"{len(run.files)}, {len(run.functions)}"
    yield "a whole run: code lines entered, of those files", "{:,}, {:,}".format(*run.lines())


# What it costs


def cpu(*words: str, repeats: int = 5) -> float:
    """The median of the CPU seconds of a command."""
    seconds = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        suture(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(seconds)


def bundle() -> float:
    """MB of the demo's job as `suture export --bundle` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        suture("export", "demo", "--out", folder, "--bundle")
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6


def in_flare() -> tuple[dict[str, float], dict[str, float]]:
    """CPU seconds until round 1 begins, and the peak memory in MB, of the server and of a site."""
    from parts import rounds

    cost = rounds.run(rounds.flare, rounds.Idle(rounds.MODELS["0.25 MB"], 5))
    return cost.start, cost.peak


def of_costs(quick: bool) -> Iterator[Row]:
    """The table's rows of what it costs."""
    yield "bundle of the demo, MB", f"{bundle():.2f}"
    for word in ("--version", "--help"):
        yield f"`suture {word}`, CPU s", f"{cpu(word, repeats=1 if quick else 5):.2f}"
    if not quick:
        start, peak = apart(in_flare)
        yield "start of a FLARE site, CPU s", f"{start['site']:.2f}"
        yield "peak memory of server and site, MB", f"{peak['server']:.0f}, {peak['site']:.0f}"


def main(quick: bool, tree: str = str(ROOT)) -> None:
    """Print the table."""
    place = Path(tree).resolve()
    sys.path.insert(0, str(place / "custom"))
    os.environ["PYTHONPATH"] = str(place / "custom")
    unused: list[str] = []

    def rows() -> Iterator[Row]:
        yield from of_files(place)
        values, tables, found = settings(place)
        unused.extend(found)
        yield "settings: values, tables, values that nothing uses", f"{values}, {tables}, {len(found)}"
        yield from of_walks(place)
        yield from of_costs(quick)

    show(("what", "figure"), rows())
    print("\nsettings that nothing uses:", ", ".join(unused))


if __name__ == "__main__":
    command(main)
