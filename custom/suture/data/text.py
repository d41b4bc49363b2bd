"""Documents as numbers: tokenisers, and vocabularies that every party knows before training.

Source: PMFL (Zhang et al., arXiv:2112.05321). Its program drops every letter that is not ASCII, and makes the
vocabulary of the pooled corpus, which no party of a federation has; here a vocabulary is a file that is
settled beforehand.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from suture.core.errors import ConfigError
from suture.core.files import read_regular

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = 0
"""The index of every word that a vocabulary lacks, and of what pads a document."""

_Order = Literal["appearance", "frequency"]
Tokeniser = Literal["unicode", "pmfl"]

OWN = "# of a site's own documents"
"""First line of the file of a vocabulary that `suture vocab` has made of a hospital's own table."""

EVERYBODY = "every party sees its words; read them, or make one of public text"

_PUNCTUATION = re.compile(r"([?.!,¿])")
_OTHER = re.compile(r"[^A-Za-z?.!,¿]+")


class _Signs(dict[int, str]):
    """What becomes of each character: letters and accents stay, the invisible vanishes, the rest parts words.

    Chinese and Japanese are written without spaces; each of their letters is a word.
    """

    def __missing__(self, code: int) -> str:
        sign, kind = chr(code), unicodedata.category(chr(code))
        if _PUNCTUATION.match(sign):
            sign = f" {sign}"
        elif kind == "Cf":
            sign = ""
        elif kind[0] not in "LM":
            sign = " "
        elif kind == "Lo" and (0x2E80 <= code < 0xA4D0 or 0xF900 <= code < 0xFB00 or code >= 0x20000):
            sign = f" {sign} "
        return self.setdefault(code, sign)


_SIGNS = _Signs()


def tokenise(text: str, tokeniser: Tokeniser = "unicode") -> list[str]:
    """The words of a document: runs of letters and of the marks ``? . ! , ¿``, each with a space before it.

    Everything else, digits too, parts words; letters stay as large or small as they are. For ``pmfl``,
    letters are those of ASCII.

    >>> tokenise('No focal "air-space" disease. Größe 12.5 cm')
    ['No', 'focal', 'air', 'space', 'disease', '.', 'Größe', '.', 'cm']
    >>> tokenise("vergrößert", "pmfl"), tokenise("胸部X线")
    (['vergr', 'ert'], ['胸', '部', 'X', '线'])
    """
    if tokeniser == "pmfl":
        return _OTHER.sub(" ", _PUNCTUATION.sub(r" \1", text)).split()
    return unicodedata.normalize("NFC", text.translate(_SIGNS)).split()


def words_of(text: str, tokeniser: Tokeniser = "unicode") -> list[str]:
    """The tokens of a document without its punctuation marks."""
    return [token for token in tokenise(text, tokeniser) if any(map(str.isalpha, token))]


@dataclass(frozen=True)
class Vocabulary:
    """The words that a model distinguishes; all others count as one, `UNKNOWN`.

    Attributes:
        words: distinct; word i has index i + 1.
        tokeniser: of the documents.
        own: whether its file says that it was made of a site's own documents.

    Raises:
        ConfigError: no word, a blank one, or one that is there twice.
    """

    words: tuple[str, ...]
    tokeniser: Tokeniser = "unicode"
    own: bool = False

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("the vocabulary is empty; give it at least one word")
        if len(self._index) < len(self.words):
            twice = next(word for i, word in enumerate(self.words, 1) if self._index[word] != i)
            raise ConfigError(f"the vocabulary contains {twice!r} twice; remove one")
        if any(not word.strip() for word in self.words):
            raise ConfigError("the vocabulary contains a blank word; remove it")

    @cached_property
    def _index(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words, 1)}

    @property
    def size(self) -> int:
        """Indices, V + 1: the words and the unknown one."""
        return len(self.words) + 1

    def indices(self, tokens: Iterable[str]) -> list[int]:
        """The index of each token."""
        return [self._index.get(token, UNKNOWN) for token in tokens]

    def encode(self, texts: Sequence[str], longest: int | None) -> tuple[Tensor, Tensor]:
        """Documents as a model reads them.

        Args:
            texts: n documents; one without any word is a single unknown word.
            longest: use at most this many tokens of a document, from its beginning; None uses all.

        Returns:
            tokens int32 [n, l], padded with `UNKNOWN` behind to the longest of these documents; and their
            true lengths int64 [n], from 1 to l.
        """
        rows = [self.indices(tokenise(text, self.tokeniser)[:longest]) or [UNKNOWN] for text in texts]
        import torch  # not for those who only count words
        from torch.nn.utils.rnn import pad_sequence

        length = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if not rows:
            return torch.zeros((0, 1), dtype=torch.int32), length
        tokens = [torch.tensor(row, dtype=torch.int32) for row in rows]
        return pad_sequence(tokens, batch_first=True, padding_value=UNKNOWN), length


