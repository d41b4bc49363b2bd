"""The structure of the package in numbers: rooms, arrows, cycles, depth, sizes, shared lines.

    python benchmarks/structure.py                 # of this checkout
    python benchmarks/structure.py --tree DIR      # of another, to compare

A room is what lies at the top of the package. An arrow is a pair of rooms of which one imports the other.
Depth is the longest chain of imports from module to module. A line of code is neither blank, nor a comment,
nor part of a docstring; a function's length is that of its text. What averaging methods share are lines of
code that stand in another of them too, to the letter.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 40
AVERAGING = ("surgical", "partial", "vanilla")
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


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


def long_functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Functions of more than `LONGEST` lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST:
                yield node.name, length


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


def shared_share(package: Path) -> dict[str, float]:
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


def measure(package: Path) -> dict[str, object]:
    """All figures of a package."""
    known = modules(package)
    texts = {name: path.read_text() for name, path in known.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = {name: imports(tree, known) - {name} for name, tree in trees.items()}
    rooms = {name.split(".")[1] for name in known if "." in name} - {"__main__"}
    root = sorted(p.stem for p in package.glob("*.py") if p.stem not in ("__init__", "__main__"))

    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    arrows: dict[str, set[str]] = {name: set() for name in rooms}
    for name, others in graph.items():
        if room(name) in rooms:
            arrows[room(name)] |= {room(other) for other in others} & rooms - {room(name)}
    code = {name: code_lines(texts[name], trees[name]) for name in known}
    long = [f"{name}.{f} ({n})" for name in known for f, n in long_functions(trees[name])]
    names = [path.stem for path in known.values() if path.stem not in ("__init__", "__main__")]
    return {
        "rooms": len(rooms),
        "root modules": root,
        "package cycles": [" ".join(group) for group in cycles(arrows)],
        "arrows between rooms": sum(map(len, arrows.values())),
        "import depth": depth(graph),
        "modules": len(known),
        "lines of code": sum(map(len, code.values())),
        f"functions over {LONGEST} lines": long,
        "base names used twice": sorted({name for name in names if names.count(name) > 1}),
        "largest files": sorted(((len(t.splitlines()), n) for n, t in texts.items()), reverse=True)[:5],
        "share of averaging methods": shared_share(package),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout")
    package = parser.parse_args().tree / "custom" / "suture"
    for name, value in measure(package).items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
