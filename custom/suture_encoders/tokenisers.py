"""A tokeniser that another party may have chosen, bounded before it is built: the library trusts its file."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, as_word
from suture.core.files import parse_json

_PARTS = {
    *("BertNormalizer", "BertPreTokenizer", "BertProcessing", "ByteLevel", "Digits", "Lowercase"),
    *("Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Punctuation"),
    *("Replace", "RobertaProcessing", "Sequence", "Strip", "StripAccents", "TemplateProcessing"),
    *("Whitespace", "WhitespaceSplit"),
}
"""What a tokeniser may have besides its table of tokens."""

_STEPS = ("normalizer", "pre_tokenizer", "post_processor")

_SPACES = " {2,}"
"""The regular expression in XLM-R's. No other is taken: to match one may take forever."""

_MOST_STEPS = 16
"""Most steps of normaliser and pre-tokeniser, and most marks around a document."""

_LONGEST_STEPS = 2**13
"""Letters of the JSON of all steps; XLM-R's have two thousand. A document gets their texts once or more."""

_LARGEST_MAP, _LONGEST_RUN = 2**20, 64
"""Letters of a Precompiled, of which the largest of sentencepiece has 400,000; and bytes that it puts in the
place of a letter: of NFKC, the most are 33."""

_LONGEST_TOKEN, _LONGEST_PIECE = 512, 64
"""Letters of a token; and of one of a Unigram, which looks for each length at each letter. Sentencepiece
makes none of more than 16."""

_LONGEST_ADDED = 2**20
"""Letters of the JSON of the added tokens."""

_LONGEST_WORD = 200
"""Letters of a word of a WordPiece, which takes their third power in time; BERT has 100."""

_LONGEST_AFFIX = 16
"""Letters of what is put before or behind each piece of a word, such as ``##``."""


@lru_cache(maxsize=4)
def made_tokeniser(text: str, limit: int) -> tuple[Any, int | None]:
    """Return the tokeniser of a JSON text, and the number of its unknown token, if it has one.

    Args:
        limit: largest number of tokens of a document.

    Raises:
        ConfigError: it has a part that is not of `_PARTS`, or one that would take any time or memory, or the
            library refuses it.
    """
    tokenizers = needed("tokenizers", "hf:FOLDER", "encoders")
    with without_panic():
        values = parse_json(text)
        _check_steps(values)
        _check_model(model := values["model"], values.get("added_tokens") or [])
        unused = dict.fromkeys(("decoder", "padding", "truncation"))
        tokeniser = tokenizers.Tokenizer.from_str(json.dumps(values | unused))
        if tokeniser.num_special_tokens_to_add(False) > _MOST_STEPS:
            raise ValueError(f"it puts more than {_MOST_STEPS} marks around a document")
        tokeniser.enable_truncation(limit)
        return tokeniser, model.get("unk_id", tokeniser.token_to_id(model.get("unk_token") or ""))


def _check_steps(values: Mapping[str, Any]) -> None:
    """Refuse steps that Suture does not run, that repeat, or that lengthen a document: ten fill any memory.

    Raises:
        ValueError: names the step.
    """
    parts = json.dumps([values.get(key) for key in _STEPS])
    kinds = set(re.findall(r'"type": "([^"]*)"', parts))
    if wrong := (kinds - _PARTS) | (set(re.findall(r'"Regex": "([^"]*)', parts)) - {_SPACES}):
        raise ValueError(f"Suture does not run its {min(wrong)}")
    maps = (step.get("precompiled_charsmap") for step in _steps(values, *_STEPS))
    letters = len(parts) - sum(_checked_map(text) for text in maps if text is not None)
    if letters > _LONGEST_STEPS:
        raise ValueError(f"its steps have {letters:,} letters; the limit is {_LONGEST_STEPS:,}")
    names = list[str]()
    for step in _steps(values, "normalizer", "pre_tokenizer"):
        if step.keys() <= {"String", "Regex"}:  # a pattern
            continue
        names.append(str(step.get("type")))
        if (new := step.get("content")) and len(new) > min(map(len, step["pattern"].values())):
            raise ValueError("its Replace lengthens a document")
    again = [name for name in names if name not in ("Replace", "Sequence") and names.count(name) > 1]
    if again or len(names) > _MOST_STEPS:
        raise ValueError(f"it repeats {(again or names)[0]}")
    for step in _steps(values, "post_processor"):
        if "single" in step:
            kinds_of = [piece["Sequence"]["id"] for piece in step["single"] if "Sequence" in piece]
            marks = [piece["SpecialToken"]["id"] for piece in step["single"] if "Sequence" not in piece]
            if kinds_of != ["A"] or not {*marks} <= {*step["special_tokens"]}:
                raise ValueError("its TemplateProcessing is not one document between known marks")


def _steps(values: Mapping[str, Any], *keys: str) -> list[Mapping[str, Any]]:
    """Return the tables within some parts of a tokeniser, at any depth."""
    found: list[Any] = [values.get(key) for key in keys]
    for step in found:  # which grows by what is inside of them
        found += step if isinstance(step, list) else step.values() if isinstance(step, dict) else ()
    return [step for step in found if isinstance(step, dict)]


def _checked_map(text: str) -> int:
    """Return the length of a map of letters by sentencepiece, whose sizes the library believes.

    Raises:
        ValueError: it is too large, damaged, or lengthens a document.
    """
    if len(text) > _LARGEST_MAP:
        raise ValueError(f"its Precompiled has {len(text):,} letters; the limit is {_LARGEST_MAP:,}")
    data = base64.b64decode(text, validate=True)
    end = 4 + int.from_bytes(data[:4], "little")
    if end > len(data) or end % 4:
        raise ValueError("the charsmap of its Precompiled is damaged")
    if max(map(len, data[end:].split(b"\0"))) > _LONGEST_RUN:
        raise ValueError("its Precompiled lengthens a document")
    return len(text)


def _check_model(model: Mapping[str, Any], added: list[Any]) -> None:
    """Refuse a table of tokens that would make a long word take any time or memory.

    Raises:
        ValueError: says what is wrong.
    """
    if model.get("dropout"):
        raise ValueError("its dropout would give other tokens each time; set it to null")
    if len(json.dumps(added)) > _LONGEST_ADDED:
        raise ValueError(f"its added_tokens have more than {_LONGEST_ADDED:,} letters")
    tokens, most = model["vocab"], _LONGEST_TOKEN
    if isinstance(tokens, list):
        tokens, most = (token for token, _ in tokens), _LONGEST_PIECE
    if (longest := max(map(len, (*tokens, *(one["content"] for one in added))), default=0)) > most:
        raise ValueError(f"it has a token of {longest:,} letters; the limit is {most}")
    if (word := model.get("max_input_chars_per_word", 0)) > _LONGEST_WORD:
        raise ValueError(f"its max_input_chars_per_word is {word:,}; the limit is {_LONGEST_WORD}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > _LONGEST_AFFIX:
            raise ValueError(f"its {name} has more than {_LONGEST_AFFIX} letters")


@contextmanager
def without_panic() -> Iterator[None]:
    """Turn what the library raises into an error for users; its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"the encoder's tokeniser cannot be used ({as_word(error)}); choose another model"
        ) from error
