"""A document as one vector: TF-IDF with the frequencies of a public corpus; the digest of an embedding model.

Every party computes the same vector of the same text, and shares no text for it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.files import sha256_of
from suture.data.text import Tokeniser, tokenise

TFIDF = "tfidf"
"""As `ModelSpec.embedding`: the vectors of `tfidf_vectors`."""

_MOST_FILES, _MOST_BYTES = 1_000, 2**34
"""Files and folders of an encoder of text, and their bytes: whoever made a saved model names the folder."""


def tfidf_vectors(texts: Sequence[str], width: int, tokeniser: Tokeniser = "unicode") -> Tensor:
    """Return TF-IDF vectors of documents, through a random projection to `width` numbers.

    A word that occurs n times weighs (1 + ln n)(1 + ln((1 + N) / (1 + df))): df of the N notes of MTSamples,
    a public corpus, have it; other words than its frequent ones are left out, and letters count as small.
    Each word has signs of its own for a row of the projection (Achlioptas, J. Comput. Syst. Sci. 66:671,
    2003), the bits of its SHAKE-256, so that the vectors are the same on every machine.

    Returns:
        float32 ``[n, width]`` of length 1; 0 for a document without any known word.
    """
    notes, frequency = clinical_frequencies()
    rows = np.zeros((len(texts), width))
    for row, text in zip(rows, texts, strict=True):
        for word, n in sorted(Counter(tokenise(text.lower(), tokeniser)).items()):
            if word in frequency:
                rare = 1 + math.log((1 + notes) / (1 + frequency[word]))
                row += (1 + math.log(n)) * rare * signs(word, width)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(np.divide(rows, lengths, out=rows, where=lengths > 0)).float()


@lru_cache(maxsize=2**15)  # all frequent words; of the widest vectors, 256 MiB
def signs(token: str, width: int) -> NDArray[np.int8]:
    """Return a random vector of +1 and -1 that belongs to a token, ``[width]``; not to be changed."""
    drawn = hashlib.shake_256(token.encode()).digest(-(-width // 8))
    bits = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8))[:width]
    return bits.astype(np.int8) * 2 - 1


@cache
def clinical_frequencies() -> tuple[int, dict[str, int]]:
    """The number of notes in MTSamples, and of those that have each of its frequent words, in small letters.

    A test counts them again.
    """
    text = Path(__file__).with_name("clinical_frequencies.txt").read_text(encoding="utf-8")
    number, *lines = text.splitlines()
    return int(number), {word: int(n) for word, n in (line.split(" ") for line in lines)}


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files below a folder.

    Raises:
        ConfigError: it is no folder, has no file, more than an encoder has, or one that cannot be read.
    """
    below = list(islice(folder.rglob("*"), _MOST_FILES + 1))
    files = sorted(path for path in below if path.is_file())
    try:
        size = sum(path.stat().st_size for path in files)
        if not files or len(below) > _MOST_FILES or size > _MOST_BYTES:
            raise ConfigError(
                f"model.embedding: {folder} is not the folder of an encoder of text, of at most "
                f"{_MOST_FILES:,} files and {_MOST_BYTES >> 30} GiB; name one, or {TFIDF}"
            )
        found = hashlib.sha256()
        for path in files:
            found.update(f"{path.relative_to(folder).as_posix()}\0{sha256_of(path)}\n".encode())
    except OSError as error:
        raise ConfigError(f"model.embedding: {folder} cannot be read: {error}; make it readable") from error
    return found.hexdigest()
