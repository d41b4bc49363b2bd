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
from safetensors.torch import load_file, save_file
from tokenizers import models
from torch import Tensor

from sentence_folder import SMALL, WORDS, changed, network, sentence_folder, static_folder, tokeniser
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.execution.catalogue import model_facts
from suture.models import ModelSpec, build, check_portable, encoder_of, self_contained
from suture.models.classifier import Classifier
from suture.models.documents import document_inputs, with_digest
from suture.models.saved import load_model, save_model
from suture_encoders import text_folder
from suture_encoders.text_folder import TEXT_NETWORKS

LABELS = LabelSet(("Edema", "Mass"))
TEXTS = ("No effusion.", "Heart size normal", "", "no no no no no no no no no no no no")


def built(name: str, **settings: Any) -> Classifier:
    return build(ModelSpec(name, **settings), LABELS, 1, pretrained=True).eval()


@torch.no_grad()
def vectors(name: str, texts: tuple[str, ...] = TEXTS, **settings: Any) -> Tensor:
    spec = ModelSpec(name, **settings)
    return built(name, **settings).encode(document_inputs(spec, texts))


def ids_of(text: str, longest: int = 8) -> list[int]:
    """By hand: small letters, pieces of words, the marks around them, cut before the last mark."""
    known = {word: number for number, word in enumerate(WORDS)}
    words = text.lower().replace(".", " .").split()
    return [2, *[known.get(word, 1) for word in words][: longest - 2], 3]


@torch.no_grad()
def theirs(network: Any, text: str, *, pooling: str = "mean", unit: bool = True) -> Tensor:
    """One document at a time, without any padding."""
    states = network(input_ids=torch.tensor([ids_of(text)])).last_hidden_state[0]
    pooled = states.mean(0) if pooling == "mean" else states[0]
    return F.normalize(pooled, dim=0) if unit else pooled


@pytest.mark.parametrize("kind", [kind for kind in TEXT_NETWORKS if kind != "model2vec"])
def test_a_vector_is_the_mean_of_the_tokens_whatever_the_padding(kind: str, tmp_path: Path) -> None:
    own = sentence_folder(tmp_path / "encoder", kind)
    expected = torch.stack([theirs(own, text) for text in TEXTS])
    torch.testing.assert_close(vectors(f"hf:{tmp_path / 'encoder'}"), expected, rtol=0, atol=1e-6)


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
    found = vectors(f"hf:{tmp_path / 'encoder'}")
    wanted = torch.stack([theirs(own, text, pooling=expected, unit=unit) for text in TEXTS])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert bool((found.norm(dim=1) - 1).abs().max() < 1e-5) == unit