def count_words(texts: Iterable[str], tokeniser: Tokeniser = "unicode") -> Counter[str]:
    """How often each token occurs in some documents, in the order in which the tokens appear."""
    return Counter(token for text in texts for token in tokenise(text, tokeniser))


def build_vocabulary(
    texts: Sequence[str],
    minimum: int = 1,
    order: _Order = "appearance",
    tokeniser: Tokeniser = "unicode",
    patients: Sequence[str] = (),
    fewest: int = 1,
) -> Vocabulary:
    """Build the vocabulary of some documents.

    Args:
        minimum: leave out words that occur less often.
        patients: of each document; by default each has its own.
        fewest: leave out words of fewer patients.
        order: ``appearance``, in the order of first appearance, as in PMFL's program; ``frequency``, the most
            frequent words first, and equally frequent ones alphabetically.

    Raises:
        ConfigError: no word occurs often enough.
    """
    counts, having = count_words(texts, tokeniser), dict[str, set[str]]()
    for patient, text in zip(patients or map(str, range(len(texts))), texts, strict=True):
        for word in tokenise(text, tokeniser) if fewest > 1 else ():
            having.setdefault(word, set()).add(patient)
    words = [word for word, n in counts.items() if n >= minimum and len(having.get(word, "1")) >= fewest]
    if order == "frequency":
        words.sort(key=lambda word: (-counts[word], word))
    return Vocabulary(tuple(words), tokeniser)


def coverage(known: Callable[[str], object], counts: Counter[str]) -> float:
    """The share of the words of some documents that are known, without punctuation; 0 without any."""
    words = {token: n for token, n in counts.items() if any(map(str.isalpha, token))}
    return sum(n for word, n in words.items() if known(word)) / max(1, sum(words.values()))


def read_vocabulary(path: Path, tokeniser: Tokeniser = "unicode") -> Vocabulary:
    """Reads a vocabulary file: one word a line, UTF-8; lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, or a line is blank or repeats an earlier one.
    """
    try:
        if path.exists() and not path.is_file():  # a device may have no end
            raise ConfigError(f"{path} is not a file; a vocabulary is a file with one word a line")
        lines = [line.strip() for line in read_regular(path).decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a vocabulary is a file with one word a line") from error
    earlier: dict[str, int] = {}
    for number, word in enumerate(lines, 1):
        if word.startswith("#"):
            continue
        if not word:
            raise ConfigError(f"{path} line {number} is blank; write one word a line")
        if earlier.setdefault(word, number) != number:
            raise ConfigError(
                f"{path} line {number}: {word!r} is already in line {earlier[word]}; remove one"
            )
    if not earlier:
        raise ConfigError(f"{path} is empty; write one word a line")
    return Vocabulary(tuple(earlier), tokeniser, OWN in lines)


@cache
def clinical_vocabulary(tokeniser: Tokeniser = "unicode") -> Vocabulary:
    """The vocabulary that comes with the package: the frequent words of MTSamples (CC0); see docs/text.md."""
    return read_vocabulary(Path(__file__).with_name("clinical_words.txt"), tokeniser)
