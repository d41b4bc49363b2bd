"""The sentences of all errors, out of the sources: what tests/refusals.txt lists.

A sentence is a text in an argument of an error, or of a function that makes an error of its argument; in what
the argument's names are bound to in the same function; and in what functions of the same file return for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

_FIRST = {"SutureError", "ValueError", "BadParameter", "PydanticCustomError"}
"""The expected failures, and what validation and the command line make one of."""

_PLAIN = re.compile(r"[\"'(]?[a-z]+[,;:.)]?")
"""A word of a sentence. What has fewer than two, or is as short, is a name, a key, a file or a separator."""


def sentences(sources: Path) -> str:
    """Return the sentences of the errors of all packages in a folder, each file's below its name."""
    modules = {path: ast.parse(path.read_text()) for path in sorted(sources.rglob("*.py"))}
    classes = _error_classes(modules.values())
    functions = [function for module in modules.values() for function in _functions(module)]
    makers = classes | {one.name for one in functions if _makes_an_error_of_its_argument(one, classes)}
    lines = []
    for path, module in modules.items():
        if found := sorted(filter(_is_sentence, _texts_of_errors(module, makers))):
            lines += [str(path.relative_to(sources)), *(f"  {text}" for text in found)]
    return "\n".join(lines) + "\n"


def _error_classes(modules: Collection[ast.Module]) -> set[str]:
    bases = {
        node.name: {_name(base) for base in node.bases}
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    found = set(_FIRST)
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def _makes_an_error_of_its_argument(function: ast.FunctionDef, classes: Collection[str]) -> bool:
    own = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    return any(own & set(_shown(argument)) for argument in _arguments(function, classes))


def _shown(value: ast.AST) -> Iterator[str]:
    """The names that stand in a text as they are."""
    if isinstance(value, ast.Name):
        yield value.id
    if isinstance(value, ast.JoinedStr | ast.FormattedValue | ast.BinOp | ast.IfExp):
        for part in ast.iter_child_nodes(value):
            yield from _shown(part)


def _is_sentence(text: str) -> bool:
    words = text.split()
    return len(words) > 3 and sum(bool(_PLAIN.fullmatch(word)) for word in words) > 1


def _texts_of_errors(module: ast.Module, makers: Collection[str]) -> set[str]:
    functions: dict[str, list[ast.FunctionDef]] = {}
    for function in _functions(module):
        functions.setdefault(function.name, []).append(function)
    scopes = [module, *_functions(module)]
    todo = [(argument, scope) for scope in scopes for argument in _arguments(scope, makers)]
    found, done = set(), set()
    while todo:
        value, scope = todo.pop()
        if value in done:
            continue
        done.add(value)
        found |= {" ".join(text.split()) for text in _texts(value)}
        for name in {_name(node) for node in ast.walk(value)}:
            todo += [(one, place) for place in (scope, module) for one in _bound(place).get(name, ())]
            todo += [(one, function) for function in functions.get(name, ()) for one in _returned(function)]
    return found


def _texts(value: ast.AST) -> Iterator[str]:
    """Yield the texts within an expression, those that are written together as one."""
    if (text := _text(value)) is not None:
        yield text
    for part in ast.iter_child_nodes(value):
        if not (text is not None and _text(part) is not None):
            yield from _texts(part)


def _text(value: ast.AST) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(str, map(_text, parts)))
        case ast.FormattedValue(value=field):
            return f"{{{_field(field)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = (_text(left), _text(right))
            return None if None in texts else "".join(map(str, texts))
    return None


def _field(value: ast.AST) -> str:
    """What a text shows, without what turns it into text."""
    match value:
        case ast.Call(args=[first, *_]) if _name(first):
            return _field(first)
        case ast.Call(func=function):
            return _name(function)
        case ast.Subscript(value=whole):
            return _field(whole)
    return _name(value) or "..."


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _functions(module: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]


def _arguments(scope: ast.AST, functions: Collection[str]) -> Iterator[ast.expr]:
    """Yield what these functions are called with."""
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and _name(call.func) in functions:
            yield from (*call.args, *(keyword.value for keyword in call.keywords))


@cache
def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None
    ]


@cache
def _bound(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """The values of each name that is assigned, extended or appended to; of a module, at its top only."""
    found: dict[str, list[ast.expr]] = {}
    for node in scope.body if isinstance(scope, ast.Module) else ast.walk(scope):
        match node:
            case ast.Assign(targets=[target], value=value):
                pass
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
            ):
                pass
            case ast.NamedExpr(target=target, value=value):
                pass
            case ast.Call(func=ast.Attribute(value=target, attr="append" | "extend"), args=[value]):
                pass
            case _:
                continue
        found.setdefault(_field(target), []).append(value)
    return found