@pytest.mark.parametrize("limit", [f"{int(1e30)}", "1e30", "null", "9"])
@pytest.mark.parametrize("file", text_folder._LENGTHS)
def test_no_longest_document_is_the_number_of_positions(file: str, limit: str, tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    for name, key in text_folder._LENGTHS.items():
        (tmp_path / "encoder" / name).write_text(f'{{"{key}": {limit if name == file else "null"}, "a":1}}')
    stated = 9 if limit == "9" else SMALL["max_position_embeddings"]
    assert encoder_of(ModelSpec(f"hf:{tmp_path / 'encoder'}")).size == stated


def test_an_earlier_layout_and_a_folder_of_transformers_alone(tmp_path: Path) -> None:
    """Files in 0_Transformer; and neither modules nor lengths: the mean of as many as have positions."""
    own = sentence_folder(tmp_path / "old")
    nested = tmp_path / "old" / "0_Transformer"
    nested.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (tmp_path / "old" / name).rename(nested / name)
    expected = torch.stack([theirs(own, text) for text in TEXTS])
    torch.testing.assert_close(vectors(f"hf:{tmp_path / 'old'}"), expected, rtol=0, atol=1e-6)
    own.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    tokeniser().save(str(tmp_path / "plain" / "tokenizer.json"))
    assert encoder_of(ModelSpec(f"hf:{tmp_path / 'plain'}")).size == SMALL["max_position_embeddings"]
    found = vectors(f"hf:{tmp_path / 'plain'}", TEXTS[:2])
    torch.testing.assert_close(
        found, torch.stack([theirs(own, t, unit=False) for t in TEXTS[:2]]), rtol=0, atol=1e-6
    )


@pytest.mark.complete
def test_sites_need_no_folder_and_a_saved_model_predicts_without_it(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    spec = ModelSpec(f"hf:{tmp_path / 'encoder'}", train="head")
    plan = self_contained(spec)
    assert plan.name == "hf:bert"
    assert str(tmp_path) not in str(plan.encoder_config)
    check_portable(plan, "a job")
    ours = build(spec, LABELS, 1, pretrained=True).eval()
    save_model(ours, spec, tmp_path / "model", {})
    inputs = document_inputs(spec, TEXTS)
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    opened, _ = load_model(tmp_path / "model")
    read = document_inputs(plan, TEXTS)
    assert all(torch.equal(read[name], inputs[name]) for name in ("tokens", "length"))
    with torch.no_grad():
        assert torch.equal(opened(read), ours(inputs))


def test_the_whole_encoder_is_trained_but_for_nothing(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    model = built(f"hf:{tmp_path / 'encoder'}").train()
    model(document_inputs(ModelSpec(f"hf:{tmp_path / 'encoder'}"), TEXTS)).sum().backward()
    assert not [name for name, tensor in model.named_parameters() if tensor.grad is None]
    assert all(tensor.is_floating_point() for tensor in model.state_dict().values())
    frozen = built(f"hf:{tmp_path / 'encoder'}", train="head")
    assert [name for name, tensor in frozen.named_parameters() if tensor.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


def test_half_precision_leaves_no_gap_behind_the_end(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    model = built(f"hf:{tmp_path / 'encoder'}")
    exact = vectors(f"hf:{tmp_path / 'encoder'}")
    for half in (torch.bfloat16, torch.float16):
        model.compute_in(half)
        with torch.no_grad():
            found = model.encode(document_inputs(ModelSpec(f"hf:{tmp_path / 'encoder'}"), TEXTS))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=0, atol=0.03)


def test_model2vec_is_the_mean_of_known_tokens_without_marks(tmp_path: Path) -> None:
    table = static_folder(tmp_path / "static", unit=False)
    found = vectors(f"hf:{tmp_path / 'static'}", ("No effusion.", "Heart xyzzy hearts", "", "xyzzy"))
    expected = torch.stack(
        [table[[4, 5]].mean(0), table[[6, 6, 9]].mean(0), torch.zeros(4), torch.zeros(4)]
    )  # the full stop is unknown
    torch.testing.assert_close(found, expected)
    static_folder(tmp_path / "unit")
    found = vectors(f"hf:{tmp_path / 'unit'}", ("No effusion.", "xyzzy"))
    torch.testing.assert_close(found, torch.stack([F.normalize(expected[0], dim=0), torch.zeros(4)]))


def test_a_shared_table_of_model2vec_has_a_mapping_and_weights(tmp_path: Path) -> None:
    mapping = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 5, 5])
    weights = torch.linspace(0.5, 2, len(WORDS))
    table = static_folder(tmp_path / "static", unit=False, mapping=mapping, weights=weights)
    found = vectors(f"hf:{tmp_path / 'static'}", ("no effusion",))
    torch.testing.assert_close(found[0], (table[4] * weights[4] + table[4] * weights[5]) / 2)


@pytest.mark.parametrize("make", [sentence_folder, static_folder])
def test_a_table_of_embeddings_is_computed_by_the_same_folders(make: Any, tmp_path: Path) -> None:
    """`vectors` reads of such a folder what `hf:FOLDER` does, and keeps it in the cache."""
    make(tmp_path / "encoder")
    width = 16 if make is sentence_folder else 4
    spec = with_digest(ModelSpec("vectors", embedding=str(tmp_path / "encoder"), vector=width))
    found = document_inputs(spec, TEXTS, tmp_path / "cache", "alpha")["vector"]
    torch.testing.assert_close(found, vectors(f"hf:{tmp_path / 'encoder'}"), rtol=0, atol=1e-6)
    (cached,) = (tmp_path / "cache").glob("text-*.features")
    assert torch.equal(document_inputs(spec, TEXTS, tmp_path / "cache", "alpha")["vector"], found)
    assert cached.is_file()


@pytest.mark.complete
@given(st.lists(st.text(max_size=60), max_size=5), st.integers(3, 12))
def test_any_document_has_tokens_that_the_encoder_knows(texts: list[str], longest: int) -> None:
    spec = described_spec(longest=longest)
    read = document_inputs(spec, texts)
    tokens, length = read["tokens"], read["length"]
    assert tokens.shape[0] == len(texts) == len(length)
    assert tokens.dtype == torch.int32
    assert all(2 <= n <= longest for n in length)
    assert bool((tokens >= 0).all() and (tokens < len(WORDS)).all())
    for row, n in zip(tokens, length, strict=True):
        assert not row[n:].any()


def described_spec(values: dict[str, Any] | None = None, kind: str = "bert", **more: Any) -> ModelSpec:
    """A job of another party, changed in a few places."""
    config = {"arguments": {**SMALL, "pooling": "mean"}, "size": 8, "tokeniser": tokeniser().to_str()}
    return ModelSpec(f"hf:{kind}", encoder_config=json.dumps(config | (values or {})), **more)


def prepared(spec: ModelSpec) -> None:
    """What a site does with a job."""
    document_inputs(spec, TEXTS)
    build(spec, LABELS, 1, pretrained=False)


def rules(**parts: Any) -> dict[str, Any]:
    return {"tokeniser": json.dumps(json.loads(tokeniser().to_str()) | parts)}


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
PATTERN = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": " "}
HIDDEN = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, PATTERN]}
DAMAGED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # at which the library panics


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (rules(pre_tokenizer=SPLIT), r"does not run its .*(Split|\(a\+\))"),
        (rules(normalizer=HIDDEN), r"does not run its \(a\+\)"),
        (rules(normalizer=DAMAGED), r"tokeniser cannot be used \(.*charsmap"),
        (rules(model={"type": "Unheard"}), r"tokeniser cannot be used"),
        (rules(model=None), r"tokeniser cannot be used"),
        ({"tokeniser": "{"}, r"tokeniser cannot be used"),
        ({"tokeniser": "[]"}, r"tokeniser cannot be used"),
        ({"tokeniser": None}, r"needs mean and std, and one of text a tokeniser"),
        ({"mean": [0.5], "std": [0.5]}, r"needs mean and std, and one of text a tokeniser"),
        ({"arguments": {**SMALL, "vocab_size": 5}}, r"has 5 tokens, and its tokeniser token"),
        ({"arguments": {**SMALL, "vocab_size": "many"}}, r"vocab_size is 'many'; it must be a whole number"),
        ({"arguments": {**SMALL, "max_position_embeddings": 2.5}}, r"max_position_embeddings is 2\.5"),
        ({"arguments": {**SMALL, "auto_map": "x"}}, r"unknown argument of hf:bert 'auto_map'"),
        ({"arguments": {**SMALL, "pooling": "max"}}, r"unknown pooling of hf:bert 'max'"),
        ({"arguments": {**SMALL, "num_attention_heads": 3}}, r"cannot be built for a document of 8 tokens"),
        ({"arguments": {**SMALL, "num_hidden_layers": 10**6}}, r"num_hidden_layers"),
        (
            {"arguments": {**SMALL, "vocab_size": 2**20, "hidden_size": 2**16}},
            r"needs [\d,.]+ GB for a document",
        ),
    ],
)
def test_another_party_s_encoder_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    spec = described_spec(values)
    with pytest.raises(ConfigError, match=said) as caught:
        prepared(spec)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"longest": 13}, r"model\.longest is 13, and hf:bert reads at most 12 tokens; lower it"),
        ({"vocabulary": ("no",)}, r"hf:bert has its own tokeniser; remove them"),
        ({"longest": 8, "padding": True}, r"hf:bert has its own tokeniser; remove them"),
    ],
)
def test_settings_that_do_not_go_with_an_encoder_of_text(settings: dict[str, Any], said: str) -> None:
    spec = described_spec(None, **settings)
    with pytest.raises(ConfigError, match=said):
        prepared(spec)


