"""Encoders of text in a folder: sentence-transformers, transformers alone, model2vec."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import models
from torch import Tensor

from sentence_folder import SMALL, WORDS, changed, network, sentence_folder, static_folder, tokeniser
from small_models import built_model
from suture.core.errors import ConfigError
from suture.execution.catalogue import model_facts
from suture.models import ModelSpec, check_portable, encoder_of, self_contained
from suture.models.classifier import Classifier
from suture.models.documents import document_inputs, with_digest
from suture.models.saved import load_model, save_model
from suture_encoders import text_folder
from suture_encoders.text_folder import TEXT_NETWORKS
from world import refused

TEXTS = ("No effusion.", "Heart size normal", "", "no no no no no no no no no no no no")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT, as sentence-transformers saves it."""
    sentence_folder(tmp_path / "encoder")
    return tmp_path / "encoder"


def built(path: Path, **settings: Any) -> Classifier:
    return built_model(ModelSpec(f"hf:{path}", **settings), pretrained=True).eval()


@torch.no_grad()
def vectors(path: Path, texts: tuple[str, ...] = TEXTS) -> Tensor:
    return built(path).encode(document_inputs(ModelSpec(f"hf:{path}"), texts))


def ids_of(text: str, longest: int = 8) -> list[int]:
    """By hand: small letters, pieces of words, the marks around them, cut before the last mark."""
    known = {word: number for number, word in enumerate(WORDS)}
    words = text.lower().replace(".", " .").split()
    return [2, *[known.get(word, 1) for word in words][: longest - 2], 3]


@torch.no_grad()
def theirs(
    network: Any, texts: tuple[str, ...] = TEXTS, pooling: str = "mean", *, unit: bool = True
) -> Tensor:
    """One document at a time, without any padding."""
    states = [network(input_ids=torch.tensor([ids_of(text)])).last_hidden_state[0] for text in texts]
    pooled = torch.stack([one.mean(0) if pooling == "mean" else one[0] for one in states])
    return F.normalize(pooled, dim=1) if unit else pooled


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in TEXT_NETWORKS if kind != "model2vec"])
def test_a_vector_is_the_mean_of_the_tokens_whatever_the_padding(kind: str, tmp_path: Path) -> None:
    own = sentence_folder(tmp_path / "encoder", kind)
    assert_alike(vectors(tmp_path / "encoder"), theirs(own))


@pytest.mark.parametrize(
    ("pooling", "unit", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, True, "cls"),
        ({"pooling_mode": "cls", "embedding_dimension": 16}, False, "cls"),
        ({"pooling_mode": "mean"}, False, "mean"),
    ],
)
def test_pooling_and_length_are_those_of_the_folder(
    pooling: dict[str, Any], unit: bool, expected: str, tmp_path: Path
) -> None:
    own = sentence_folder(tmp_path / "encoder", "bert", pooling, unit=unit)
    assert_alike(vectors(tmp_path / "encoder"), theirs(own, pooling=expected, unit=unit))


@pytest.mark.parametrize("file", text_folder._LENGTHS)
def test_no_longest_document_is_the_number_of_positions(file: str, folder: Path) -> None:
    for limit, size in {str(int(1e30)): 12, "1e30": 12, "null": 12, "9": 9}.items():
        for name, key in text_folder._LENGTHS.items():
            (folder / name).write_text(f'{{"{key}": {limit if name == file else "null"}, "a":1}}')
        assert encoder_of(ModelSpec(f"hf:{folder}")).size == size


def test_an_earlier_layout_and_a_folder_of_transformers_alone(folder: Path, tmp_path: Path) -> None:
    """Files in 0_Transformer; and neither modules nor lengths: the mean of as many as have positions."""
    own, nested = network(), folder / "0_Transformer"
    nested.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (folder / name).rename(nested / name)
    assert_alike(vectors(folder), theirs(own))
    plain = tmp_path / "plain"
    own.save_pretrained(plain)  # type: ignore[operator]
    tokeniser().save(str(plain / "tokenizer.json"))
    assert encoder_of(ModelSpec(f"hf:{plain}")).size == SMALL["max_position_embeddings"]
    assert_alike(vectors(plain, TEXTS[:2]), theirs(own, TEXTS[:2], unit=False))


