"""``hf:FOLDER`` with an encoder of text: a transformer as in sentence-transformers, or a table of model2vec.

Reimers and Gurevych, Sentence-BERT, EMNLP 2019 (arXiv:1908.10084); model2vec, github.com/MinishLab/model2vec.
The tokeniser is part of the description, so that all parties read a document alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, as_word, check_known, show_value, unknown
from suture.core.files import parse_json, read_bounded
from suture.core.validation import parse
from suture.models import Description
from suture.models.weights import fill, read_weights
from suture_encoders.foreign import BUILD_ERRORS, MOST_BYTES, bound_network, read_config
from suture_encoders.tokenisers import made_tokeniser, without_panic
from suture_encoders.transformers_weights import filled

if TYPE_CHECKING:
    from suture.models import ModelSpec

_MODEL2VEC = "model2vec"

TEXT_NETWORKS = {
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "mpnet": "MPNetModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    _MODEL2VEC: "",
}
"""The classes of the networks in transformers, by their `model_type` in config.json."""

_ARGUMENTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings"),
    *("type_vocab_size", "layer_norm_eps", "pad_token_id", "relative_attention_num_buckets"),
    *("embedding_size", "dim", "n_layers", "n_heads", "hidden_dim", "dropout", "attention_dropout"),
    *("activation", "sinusoidal_pos_embds"),
)
"""Their own settings in config.json; the others are of training or of heads."""

_AFTER_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Those whose positions begin after the number of the padding token."""

_WITH_POOLER = ("bert", *_AFTER_PADDING)
"""Those with a layer above the class token, which sentence-transformers leaves out."""

_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
"""What makes one vector of those of the tokens, by its flag in earlier versions of sentence-transformers."""

_LENGTHS = {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}
"""Where a folder states the number of tokens that are read of a document."""

_LONGEST = 512
"""That number in model2vec, where the folder states none."""

_BATCH, _LETTERS = 1024, 2**22
"""Documents at a time, and their letters: the objects of `tokenizers` take a hundred bytes a token."""


def read_text_folder(folder: Path, kind: str, config: Mapping[str, Any]) -> Description:
    """Return an encoder of text: arguments of its network, pooling, normalisation and tokeniser.

    Args:
        kind: the `model_type` of its configuration.

    Raises:
        ConfigError: it has other modules than a transformer, a mean or class token and a normalisation; or
            its tokeniser is missing or cannot be used.
    """
    nested = folder / "0_Transformer"
    home = nested if nested.is_dir() else folder
    path = home / "tokenizer.json"
    if not path.is_file():
        line = "from transformers import AutoTokenizer as T; T.from_pretrained('.').save_pretrained('.')"
        raise ConfigError(f'model.name: {path} is missing; run in {home}: python -c "{line}"')
    try:
        if kind == _MODEL2VEC:
            rows, width = _table(str(folder)).shape
            arguments = {"vocab_size": rows, "hidden_size": width, "normalize": bool(config.get("normalize"))}
            longest = config.get("max_length") or _LONGEST
        else:
            arguments = {key: config[key] for key in _ARGUMENTS if config.get(key) is not None}
            files = [(home / name, key) for name, key in _LENGTHS.items() if (home / name).is_file()]
            stated = [int(number) for file, key in files if (number := read_config(file).get(key))]
            longest = min([_positions(kind, arguments), *stated])
            arguments |= _modules(folder)
        text = json.dumps(parse_json(read_bounded(path)), ensure_ascii=False)
    except (*BUILD_ERRORS, OSError) as error:
        raise ConfigError(
            f"model.name: {folder} is not a whole encoder of text ({type(error).__name__}: "
            f"{as_word(error)}); copy all of its files"
        ) from error
    whole = {"arguments": arguments, "size": longest, "tokeniser": text}
    described = parse(Description, whole, f"{folder}/config.json")
    tokenise_texts(kind, described, [""], None)
    return described


def _modules(folder: Path) -> dict[str, Any]:
    """Return pooling and normalisation; a folder of transformers alone states none, and gets the mean."""
    path = folder / "modules.json"
    if not path.is_file():
        return {"pooling": "mean", "normalize": False}
    modules = parse_json(read_bounded(path))
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"model.name: {path} has the modules {', '.join(map(as_word, kinds))}; Suture builds "
            "Transformer, Pooling and Normalize, in this order; choose another model"
        )
    stated = read_config(folder / Path(modules[1]["path"]).name / "config.json")
    flags = [_POOLINGS.get(key, key) for key, on in stated.items() if key.startswith("pooling_mode_") and on]
    pooling = stated.get("pooling_mode") or "+".join(flags)
    return {"pooling": pooling, "normalize": len(kinds) > 2}


