"""Documents as a model reads them: words, or one vector each, computed once and kept in the site's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.embedding import TFIDF, clinical_frequencies, folder_digest, tfidf_vectors
from suture.data.text import words_of
from suture.models import ModelSpec, build, encoder_of, vocabulary_of
from suture.models.priors import cache, digests_of, key

_FORMAT = 2
"""The format of an entry of the cache; a new number invalidates every older entry."""


def document_inputs(
    spec: ModelSpec, texts: Sequence[str], folder: Path | None = None, site: str = ""
) -> dict[str, Tensor]:
    """Return documents as a model reads them.

    Args:
        folder: of the cache of an embedding model's vectors; None caches nothing.
        site: name of the site, for messages.

    Returns:
        ``tokens`` and ``length``, see `Vocabulary.encode` and `Backbone.tokenise`; or ``vector``, float32
        ``[n, spec.vector]``.

    Raises:
        ConfigError: the vocabulary or the embedding model cannot be read, or the latter is another one than
            the job's, or its vectors have another width.
        DataError: the cache cannot be written.
    """
    entry = encoder_of(spec)
    if not entry.vectors:
        read = entry.tokenise or vocabulary_of(spec).encode
        tokens, length = read(texts, spec.longest)
        return {"tokens": tokens, "length": length}
    if spec.embedding == TFIDF:
        return {"vector": tfidf_vectors(texts, spec.vector, spec.tokeniser)}
    return {"vector": _model_vectors(spec, texts, folder, site)}


def _model_vectors(spec: ModelSpec, texts: Sequence[str], folder: Path | None, site: str) -> Tensor:
    """Return the vectors of an embedding model, from the cache where it has them."""
    model = Path(spec.embedding).expanduser()
    digest = folder_digest(model)
    if spec.embedding_digest not in (None, digest):
        raise ConfigError(
            f"model.embedding: {model} differs from the job's model (SHA-256 {digest[:12]}..., not "
            f"{str(spec.embedding_digest)[:12]}...); copy the job's"
        )

    encoder = ModelSpec(f"hf:{model}")
    if encoder_of(encoder).reads != "text":
        raise ConfigError(f"model.embedding: {model} holds an encoder of images; name one of text")
    network = build(encoder, LabelSet(("any",)), 0, pretrained=True).eval()
    if network.encoding != spec.vector:
        raise ConfigError(
            f"the vectors of {model} have {network.encoding} numbers, and model.vector is {spec.vector}; "
            f"set model.vector={network.encoding}"
        )

    @torch.no_grad()
    def vectors(rows: Tensor) -> Tensor:
        return network.encode(document_inputs(encoder, [texts[row] for row in rows]))

    how = key("text", _FORMAT, digest, torch.get_num_threads())
    of, shape = digests_of(text.encode() for text in texts), (len(texts), spec.vector)
    return cache(folder, how, of, shape, vectors, site, "the embedding model")


_STRANGE = "\U00013000"
"""A word, of Egyptian hieroglyphs, that no tokeniser of clinical text knows."""


def known_words(spec: ModelSpec) -> Callable[[str], bool] | None:
    """Return whether a model knows a word; None where it reads pieces of words."""
    if spec.name == "vectors" and spec.embedding == TFIDF:
        frequent = clinical_frequencies()[1]
        return lambda word: word.lower() in frequent
    if encoder_of(spec).vectors or encoder_of(spec).tokenise:
        return None
    return set(vocabulary_of(spec).words).__contains__


def strange(spec: ModelSpec, texts: Sequence[str]) -> list[bool]:
    """Return which documents have no word that a model knows: what it makes of them says nothing about them.

    Digits, punctuation and single Latin letters are no words.
    """
    words = [
        [word for word in words_of(text, spec.tokeniser) if len(word) > 1 or not word.isascii()]
        for text in texts
    ]
    if known := known_words(spec):
        return [not any(map(known, of)) for of in words]
    entry = encoder_of(spec)
    if entry.vectors:
        entry = encoder_of(ModelSpec(f"hf:{Path(spec.embedding).expanduser()}"))
    assert entry.tokenise is not None
    tokens, length = entry.tokenise(["", _STRANGE, *map(" ".join, words)], spec.longest)
    found = [{*row[:n]} for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
    return [row <= found[0] | found[1] for row in found[2:]]


def with_digest(spec: ModelSpec) -> ModelSpec:
    """Return the specification with the digest of its embedding model, by which other parties know theirs.

    Raises:
        ConfigError: there is no such folder.
    """
    if not encoder_of(spec).vectors or spec.embedding == TFIDF or spec.embedding_digest:
        return spec
    return replace(spec, embedding_digest=folder_digest(Path(spec.embedding).expanduser()))