def test_sites_need_no_folder_and_a_saved_model_predicts_without_it(folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec(f"hf:{folder}", train="head")
    plan = self_contained(spec)
    assert plan.name == "hf:bert"
    assert str(tmp_path) not in str(plan.encoder_config)
    check_portable(plan, "a job")
    ours = built_model(spec, pretrained=True).eval()
    save_model(ours, spec, tmp_path / "model", {})
    inputs = document_inputs(spec, TEXTS)
    folder.rename(tmp_path / "elsewhere")
    opened, _ = load_model(tmp_path / "model")
    read = document_inputs(plan, TEXTS)
    assert all(torch.equal(read[name], inputs[name]) for name in ("tokens", "length"))
    with torch.no_grad():
        assert torch.equal(opened(read), ours(inputs))


def test_the_whole_encoder_is_trained_or_the_head_alone_and_half_precision_leaves_no_gap(
    folder: Path,
) -> None:
    model, inputs = built(folder).train(), document_inputs(ModelSpec(f"hf:{folder}"), TEXTS)
    model(inputs).sum().backward()
    assert not [name for name, tensor in model.named_parameters() if tensor.grad is None]
    assert all(tensor.is_floating_point() for tensor in model.state_dict().values())
    frozen = built(folder, train="head")
    assert {n for n, p in frozen.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    for half in (torch.bfloat16, torch.float16):
        model.eval().compute_in(half)
        with torch.no_grad():
            found = model.encode(inputs)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, vectors(folder), rtol=0, atol=0.03)


def test_model2vec_is_the_mean_of_known_tokens_without_marks(tmp_path: Path) -> None:
    table = static_folder(tmp_path / "static", unit=False)
    found = vectors(tmp_path / "static", ("No effusion.", "Heart xyzzy hearts", "", "xyzzy"))
    nothing = torch.zeros(4)
    expected = torch.stack([table[[4, 5]].mean(0), table[[6, 6, 9]].mean(0), nothing, nothing])
    torch.testing.assert_close(found, expected)  # the full stop is unknown
    static_folder(tmp_path / "unit")
    found = vectors(tmp_path / "unit", ("No effusion.", "xyzzy"))
    torch.testing.assert_close(found, torch.stack([F.normalize(expected[0], dim=0), nothing]))
    mapping = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 5, 5])
    weights = torch.linspace(0.5, 2, len(WORDS))
    table = static_folder(tmp_path / "shared", unit=False, mapping=mapping, weights=weights)
    found = vectors(tmp_path / "shared", ("no effusion",))
    torch.testing.assert_close(found[0], (table[4] * weights[4] + table[4] * weights[5]) / 2)


@pytest.mark.parametrize(("make", "width"), [(sentence_folder, 16), (static_folder, 4)])
def test_a_table_of_embeddings_is_computed_by_the_same_folders(make: Any, width: int, tmp_path: Path) -> None:
    """`vectors` reads of such a folder what `hf:FOLDER` does, and keeps it in the cache."""
    make(tmp_path / "encoder")
    spec = with_digest(ModelSpec("vectors", embedding=str(tmp_path / "encoder"), vector=width))
    found = document_inputs(spec, TEXTS, tmp_path / "cache", "alpha")["vector"]
    assert_alike(found, vectors(tmp_path / "encoder"))
    (_,) = (tmp_path / "cache").glob("text-*.features")
    assert torch.equal(document_inputs(spec, TEXTS, tmp_path / "cache", "alpha")["vector"], found)


def described_spec(values: dict[str, Any] | None = None, kind: str = "bert", **more: Any) -> ModelSpec:
    """A job of another party, changed in a few places."""
    config = {"arguments": {**SMALL, "pooling": "mean"}, "size": 8, "tokeniser": tokeniser().to_str()}
    return ModelSpec(f"hf:{kind}", encoder_config=json.dumps(config | (values or {})), **more)


@pytest.mark.complete
@given(st.lists(st.text(max_size=60), max_size=5), st.integers(3, 12))
def test_any_document_has_tokens_that_the_encoder_knows(texts: list[str], longest: int) -> None:
    read = document_inputs(described_spec(longest=longest), texts)
    tokens, length = read["tokens"], read["length"]
    assert tokens.shape[0] == len(texts) == len(length)
    assert tokens.dtype == torch.int32
    assert all(2 <= n <= longest for n in length)
    assert bool((tokens >= 0).all() and (tokens < len(WORDS)).all())
    assert not any(row[n:].any() for row, n in zip(tokens, length, strict=True))


def test_documents_are_read_in_batches_like_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    described = encoder_of(described_spec()).tokenise
    assert described is not None
    texts = [f"no {'heart ' * (i % 5)}" for i in range(2100)]
    tokens, length = described(texts, None)
    for i in (0, 1023, 1024, 2099):
        alone, n = described([texts[i]], None)
        assert tokens[i, : n[0]].tolist() == alone[0, : n[0]].tolist()
        assert length[i] == n[0]
    monkeypatch.setattr(text_folder, "_LETTERS", 100)
    texts = ["x" * 60, "y" * 40, "z", "w" * 500, "v"]
    assert [*text_folder._batches(texts)] == [texts[:2], texts[2:3], texts[3:4], texts[4:]]


