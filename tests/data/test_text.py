"""suture.data.text: documents as numbers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import ConfigError
from suture.data.text import (
    Tokeniser,
    Vocabulary,
    build_vocabulary,
    clinical_vocabulary,
    count_words,
    coverage,
    read_vocabulary,
    tokenise,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The lungs are clear.", ["The", "lungs", "are", "clear", "."]),
        ("No  \"focal\"\n'opacity'", ["No", "focal", "opacity"]),
        ("x-XXXX, 12.5 mg", ["x", "XXXX", ",", ".", "mg"]),
        ("clear.No", ["clear", ".No"]),
        ("¿fiebre? ¡oh!", ["¿fiebre", "?", "oh", "!"]),
        ("1/2 3", []),
    ],
)
@pytest.mark.parametrize("tokeniser", get_args(Tokeniser))
def test_words_and_marks_are_kept_and_all_else_parts_them(
    text: str, tokens: list[str], tokeniser: Tokeniser
) -> None:
    assert tokenise(text, tokeniser) == tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("vergrößert, Herz\u00adgröße", ["vergrößert", ",", "Herzgröße"]),
        ("La\u0308sion œdème", ["Läsion", "œdème"]),
        ("心影，增大X线", ["心", "影", "增", "大", "X", "线"]),
        ("قلب طبيعي، رئة", ["قلب", "طبيعي", "رئة"]),
        ("हृदय का आकार।", ["हृदय", "का", "आकार"]),
        ("심장 비대 5cm²", ["심장", "비대", "cm"]),
    ],
)
def test_letters_of_every_script_make_words_but_in_the_program_of_the_paper(
    text: str, tokens: list[str]
) -> None:
    assert tokenise(text) == tokens
    assert tokenise(text, "pmfl") == tokenise(re.sub("[^ -~]", " ", text), "pmfl")
    words = Vocabulary(tuple(dict.fromkeys(tokens)))
    read = words.encode([text], None)[0]
    assert 0 not in read
    assert dataclasses.replace(words, tokeniser="pmfl").encode([text], None)[0].tolist() != read.tolist()


@given(st.text(), st.sampled_from(get_args(Tokeniser)))
def test_tokens_joined_by_spaces_are_the_same_tokens(text: str, tokeniser: Tokeniser) -> None:
    tokens = tokenise(text, tokeniser)
    assert tokenise(" ".join(tokens), tokeniser) == tokens
    assert all(token.strip() for token in tokens)
    if text.isascii():
        assert tokens == tokenise(text)


def test_documents_are_padded_to_the_longest_and_cut() -> None:
    words = Vocabulary(("no", "edema", "."))
    assert words.size == 4
    assert words.indices(["edema", "Edema", "."]) == [2, 0, 3]
    tokens, length = words.encode(["no edema.", "", "mild edema"], None)
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 0], [0, 2, 0]]
    assert length.tolist() == [3, 1, 2]
    assert (tokens.dtype, length.dtype) == (torch.int32, torch.int64)
    tokens, length = words.encode(["no edema.", "mild"], 2)
    assert tokens.tolist() == [[1, 2], [0, 0]]
    assert length.tolist() == [2, 1]
    tokens, length = words.encode([], 5)
    assert tokens.shape == (0, 1)
    assert length.shape == (0,)


@given(st.lists(st.text(alphabet="ab .,", max_size=12), min_size=1), st.none() | st.integers(1, 5))
def test_an_encoded_document_reads_back(texts: list[str], longest: int | None) -> None:
    words = build_vocabulary([*texts, "a"])
    tokens, length = words.encode(texts, longest)
    for text, row, n in zip(texts, tokens.tolist(), length.tolist(), strict=True):
        known = tokenise(text)[:longest]
        assert [words.words[i - 1] for i in row[:n] if i] == known
        assert n == max(1, len(known))
        assert not any(row[n:])


def test_words_by_appearance_and_by_frequency() -> None:
    texts = ["c b a", "a b", "a d"]
    assert build_vocabulary(texts).words == ("c", "b", "a", "d")
    assert build_vocabulary(texts, order="frequency").words == ("a", "b", "c", "d")
    assert build_vocabulary(texts, 2, "frequency").words == ("a", "b")
    assert coverage({"a", "b"}.__contains__, count_words([*texts, ". , ?"])) == pytest.approx(5 / 7)
    with pytest.raises(ConfigError, match="empty"):
        build_vocabulary(texts, 9)


def test_words_of_a_few_patients_are_left_out() -> None:
    texts = ["Kowalski coughs", "Kowalski coughs", "Kowalski sleeps", "Nowak coughs"]
    assert build_vocabulary(texts, patients="aabc", fewest=2).words == ("Kowalski", "coughs")
    assert build_vocabulary(texts, patients="aaab", fewest=2).words == ("coughs",)
    assert build_vocabulary(texts, fewest=3).words == ("Kowalski", "coughs")
    assert build_vocabulary(texts, 3, patients="aaab", fewest=2, order="frequency").words == ("coughs",)


def test_a_vocabulary_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes("\ufeffheart\r\n¿lung\r\n.\r\n".encode())
    assert read_vocabulary(path).words == ("heart", "¿lung", ".")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a\n\nb\n", "line 2 is blank"),
        (b"a\nb\na\n", "line 3: 'a' is already in line 1"),
        (b"", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_vocabulary_file_names_the_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_vocabulary(path)
    with pytest.raises(ConfigError, match="one word a line"):
        read_vocabulary(tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("words", "says"), [((), "empty"), (("a", "b", "a"), "'a' twice"), (("a", " "), "blank")]
)
def test_a_bad_vocabulary_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Vocabulary(words)


def test_the_vocabulary_of_the_package_knows_clinical_words() -> None:
    words = clinical_vocabulary()
    assert {"patient", "lungs", "pneumothorax", "effusion", "."} <= set(words.words)
    assert 0 not in words.indices(tokenise("The heart is normal in size."))
