"""How large the code is and how much hangs together, in numbers.

    python benchmarks/structure.py                 # of this checkout
    python benchmarks/structure.py --tree DIR      # of another, to compare

The engine is `custom/suture`; other packages lie beside it. What a line counts:

- A room is a folder at the top of the engine. An arrow is a pair of rooms of which one imports the other;
  n rooms in an order can have n (n - 1) / 2. Depth is the longest chain of imports of modules.
- A line of code is neither blank, nor a comment, nor part of a docstring.
- A public name stands at the top of a module, without leading underscore.
- A setting is a key that a user can write into a job, a suture.toml, a table or a pretraining: a field
  of their classes, at any depth, counted in the class that first declares it: a value, or a table of others.
  Nothing uses a value if no file of jobs/, examples/, benchmarks/ and the papers' tables writes or reads it.
- Commands and options are those of docs/reference/commands.md. Words are those of the README, of the papers'
  pages and of docs/, but for docs/reference, results and what is generated.
- Three walks. A task: what `Site.answer` runs of the package to train a round in the smallest federation: how
  many functions, in how many files. A field of an answer: the modules that name it, of three examples. A data
  set: the files of the checkout that name it, beside its reader, of the data set that the fewest name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
ENGINE = "suture"
AVERAGING = ("surgical", "partial", "vanilla")
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
WRITTEN = (
    *("Job", "SiteConfig", "ServerConfig", "TableSpec", "Pretraining"),
    *("DatasetConfig", "SimulatedSites", "SingleTargetSites", "StudySites"),
)
"""The classes of what a user writes, or their base."""
USES = ("jobs", "custom/suture_papers/*/tables", "examples", "benchmarks")
ANSWERED = ("train_loss", "spent", "computed_on")
SERVER = ("Server.assign", "Receiver.__call__", "Server.close_round")
TINY = "run demo --env local --workers 1 --rounds 1 --set simulation.images=30 --set simulation.held_out=30"


def modules(package: Path) -> dict[str, Path]:
    """Every module by its dotted name; a package is its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a module imports, wherever in its text."""
    found: set[str] = set()
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    for node in set(ast.walk(tree)) - {inner for guard in guarded for inner in ast.walk(guard)}:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known.keys()
            found |= {node.module} if names - known.keys() else set()
    return found & known.keys()


def docstrings(tree: ast.AST) -> set[int]:
    """The lines of all bare strings: docstrings of modules, classes, functions and attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """The numbers of the lines of code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - docstrings(tree)


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


def cycles(arrows: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of rooms that reach each other."""

    def reach(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            for other in arrows.get(left.pop(), set()) - found:
                found.add(other)
                left.append(other)
        return found

    reached = {room: reach(room) for room in arrows}
    groups = {
        tuple(sorted(other for other in reached[room] if room in reached.get(other, set())))
        for room in arrows
        if room in reached[room]
    }
    return sorted(groups)


def share_of_averaging(package: Path) -> dict[str, float]:
    """Of each averaging method, the share of its lines of code that stand in another one, to the letter."""
    lines = {}
    for name in AVERAGING:
        text = (package / "methods" / f"{name}.py").read_text()
        kept = code_lines(text, ast.parse(text))
        lines[name] = [row.strip() for number, row in enumerate(text.splitlines(), 1) if number in kept]
    share = {}
    for name, own in lines.items():
        others = {row for other, rows in lines.items() if other != name for row in rows}
        share[name] = round(sum(row in others for row in own) / len(own), 3)
    return share


def public_names(trees: Iterable[ast.Module]) -> dict[str, int]:
    """How many functions, classes and constants modules define for others."""
    found = dict.fromkeys(("functions", "classes", "constants"), 0)
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found["functions"] += not node.name.startswith("_")
        elif isinstance(node, ast.ClassDef):
            found["classes"] += not node.name.startswith("_")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for one in targets for n in ast.walk(one) if isinstance(n, ast.Name)]
            found["constants"] += sum(not name.startswith("_") for name in names)
    return found


