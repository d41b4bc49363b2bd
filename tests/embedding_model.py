"""A stand-in for sentence-transformers, which CI does not install."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def embedding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for the package: a vector is the length of a text and 1; returns the sizes of its calls."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    calls: list[int] = []

    class SentenceTransformer:
        def __init__(self, path: str, **options: Any) -> None:
            assert options["local_files_only"]
            if not Path(path).is_dir():
                raise OSError("no such folder")

        def encode(self, texts: list[str], **_: Any) -> Any:
            calls.append(len(texts))
            return np.array([[len(text), 1] for text in texts], dtype=np.float64)

    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = SentenceTransformer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    return calls