def test_a_network_of_images_has_no_tokeniser() -> None:
    with pytest.raises(ConfigError, match=r"hf:vit describes another network"):
        encoder_of(described_spec(None, "vit"))
    image = json.dumps({"arguments": {}, "mean": [0.5], "std": [0.5]})
    with pytest.raises(ConfigError, match=r"hf:bert describes another network"):
        encoder_of(ModelSpec("hf:bert", encoder_config=image))


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, r"has auto_map.*does not run"),
        ("config.json", {"num_hidden_layers": 3}, r"layer\.2\..* is missing"),
        ("config.json", {"num_hidden_layers": 1}, r"it has .*layer\.1\..*, too"),
        ("config.json", {"hidden_size": 24}, r"BertModel of the configuration.*16.* instead of .*24"),
        ("config.json", {"vocab_size": None}, r"has 0 tokens, and its tokeniser"),
        ("config.json", {"max_position_embeddings": "x"}, r"max_position_embeddings is 'x'"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": "x"},
            r"is not a whole encoder of text \(ValueError",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            r"pooling of hf:bert .*pooling_mode_max_tokens",
        ),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, r"arguments\.pooling|unknown pooling"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, r"unknown pooling of hf:bert ''"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    file: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sentence_folder(tmp_path / "encoder")
    changed(tmp_path / "encoder" / file, **values)
    with pytest.raises(ConfigError, match=said) as caught:
        built(f"hf:{tmp_path / 'encoder'}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokeniser_with_dropout_is_refused(tmp_path: Path) -> None:
    """It would give a document other tokens each time, at each party."""
    pieces = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    sentence_folder(tmp_path / "encoder")
    tokenizers.Tokenizer(pieces).save(str(tmp_path / "encoder" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its dropout would give other tokens each time"):
        built(f"hf:{tmp_path / 'encoder'}")


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


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
EQUAL = LONGER | {"content": "b"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [LONGER] * 9}},
            "its Replace lengthens a document",
        ),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "aa"}}, "its Replace lengthens a document"),
        ({"normalizer": {"type": "Sequence", "normalizers": [EQUAL] * 20}}, "it repeats"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 2}},
            "repeats ByteLevel",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}}, "it repeats ByteLevel"),
        ({"normalizer": {"type": "Prepend", "prepend": "no " * 3_000}}, "its steps have"),
        (
            {"post_processor": {"type": "BertProcessing", "sep": ["x" * 9_000, 3], "cls": ["y", 2]}},
            "its steps",
        ),
        ({"post_processor": template("A", "A")}, "TemplateProcessing"),
        ({"post_processor": template("B")}, "TemplateProcessing"),
        ({"post_processor": template("x", x=[2])}, "TemplateProcessing"),
        ({"post_processor": template("A", "unknown")}, "TemplateProcessing"),
        ({"post_processor": template("A", *"x" * 9, x=[2, 2])}, "marks around a document"),
        ({"normalizer": charsmap(8, b"y" * 65 + b"\0")}, "its Precompiled lengthens"),
        ({"normalizer": charsmap(2**32 - 4, b"y\0")}, "Precompiled is damaged"),
        ({"normalizer": charsmap(8, b"y\0" * 2**19)}, "its Precompiled has"),
        (model_of(max_input_chars_per_word=10**9), "max_input_chars_per_word"),
        (model_of(continuing_subword_prefix="#" * 17), "continuing_subword_prefix"),
        (model_of(type="BPE", merges=[], end_of_word_suffix="#" * 17), "end_of_word_suffix"),
        (model_of(vocab={"x" * 513: 0}), "a token of 513 letters"),
        ({"model": {"type": "Unigram", "vocab": [["x" * 65, 0.0]]}}, "a token of 65 letters"),
        ({"added_tokens": [{"id": 10, "content": "y" * 513}]}, "a token of 513 letters"),
        ({"added_tokens": [{"id": 10, "content": "y" * 500}] * 3_000}, "added_tokens"),
    ],
    ids=str,
)
def test_a_tokeniser_that_fills_the_memory_is_refused(part: dict[str, Any], says: str) -> None:
    """Nine steps that replace a letter by ten make a thousand million of one."""
    with pytest.raises(ConfigError, match=says) as caught:
        document_inputs(described_spec(rules(**part)), TEXTS)
    assert len(str(caught.value)) < 300


