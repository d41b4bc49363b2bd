"""Checks the prose of docs, help, errors and pages: `python .ci/prose.py [FILE...]`; a fault exits with 1.

A sentence has at most 25 words and one bracket. A phrase of `PRIVATE` has a word of the field
in its place. The heading of a how-to page has a verb. Tables, code, formulas and quoted output are exempt,
but not the help of commands, errors, the notes of a run and the templates of pages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MOST_WORDS, MOST_BRACKETS = 25, 1

PRIVATE = {
    r"owners?'? rows?|rows? of (its|their) owners?": "classifier weights of the sites that label the class",
    r"own(s|ed|ers?) (of )?(a|the|each|this) class(es)?": "the sites that label the class",
    r"rows? of (a|the|each|its|their|all|other) (own )?class(es)?": "classifier weights",
    r"(nothing|cannot|can not|none) (can )?be told|not told from|told apart": "no significant difference",
    r"figures? (is|are|of) (exact|withheld|released?)": "metrics",
    r"the (paper's )?programs?('s)? (of the paper|does|has|is|says)": "the official code",
    r"abstain(s|ed|ing)?": "skips the round",
    r"liars?": "malicious site",
    r"phantoms?": "synthetic images",
    r"loose policy": "permissive policy",
    r"robust merges?": "robust aggregation",
    r"vanilla FL": "FedAvg with missing labels as negatives",
    r"in the place of": "instead of",
    r"of its own accord|by itself alone": "on its own",
    r"is (no|not) more than": "is at most",
}
"""Regular expressions of private words, and what the field says."""

HOW_TO = (
    "tutorial",
    "data",
    "deployment",
    "use_a_model",
    "protection",
    "recovery",
    "adding_a_method",
    "tables",
)
"""Pages whose headings say what one does."""

NOT_A_VERB = re.compile(r"^(The|A|An|Your|Its?|What|Which|How|Why|Who|Where|When|Of|In|With|Without)\b")


def pages() -> list[Path]:
    """Return the pages that are written by hand, and what holds the texts of commands, errors and reports."""
    made = ROOT / "docs" / "results"  # but for its first page by `suture table`, of runs
    docs = [
        page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != made or page.stem == "README"
    ]
    by_hand = [page for page in docs if not page.read_text().startswith("<!-- Generated")]
    results = ROOT / "custom" / "suture_results"
    return [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *by_hand),
        *(ROOT / "docs" / "reference" / "commands.md", ROOT / "tests" / "refusals.txt"),
        *(results / "notes.py", results / "sentences.py", results / "card.md"),
        *sorted((ROOT / "custom").rglob("*.html")),
    ]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what a person reads of a file, by paragraphs, cells or messages, with its first line."""
    text = path.read_text()
    if path.suffix == ".txt":
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("  ") and not line.startswith("  python -c"):
                yield number, re.sub(r"\{[^}]*\}|[\w.]+=\S+?(?=[.;,:]?(\s|$))|\w+\.\w+", "X", line.strip())
    elif path.suffix == ".py":
        yield from _of_code(ast.parse(text))
    elif path.suffix == ".html" or path.stem == "card":
        yield from _of_template(text)
    else:
        yield from paragraphs(text)
        if path.stem == "commands":
            for number, line in enumerate(text.splitlines(), 1):
                yield from ((number, cell.strip()) for cell in line.split("|")[1:-1])


def _of_code(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module but for docstrings; a value is a word."""
    nodes = list(ast.walk(module))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within | said:
            yield node.lineno, node.value


_CHOICE = re.compile(
    r"\{%-? *(?:if|for)\b[^%]*%\}((?:(?!\{%).)*)(?:\{%-? *el(?:(?!\{%-? *(?:if|for|end)).)*)?"
    r"\{%-? *end(?:if|for) *-?%\}",
    re.DOTALL,
)


def _of_template(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a template, with the first branch of each choice; a value is a word."""
    text = re.sub(r"(?s)<(style|script)\b.*?</\1>|\{#.*?#\}|```.*?```", "", text)
    while text != (text := _CHOICE.sub(r"\1", text)):
        pass
    text = re.sub(r"(?s)\{%.*?%\}", "", re.sub(r"(?s)\{\{.*?\}\}", "X", text))
    for words in re.split(r"</?(?!b>|i>|a\b|code|span)[^>]*>|\n\n|\n- |\|", text):
        yield 1, " ".join(re.sub("<[^>]*>", "", words).split())


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page with their first lines; no code, table, formula or HTML."""
    fenced, start, lines = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith(("```", "$$"))
        fenced ^= fence
        exempt = fenced or fence or line.startswith(("    ", "|", "<", "!", "#", "\t")) or not line.strip()
        begins = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if (exempt or begins) and lines:
            yield start, " ".join(lines)
            lines = []
        if not exempt:
            start = start if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph; code, links and emphasis count as the words that one sees."""
    text = re.sub(r"`[^`]*`", "CODE", paragraph)
    text = re.sub(r"\$[^$]+\$", "FORMULA", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.split(r"(?<=[.?!:;])\s+(?=[A-Z*_])", text)


def faults(path: Path) -> Iterator[str]:
    """Yield what is wrong on a page, with its line."""
    text = path.read_text()
    for number, paragraph in texts(path):
        for sentence in sentences(paragraph):
            words = len(re.findall(r"[A-Za-z0-9][\w'’-]*", sentence))
            if words > MOST_WORDS:
                yield f"{number}: {words} words: {sentence[:70]}..."
            brackets = len(re.findall(r"(?<!\S)\(", sentence))  # a call has no space before its own
            if brackets > MOST_BRACKETS:
                yield f"{number}: {brackets} brackets: {sentence[:70]}..."
        words_alone = re.sub(r"`[^`]*`", "", paragraph)
        for private, usual in PRIVATE.items():
            for match in re.finditer(rf"\b({private})\b", words_alone, re.IGNORECASE):
                yield f"{number}: {match.group()!r}: {usual}"
    if path.stem in HOW_TO and path.parent.name == "docs":
        for number, line in enumerate(text.splitlines(), 1):
            if (title := re.match(r"##+ (.*)", line)) and NOT_A_VERB.match(title.group(1)):
                yield f"{number}: a heading without a verb: {title.group(1)}"


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in given for fault in faults(path)]
    print("\n".join(found))
    sys.exit(bool(found))