def rules(**parts: Any) -> dict[str, Any]:
    return {"tokeniser": json.dumps(json.loads(tokeniser().to_str()) | parts)}


def arguments(**changes: Any) -> dict[str, Any]:
    return {"arguments": {**SMALL, **changes}}


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
PATTERN = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": " "}
HIDDEN = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, PATTERN]}
DAMAGED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # at which the library panics


@pytest.mark.parametrize(
    ("values", "settings", "named"),
    [
        (rules(pre_tokenizer=SPLIT), {}, "(a+)"),
        (rules(normalizer=HIDDEN), {}, "(a+)"),
        (rules(normalizer=DAMAGED), {}, "charsmap"),
        (rules(model={"type": "Unheard"}), {}, "tokeniser"),
        (rules(model=None), {}, "tokeniser"),
        ({"tokeniser": "{"}, {}, "tokeniser"),
        ({"tokeniser": "[]"}, {}, "tokeniser"),
        ({"tokeniser": None}, {}, "tokeniser"),
        ({"mean": [0.5], "std": [0.5]}, {}, "mean and std"),
        (arguments(vocab_size=5), {}, "5 tokens"),
        (arguments(vocab_size="many"), {}, "vocab_size is 'many'"),
        (arguments(max_position_embeddings=2.5), {}, "max_position_embeddings is 2.5"),
        (arguments(auto_map="x"), {}, "'auto_map'"),
        (arguments(pooling="max"), {}, "'max'"),
        (arguments(num_attention_heads=3), {}, "hf:bert"),
        (arguments(num_hidden_layers=10**6), {}, "num_hidden_layers"),
        (arguments(vocab_size=2**20, hidden_size=2**16), {}, "GB"),
        ({}, {"longest": 13}, "model.longest is 13"),
        ({}, {"vocabulary": ("no",)}, "vocabulary"),
        ({}, {"longest": 8, "padding": True}, "padding"),
    ],
)
def test_another_party_s_encoder_is_refused(
    values: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    spec = described_spec(values, **settings)

    def prepare() -> None:
        document_inputs(spec, TEXTS)
        built_model(spec)

    with refused(named, by=ConfigError):
        prepare()


def test_a_network_of_images_has_no_tokeniser() -> None:
    with refused("hf:vit", by=ConfigError):
        encoder_of(described_spec(None, "vit"))
    image = json.dumps({"arguments": {}, "mean": [0.5], "std": [0.5]})
    with refused("hf:bert", by=ConfigError):
        encoder_of(ModelSpec("hf:bert", encoder_config=image))


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
        ("config.json", {"num_hidden_layers": 3}, "layer.2."),
        ("config.json", {"num_hidden_layers": 1}, "layer.1."),
        ("config.json", {"hidden_size": 24}, "BertModel"),
        ("config.json", {"vocab_size": None}, "0 tokens"),
        ("config.json", {"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "encoder"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pooling"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    file: str, values: dict[str, Any], named: str, folder: Path
) -> None:
    changed(folder / file, **values)
    with refused(named, by=ConfigError):
        built(folder)


def test_a_tokeniser_with_dropout_or_too_long_for_a_job_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("suture.models._LONGEST_CONFIG", 500)
        with refused("encoder", "tokeniser", by=ConfigError):
            self_contained(ModelSpec(f"hf:{folder}"))
    # It would give a document other tokens each time, at each party.
    pieces = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    tokenizers.Tokenizer(pieces).save(str(folder / "tokenizer.json"))
    with refused("dropout", by=ConfigError):
        built(folder)


def charsmap(trie: int, text: bytes) -> dict[str, Any]:
    """By hand: the number of bytes of the trie, the trie, and what it puts in the place of letters."""
    packed = base64.b64encode(struct.pack("<I", trie) + bytes(8) + text).decode()
    return {"type": "Precompiled", "precompiled_charsmap": packed}


def template(*single: str, **ids: Any) -> dict[str, Any]:
    """A and B are documents, other words marks around them."""
    pieces = [{"Sequence" if word in "AB" else "SpecialToken": {"id": word, "type_id": 0}} for word in single]
    marks = {word: {"id": word, "ids": list(ids[word]), "tokens": [word] * len(ids[word])} for word in ids}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": marks}


def model_of(**changes: Any) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokeniser().to_str())["model"]
    return {"model": model | changes}


def steps(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": [*normalizers]}}


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
EQUAL = LONGER | {"content": "b"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (steps(*[LONGER] * 9), "Replace"),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "aa"}}, "Replace"),
        (steps(*[EQUAL] * 20), "Sequence"),
        (steps({"type": "ByteLevel"}, {"type": "ByteLevel"}), "ByteLevel"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}}, "ByteLevel"),
        ({"normalizer": {"type": "Prepend", "prepend": "no " * 3_000}}, ""),
        ({"post_processor": {"type": "BertProcessing", "sep": ["x" * 9_000, 3], "cls": ["y", 2]}}, ""),
        ({"post_processor": template("A", "A")}, "TemplateProcessing"),
        ({"post_processor": template("B")}, "TemplateProcessing"),
        ({"post_processor": template("x", x=[2])}, "TemplateProcessing"),
        ({"post_processor": template("A", "unknown")}, "TemplateProcessing"),
        ({"post_processor": template("A", *"x" * 9, x=[2, 2])}, ""),
        ({"normalizer": charsmap(8, b"y" * 65 + b"\0")}, "Precompiled"),
        ({"normalizer": charsmap(2**32 - 4, b"y\0")}, "Precompiled"),
        ({"normalizer": charsmap(8, b"y\0" * 2**19)}, "Precompiled"),
        (model_of(max_input_chars_per_word=10**9), "max_input_chars_per_word"),
        (model_of(continuing_subword_prefix="#" * 17), "continuing_subword_prefix"),
        (model_of(type="BPE", merges=[], end_of_word_suffix="#" * 17), "end_of_word_suffix"),
        (model_of(vocab={"x" * 513: 0}), "513"),
        ({"model": {"type": "Unigram", "vocab": [["x" * 65, 0.0]]}}, "65"),
        ({"added_tokens": [{"id": 10, "content": "y" * 513}]}, "513"),
        ({"added_tokens": [{"id": 10, "content": "y" * 500}] * 3_000}, "added_tokens"),
    ],
)
def test_a_tokeniser_that_fills_the_memory_is_refused(part: dict[str, Any], named: str) -> None:
    """Nine steps that replace a letter by ten make a thousand million of one."""
    with refused(named, by=ConfigError):
        document_inputs(described_spec(rules(**part)), TEXTS)


