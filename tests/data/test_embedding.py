"""A document as one vector: TF-IDF with public frequencies, and a local embedding model."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from suture.core.errors import ConfigError
from suture.data import embedding
from suture.data.embedding import clinical_frequencies, folder_digest, signs, tfidf_vectors
from suture.data.readers import load_table
from suture.data.text import clinical_vocabulary, tokenise
from suture_papers.metafl.mtsamples import MtsamplesConfig


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
    assert torch.equal(tfidf_vectors(texts[2:3], 384)[0], found[2])
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


def test_a_digest_tells_models_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "weights").write_text("1")
    assert folder_digest(one) == folder_digest(two)
    (two / "sub" / "weights").write_text("2")
    assert folder_digest(one) != folder_digest(two)
    (one / "sub" / "weights").rename(one / "weights")
    assert len({folder_digest(one), folder_digest(two)}) == 2
    with pytest.raises(ConfigError, match="folder of an encoder of text"):
        folder_digest(tmp_path / "none")


@pytest.mark.parametrize("bound", ["_MOST_FILES", "_MOST_BYTES"])
def test_a_folder_that_is_no_encoder_is_not_hashed(
    bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as /usr, which a saved model may name."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(embedding, bound, 2)
    monkeypatch.delattr(embedding, "sha256_of")
    with pytest.raises(ConfigError, match="folder of an encoder of text"):
        folder_digest(tmp_path)