def test_what_a_job_does_not_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence_folder(tmp_path / "encoder")
    monkeypatch.setattr("suture.models._LONGEST_CONFIG", 500)
    with pytest.raises(ConfigError, match=r"encoder: its tokeniser takes [\d,]+ letters"):
        self_contained(ModelSpec(f"hf:{tmp_path / 'encoder'}"))


def test_steps_that_do_not_lengthen_a_document_may_repeat(tmp_path: Path) -> None:
    """As in the tokeniser of ALBERT."""
    sentence_folder(tmp_path / "encoder")
    steps = [EQUAL, EQUAL, {"type": "NFKD"}, {"type": "Lowercase"}]
    before = vectors(f"hf:{tmp_path / 'encoder'}", ("No effusion",))
    changed(
        tmp_path / "encoder" / "tokenizer.json",
        normalizer={"type": "Sequence", "normalizers": steps},
        post_processor=template("first", "A", "last", first=[2], last=[3]),
    )
    assert torch.equal(vectors(f"hf:{tmp_path / 'encoder'}", ("no effusion",)), before)


def test_other_modules_and_missing_files_are_named(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    folder = tmp_path / "encoder"
    modules = json.loads((folder / "modules.json").read_text())
    for kinds, said in (
        (["Transformer", "Pooling", "Dense"], r"modules Transformer, Pooling, Dense; Suture builds"),
        (["own.Code", "Pooling"], r"modules Code, Pooling"),
        (["Transformer"], r"modules Transformer;"),
    ):
        named = [module | {"type": kind} for module, kind in zip(modules, kinds, strict=False)]
        (folder / "modules.json").write_text(json.dumps(named))
        with pytest.raises(ConfigError, match=said):
            built(f"hf:{folder}")
    for content in ("{}", "[1, 2]", '[{"type": 1}]', "["):
        (folder / "modules.json").write_text(content)
        with pytest.raises(ConfigError, match=r"whole encoder of text|modules"):
            built(f"hf:{folder}")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing; run in .*AutoTokenizer"):
        built(f"hf:{folder}")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"mapping": torch.tensor([0, 99])}, r"has no table of model2vec"),
        ({"weights": torch.ones(3)}, r"has no table of model2vec"),
        ({"mapping": torch.tensor([0, 1])}, r"has 2 tokens, and its tokeniser token"),
        ({"mapping": torch.zeros(11, dtype=torch.uint8)}, r"11 vectors of 4 numbers"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    tensors: dict[str, Tensor], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_folder, "MOST_BYTES", 2 * 10 * 4 * 4)
    static_folder(tmp_path / "static", **tensors)
    with pytest.raises(ConfigError, match=said):
        vectors(f"hf:{tmp_path / 'static'}")