def rooms(engine: Path, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The rooms of the engine, each with those that it imports."""
    arrows: dict[str, set[str]] = {path.parent.name: set() for path in engine.glob("*/__init__.py")}
    for name, others in graph.items():
        if name.split(".")[0] != ENGINE:
            continue
        start, *ends = (f"{module}.".split(".")[1] for module in (name, *others))
        if start in arrows:
            arrows[start] |= {end for end in ends if end in arrows} - {start}
    return arrows


def all_modules(tree: Path) -> dict[str, Path]:
    """Every module of every package."""
    return {
        name: path for folder in (tree / "custom").glob("suture*/") for name, path in modules(folder).items()
    }


def measure(tree: Path) -> dict[str, object]:
    """What can be measured without running anything."""
    known = all_modules(tree)
    texts = {name: path.read_text() for name, path in known.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = {name: imports(trees[name], known) - {name} for name in known}
    code = {name: len(code_lines(texts[name], trees[name])) for name in known}
    packages: dict[str, list[str]] = {}
    for name in known:
        packages.setdefault(name.partition(".")[0], []).append(name)
    engine, named = tree / "custom" / ENGINE, [words_of(one) for one in trees.values()]
    arrows = rooms(engine, graph)
    return {
        "rooms": len(arrows),
        "root modules": sorted(p.stem for p in engine.glob("*.py") if not p.stem.startswith("__")),
        "package cycles": [" ".join(group) for group in cycles(arrows)],
        "arrows between rooms": sum(map(len, arrows.values())),
        "possible arrows": len(arrows) * (len(arrows) - 1) // 2,
        "import depth": depth(graph),
        "modules": {package: len(names) for package, names in packages.items()},
        "lines of code": {package: sum(code[name] for name in names) for package, names in packages.items()},
        "public names": {package: public_names(trees[n] for n in ns) for package, ns in packages.items()},
        "imports a module": round(sum(map(len, graph.values())) / len(graph), 2),
        "largest files": sorted(((len(t.splitlines()), n) for n, t in texts.items()), reverse=True)[:5],
        "share of averaging methods": share_of_averaging(engine),
        **commands(tree),
        "words of docs": words_of_docs(tree),
        "modules that name a field of an answer": {
            field: sum(field in words for words in named) for field in ANSWERED
        },
        "files that name a data set": min(files_of_data_sets(tree, trees, known).values()),
    }


def commands(tree: Path) -> dict[str, int]:
    """Commands and their options, from their generated page."""
    page = (tree / "docs" / "reference" / "commands.md").read_text()
    return {
        "commands": len(re.findall(r"^##+ `", page, re.M)),
        "options": len(re.findall(r"^\| `-", page, re.M)),
    }


def words_of_docs(tree: Path) -> int:
    """Words of the pages that somebody writes, without what a script has recorded."""
    docs = tree / "docs"
    pages = [tree / "README.md", *docs.rglob("*.md"), *(tree / "custom").glob("suture_*/**/*.md")]
    own = [
        p
        for p in pages
        if p.parent != docs / "reference" and (p.parent.name != "results" or p.stem == "README")
    ]
    recorded = r"<!-- recorded by .*?<!-- end of the recording -->"
    texts = [re.sub(recorded, "", page.read_text(), flags=re.DOTALL) for page in own]
    return sum(
        len(t.split()) for t in texts if "Generated by" not in t[:300] and "prints this page" not in t[:300]
    )


def words_of(tree: ast.AST) -> set[str]:
    """What a module names: variables, attributes, keywords, and texts of one word."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.keyword, ast.arg)):
            found.add(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def files_of_data_sets(
    tree: Path, trees: Mapping[str, ast.Module], known: Mapping[str, Path]
) -> dict[str, int]:
    """Of each data set, the files of the checkout that write its word, but for its reader's."""
    readers: dict[str, Path] = {}
    for name, module in trees.items():
        for node in ast.walk(module):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "dataset":
                for word in re.findall(r"Literal\['(\w+)'\]", ast.unparse(node.annotation)):
                    readers[word] = known[name]
    texts = {
        path: path.read_text(errors="replace")
        for folder in ("custom", "tests", "docs", "jobs")
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".md", ".toml", ".json")
    }
    texts[tree / "pyproject.toml"] = (tree / "pyproject.toml").read_text()
    return {
        word: sum(bool(re.search(rf"\b{word}\b", text)) for path, text in texts.items() if path != own)
        for word, own in readers.items()
    }


def settings(tree: Path) -> dict[str, object]:
    """How many settings there are, and those that nothing uses; imports the code of the checkout."""
    found: dict[tuple[str, str], bool] = {}
    for kind in written_classes(tree):
        for name, field in typed_fields(kind).items():
            first = next(base for base in reversed(kind.__mro__) if name in own_annotations(base))
            if not field.exclude:
                found[first.__name__, name] = any(map(typed_fields, classes_in(field.annotation)))
    texts = [
        path.read_text(errors="replace")
        for folder in USES
        for path in tree.glob(f"{folder}/**/*")
        if path.suffix in (".py", ".toml", ".json", ".md", ".sh", ".ipynb")
    ]
    pairs = re.findall(r"(\w+)[\"']?\s*[=:]|\.(\w+)", "\n".join(texts))
    used = {word for pair in pairs for word in pair}
    unused = sorted(
        f"{kind}.{name}" for (kind, name), table in found.items() if not table and name not in used
    )
    tables = sum(found.values())
    return {
        "settings": {"values": len(found) - tables, "tables": tables},
        "settings that nothing uses": unused,
    }


def written_classes(tree: Path) -> set[Any]:
    """The classes of what a user writes, with all that are within them or extend them."""
    names = all_modules(tree)
    runnable = [n for n in names if not n.endswith("__main__") and "bundle_files" not in n]
    loaded = [importlib.import_module(name) for name in runnable]
    left = [kind for module in loaded for name, kind in vars(module).items() if name in WRITTEN]
    reached: set[Any] = set()
    while left:
        kind = left.pop()
        if kind not in reached:
            reached.add(kind)
            left += kind.__subclasses__()
            left += [one for field in typed_fields(kind).values() for one in classes_in(field.annotation)]
    return reached


def typed_fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a pydantic model or a validated dataclass; none of what is neither."""
    found: Mapping[str, Any] = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", {})
    return found


def own_annotations(kind: type) -> Mapping[str, object]:
    """The annotations that a class itself writes."""
    found: Mapping[str, object] = vars(kind).get("__annotations__", {})
    return found


def classes_in(annotation: Any) -> list[Any]:
    """The classes that an annotation names, but for those of Python."""
    if isinstance(annotation, type) and annotation.__module__.startswith(ENGINE):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in classes_in(part)]


def walks_of_a_round() -> dict[str, object]:
    """The functions of the code that one round of training runs, in the smallest federation.

    At a site: what `Site.answer` runs for the first such task; it makes the model, too. At the server: what
    assigns the tasks, takes the answers of the run and closes the round.
    """
    walks: dict[str, set[CodeType]] = {"a site": set(), "the server": set()}
    inside, depth_ = "", 0

    def begins(frame: FrameType) -> str:
        name = frame.f_code.co_qualname
        if name == "Site.answer" and frame.f_locals["task"].task == "train" and not walks["a site"]:
            return "a site"
        return "the server" if name in SERVER else ""

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside, depth_
        code = frame.f_code
        if event == "call" and (depth_ or begins(frame)):
            inside = inside if depth_ else begins(frame)
            depth_ += 1
            if f"custom/{ENGINE}" in code.co_filename and not code.co_name.startswith("<"):
                walks[inside].add(code)
        elif event == "return" and depth_:
            depth_ -= 1

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
    return {
        f"a round runs at {party}": {"functions": len(walk), "files": len({c.co_filename for c in walk})}
        for party, walk in walks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--no-run", action="store_true", help="without the walks of a round, which run one")
    given = parser.parse_args()
    tree = given.tree.resolve()
    sys.path.insert(0, str(tree / "custom"))
    figures = {**measure(tree), **settings(tree), **({} if given.no_run else walks_of_a_round())}
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
