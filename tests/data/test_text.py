"""suture.data.text and .embedding: documents as numbers, and each as one vector."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import ConfigError
from suture.data import embedding
from suture.data.embedding import clinical_frequencies, folder_digest, signs, tfidf_vectors
from suture.data.readers import load_table
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
from suture_papers.metafl.mtsamples import MtsamplesConfig
from world import refused


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
    for texts, longest, tokens, length in (
        (["no edema.", "", "mild edema"], None, [[1, 2, 3], [0, 0, 0], [0, 2, 0]], [3, 1, 2]),
        (["no edema.", "mild"], 2, [[1, 2], [0, 0]], [2, 1]),
    ):
        found = words.encode(texts, longest)
        assert [one.tolist() for one in found] == [tokens, length]
        assert [one.dtype for one in found] == [torch.int32, torch.int64]
    assert [one.shape for one in words.encode([], 5)] == [(0, 1), (0,)]


@given(st.lists(st.text(alphabet="ab .,", max_size=12), min_size=1), st.none() | st.integers(1, 5))
def test_an_encoded_document_reads_back(texts: list[str], longest: int | None) -> None:
    words = build_vocabulary([*texts, "a"])
    tokens, length = words.encode(texts, longest)
    for text, row, n in zip(texts, tokens.tolist(), length.tolist(), strict=True):
        known = tokenise(text)[:longest]
        assert [words.words[i - 1] for i in row[:n] if i] == known
        assert n == max(1, len(known))
        assert not any(row[n:])


def test_words_by_appearance_and_by_frequency_without_those_of_a_few_patients() -> None:
    texts = ["c b a", "a b", "a d"]
    assert build_vocabulary(texts).words == ("c", "b", "a", "d")
    assert build_vocabulary(texts, order="frequency").words == ("a", "b", "c", "d")
    assert build_vocabulary(texts, 2, "frequency").words == ("a", "b")
    assert coverage({"a", "b"}.__contains__, count_words([*texts, ". , ?"])) == pytest.approx(5 / 7)
    with refused("empty", by=ConfigError):
        build_vocabulary(texts, 9)
    notes = ["Kowalski coughs", "Kowalski coughs", "Kowalski sleeps", "Nowak coughs"]
    assert build_vocabulary(notes, patients="aabc", fewest=2).words == ("Kowalski", "coughs")
    assert build_vocabulary(notes, patients="aaab", fewest=2).words == ("coughs",)
    assert build_vocabulary(notes, fewest=3).words == ("Kowalski", "coughs")
    assert build_vocabulary(notes, 3, patients="aaab", fewest=2, order="frequency").words == ("coughs",)


def test_a_vocabulary_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes("\ufeffheart\r\n¿lung\r\n.\r\n".encode())
    assert read_vocabulary(path).words == ("heart", "¿lung", ".")
    for content, named in (
        (b"a\n\nb\n", "line 2"),
        (b"a\nb\na\n", "line 3: 'a' is already in line 1"),
        (b"", "empty"),
        (b"\xff\xfe", "UTF-8"),
    ):
        path.write_bytes(content)
        with refused(path, named, by=ConfigError):
            read_vocabulary(path)
    with refused("nowhere.txt", by=ConfigError):
        read_vocabulary(tmp_path / "nowhere.txt")
    for words, named in (((), "empty"), (("a", "b", "a"), "'a'"), (("a", " "), "blank")):
        with refused(named, by=ConfigError):
            Vocabulary(words)


def test_the_vocabulary_of_the_package_knows_clinical_words() -> None:
    words = clinical_vocabulary()
    assert {"patient", "lungs", "pneumothorax", "effusion", "."} <= set(words.words)
    assert 0 not in words.indices(tokenise("The heart is normal in size."))


def test_tf_idf_by_hand() -> None:
    """Effusion twice, a comma, and a word that is not known: (1 + ln 2) idf of one, idf of the other."""
    notes, frequency = clinical_frequencies()

    def idf(word: str) -> float:
        return 1 + math.log((1 + notes) / (1 + frequency[word]))

    expected = (1 + math.log(2)) * idf("effusion") * signs("effusion", 64) + idf(",") * signs(",", 64)
    found = tfidf_vectors(["Effusion, effusion xyzzy"], 64)[0]
    assert found.numpy() == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)
    assert idf("effusion") > idf("normal") > idf(".") >= 1


def test_a_vector_depends_on_its_text_alone() -> None:
    texts = ["No effusion.", "", "Large pleural effusion.", "xyzzy"]
    found = tfidf_vectors(texts, 384)
    assert found.dtype == torch.float32
    assert found.norm(dim=1).tolist() == pytest.approx([1, 0, 1, 0], abs=1e-6)
    assert torch.equal(tfidf_vectors(["LARGE pleural EFFUSION ."], 384)[0], found[2])
    assert float(found[0] @ found[2]) > float(found[0] @ tfidf_vectors(["Old fracture."], 384)[0])
    assert tfidf_vectors([], 384).shape == (0, 384)


@pytest.mark.complete
@pytest.mark.data
def test_the_frequencies_of_the_package_are_made_again(data_root: Path) -> None:
    path = data_root / "mtsamples" / "mtsamples.csv.gz"
    texts = load_table(MtsamplesConfig(table=path, root=path)).texts
    assert texts is not None
    words = {word.lower() for word in clinical_vocabulary().words}
    counts = Counter(word for text in texts for word in words.intersection(tokenise(text.lower(), "pmfl")))
    assert clinical_frequencies() == (len(texts), counts)


def test_a_digest_tells_models_apart_and_does_not_hash_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as /usr, which a saved model may name."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "weights").write_text("1")
    assert folder_digest(one) == folder_digest(two)
    (two / "sub" / "weights").write_text("2")
    changed = folder_digest(two)
    assert folder_digest(one) != changed
    (one / "sub" / "weights").rename(one / "weights")
    assert folder_digest(one) not in (changed, folder_digest(two))
    with refused(tmp_path / "none", by=ConfigError):
        folder_digest(tmp_path / "none")
    (one / "more").write_text("1")
    monkeypatch.delattr(embedding, "sha256_of")
    for bound in ("_MOST_FILES", "_MOST_BYTES"):
        with monkeypatch.context() as patch, refused(one, by=ConfigError):
            patch.setattr(embedding, bound, 1)
            folder_digest(one)