def test_a_table_of_other_tensors_is_refused(tmp_path: Path) -> None:
    table = static_folder(tmp_path / "static")
    save_file({"vectors": table}, tmp_path / "static" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no table of model2vec \('?embeddings"):
        built(f"hf:{tmp_path / 'static'}")
    save_file({"embeddings": table * torch.nan}, tmp_path / "static" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is not finite"):
        built(f"hf:{tmp_path / 'static'}")


def test_weights_of_a_model_with_a_head_and_of_an_older_file(tmp_path: Path) -> None:
    """The part `bert.` of a masked language model; its pooler and its head are left out."""
    own = sentence_folder(tmp_path / "encoder")
    folder = tmp_path / "encoder"
    state = load_file(folder / "model.safetensors")
    whole = {f"bert.{name}": tensor for name, tensor in state.items()} | {
        "cls.predictions.bias": torch.ones(10)
    }
    (folder / "model.safetensors").unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    expected = torch.stack([theirs(own, text) for text in TEXTS])
    torch.testing.assert_close(vectors(f"hf:{folder}"), expected, rtol=0, atol=1e-6)


def test_what_a_user_is_told_of_it(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder")
    told = dict(model_facts(f"hf:{tmp_path / 'encoder'}"))
    assert told["model"] == "bert of hf, for text"
    assert told["documents"].startswith("the first 8 tokens")
    assert told["features"] == "16 for each text"
    assert "images" not in told
    number = sum(p.numel() for n, p in network().named_parameters() if not n.startswith("pooler"))
    assert told["parameters"] == f"{number:,}"


def test_documents_are_read_in_batches_like_one_by_one() -> None:
    spec = described_spec()
    described = encoder_of(spec).tokenise
    assert described is not None
    texts = [f"no {'heart ' * (i % 5)}" for i in range(2100)]
    tokens, length = described(texts, None)
    for i in (0, 1023, 1024, 2099):
        alone, n = described([texts[i]], None)
        assert tokens[i, : n[0]].tolist() == alone[0, : n[0]].tolist()
        assert length[i] == n[0]


def test_long_documents_are_few_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folder, "_LETTERS", 100)
    texts = ["x" * 60, "y" * 40, "z", "w" * 500, "v"]
    assert [*text_folder._batches(texts)] == [texts[:2], texts[2:3], texts[3:4], texts[4:]]
