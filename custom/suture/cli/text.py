"""`suture vocab`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from suture.core.errors import ConfigError, DataError

console = Console()


def vocab(
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, one word a line.")],
    data: Annotated[Path | None, typer.Option(help="A suture.toml whose data are text.")] = None,
    every: Annotated[bool, typer.Option("--every", help="With --data: its test documents too.")] = False,
    texts: Annotated[Path | None, typer.Option(help="A file of documents, one a line.")] = None,
    minimum: Annotated[int, typer.Option(min=1, help="How often a word occurs at least.")] = 1,
    order: Annotated[
        Literal["appearance", "frequency"], typer.Option(help="Of the words in the file.")
    ] = "appearance",
) -> None:
    """Make a vocabulary of some documents. Make it of public ones: every party will see it."""
    from suture.core.files import atomic_write
    from suture.data.text import build_vocabulary, counted, coverage

    documents = _documents(data, every, texts)
    words = build_vocabulary(documents, minimum, order)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, "".join(f"{word}\n" for word in words.words).encode())
    counts = counted(documents)
    console.print(
        f"{len(words.words)} words of {len(counts)}; they are {coverage(words, counts):.2%} of the "
        f"{counts.total()} tokens of {len(documents)} documents",
        soft_wrap=True,
        highlight=False,
    )
    console.print(f"written: {out}", soft_wrap=True, highlight=False)


def _documents(data: Path | None, every: bool, texts: Path | None) -> tuple[str, ...]:
    """The documents of a site, or those of a file.

    Raises:
        ConfigError: none of the two is given, or both.
        DataError: they cannot be read, or there is no document.
    """
    from suture.data.config import load_site_config
    from suture.data.readers import load_table
    from suture.data.reading import read_text

    if (data is None) == (texts is None):
        raise ConfigError("give the documents as --data or as --texts, one of the two")
    if texts is not None:
        found = tuple(line for line in read_text(texts).splitlines() if line.strip())
    elif data is not None:
        table = load_table(load_site_config(data).data)
        read = (table if every else table.of("train")).texts
        if read is None:
            raise DataError(f"{data}: its data are images; a vocabulary is made of text")
        found = read
    if not found:
        raise DataError(f"{texts or data} holds no document to make a vocabulary of")
    return found