def _number(arguments: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return an argument that is a whole number, whoever has written it."""
    value = arguments.get(name, default)
    if type(value) is not int or value < 0:
        raise ConfigError(f"the encoder's {name} is {show_value(value)}; it must be a whole number")
    return value


def _positions(kind: str, arguments: Mapping[str, Any]) -> int:
    """Return the largest number of tokens for which a transformer has positions."""
    unused = _number(arguments, "pad_token_id", 1) + 1 if kind in _AFTER_PADDING else 0
    return _number(arguments, "max_position_embeddings", 512) - unused


def tokenise_texts(
    kind: str, described: Description, texts: Sequence[str], longest: int | None
) -> tuple[Tensor, Tensor]:
    """Return documents as an encoder reads them.

    Args:
        longest: use at most this many tokens of a document; None uses the encoder's own number.

    Returns:
        tokens int32 [n, l], padded behind with 0; and their true lengths int64 [n]: from 1 to l, or from 0
        where model2vec leaves unknown tokens out.

    Raises:
        ConfigError: the tokeniser cannot be used, or is another encoder's; or `longest` is too large.
    """
    static, limit = kind == _MODEL2VEC, longest or described.size or _LONGEST
    if not static and limit > (most := _positions(kind, described.arguments)):
        raise ConfigError(f"model.longest is {limit}, and hf:{kind} reads at most {most} tokens; lower it")
    tokeniser, unknown_token = made_tokeniser(described.tokeniser or "", limit)
    rows: list[list[int]] = []
    for batch in _batches(texts):
        with without_panic():
            found = tokeniser.encode_batch_fast(batch, add_special_tokens=not static)
        rows += [one.ids[:limit] for one in found]
    if static:
        rows = [[token for token in row if token != unknown_token] for row in rows]
    known = _number(described.arguments, "vocab_size")
    if (largest := max(map(max, filter(None, rows)), default=-1)) >= known:
        raise ConfigError(
            f"the encoder has {known} tokens, and its tokeniser token {largest}; copy both again"
        )
    length = torch.tensor([len(row) if static else max(1, len(row)) for row in rows], dtype=torch.int64)
    tokens = [torch.tensor(row, dtype=torch.int32) for row in (*rows, [0])]  # at least one wide
    return pad_sequence(tokens, batch_first=True)[:-1], length


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch, letters = list[str](), 0
    for text in texts:
        if batch and (len(batch) == _BATCH or letters + len(text) > _LETTERS):
            yield batch
            batch, letters = [], 0
        batch.append(text)
        letters += len(text)
    yield batch


def build_text_network(
    kind: str, described: Description, spec: ModelSpec, weights: str | None
) -> tuple[nn.Module, int]:
    """Build a network from tokens ``[n, l]`` and lengths ``[n]`` to a vector of each document.

    Raises:
        ConfigError: transformers is not installed, or the weights are another network's.
    """
    arguments = dict(described.arguments)
    pooling, unit = arguments.pop("pooling", "mean"), arguments.pop("normalize", False) is True
    tokens = spec.longest or described.size or _LONGEST
    if kind == _MODEL2VEC:
        rows, width = (_number(arguments, name) for name in ("vocab_size", "hidden_size"))
        table = bound_network(lambda: nn.Embedding(rows, width), spec, tokens)
        if weights:
            fill(table.state_dict(), {"weight": _table(weights)}, weights, "model2vec's table")
        return _Sentence(table, 0, token=False, unit=unit), width
    check_known(f"pooling of hf:{kind}", str(pooling), _POOLINGS.values())
    if wrong := arguments.keys() - {*_ARGUMENTS}:
        raise unknown(f"argument of hf:{kind}", min(wrong), _ARGUMENTS)
    made = getattr(needed("transformers", f"hf:{kind}", "encoders"), TEXT_NETWORKS[kind])
    extra = {"add_pooling_layer": False} if kind in _WITH_POOLER else {}
    network: Any = bound_network(lambda: made(made.config_class(**arguments), **extra), spec, tokens)
    if weights:
        network = filled(made, extra, network, read_weights(weights), weights)
    padding, width = network.config.pad_token_id or 0, network.config.hidden_size
    return _Sentence(network, padding, token=pooling == "cls", unit=unit), width


def _table(weights: str) -> Tensor:
    """Return the vector of each token; a table of fewer rows has a mapping, and weights of the tokens."""
    tensors = read_weights(weights)
    try:
        table, mapping = tensors["embeddings"].float(), tensors.get("mapping")
        rows, width = len(table if mapping is None else mapping), table[:1].numel()
        if 8 * rows * width > MOST_BYTES:  # with weights, there are two of them
            raise ConfigError(f"{weights} asks for {rows:,} vectors of {width:,} numbers; choose another")
        table = table if mapping is None else table[mapping.long()]
        return table * tensors["weights"].float()[:, None] if "weights" in tensors else table
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"{weights} has no table of model2vec ({as_word(error)}); name its folder"
        ) from error


class _Sentence(nn.Module):
    """The vector of a document: the mean of those of its tokens, or that of the class token, ``[n, d]``.

    Args:
        padding: the token behind the end of a document.
        token: whether the class token counts alone.
        unit: whether vectors get the length 1.
    """

    def __init__(self, network: nn.Module, padding: int, *, token: bool, unit: bool) -> None:
        super().__init__()
        self.network, self.padding, self.token, self.unit = network, padding, token, unit

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        longest = int(length.max())
        known = torch.arange(longest, device=tokens.device) < length[:, None]
        ids = torch.where(known, tokens[:, :longest], self.padding)
        if isinstance(self.network, nn.Embedding):
            states = self.network(ids)
        else:
            # Numbers to be added, which transformers passes on as they are: for a mask of true and false it
            # would wait for the GPU.
            mask = torch.zeros_like(ids, dtype=torch.float32).masked_fill(~known, -1e30)[:, None, None]
            states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * known[..., None]).sum(1) / length.clamp(min=1)[:, None]
        pooled = states[:, 0] if self.token else mean
        return F.normalize(pooled, dim=1) if self.unit else pooled