def test_steps_that_do_not_lengthen_a_document_may_repeat(folder: Path) -> None:
    """As in the tokeniser of ALBERT."""
    before = vectors(folder, ("No effusion",))
    marks = template("first", "A", "last", first=[2], last=[3])
    parts = steps(EQUAL, EQUAL, {"type": "NFKD"}, {"type": "Lowercase"}) | {"post_processor": marks}
    changed(folder / "tokenizer.json", **parts)
    assert torch.equal(vectors(folder, ("no effusion",)), before)


def test_other_modules_and_missing_files_are_named(folder: Path) -> None:
    file = folder / "modules.json"
    modules = json.loads(file.read_text())
    for kinds in (["Transformer", "Pooling", "Dense"], ["own.Code", "Pooling"], ["Transformer"]):
        named = [module | {"type": kind} for module, kind in zip(modules, kinds, strict=False)]
        file.write_text(json.dumps(named))
        with refused(kinds[0].removeprefix("own."), by=ConfigError):
            built(folder)
    for content in ("{}", "[1, 2]", '[{"type": 1}]', "["):
        file.write_text(content)
        with refused("encoder", by=ConfigError):
            built(folder)
    file.write_text(json.dumps(modules))
    (folder / "tokenizer.json").unlink()
    with refused("tokenizer.json", "AutoTokenizer", by=ConfigError):
        built(folder)


TABLE = torch.ones(len(WORDS), 4)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"embeddings": TABLE, "mapping": torch.tensor([0, 99])}, "model2vec"),
        ({"embeddings": TABLE, "weights": torch.ones(3)}, "model2vec"),
        ({"embeddings": TABLE, "mapping": torch.tensor([0, 1])}, "2 tokens"),
        ({"embeddings": TABLE, "mapping": torch.zeros(11, dtype=torch.uint8)}, "11 vectors"),
        ({"embeddings": TABLE * torch.nan}, "weight"),
        ({"vectors": TABLE}, "embeddings"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    tensors: dict[str, Tensor], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_folder, "MOST_BYTES", 2 * 10 * 4 * 4)
    static_folder(tmp_path / "static")
    save_file(tensors, tmp_path / "static" / "model.safetensors")
    with refused(named, by=ConfigError):
        vectors(tmp_path / "static")


def test_what_a_user_is_told_of_it(folder: Path) -> None:
    told = dict(model_facts(f"hf:{folder}"))
    assert "8 tokens" in told["documents"]
    assert "16" in told["features"]
    assert "images" not in told
    number = sum(p.numel() for n, p in network().named_parameters() if not n.startswith("pooler"))
    assert told["parameters"] == f"{number:,}"
