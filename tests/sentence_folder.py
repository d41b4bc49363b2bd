"""Small encoders of text with random weights, as sentence-transformers and model2vec save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "no", "effusion", "heart", "size", "normal", "##s")
SMALL = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
}
DISTIL = {"vocab_size": len(WORDS), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}


def tokeniser() -> tokenizers.Tokenizer:
    """Pieces of words in small letters, with the marks of BERT around a document."""
    made = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_padding(length=64)  # as in the file of all-MiniLM-L6-v2, which pads to 128
    return made


def network(kind: str = "bert") -> nn.Module:
    import transformers

    torch.manual_seed(0)
    name = {"distilbert": "DistilBert", "mpnet": "MPNet", "xlm-roberta": "XLMRoberta"}.get(kind, kind.title())
    config = getattr(transformers, f"{name}Config")
    settings = {**DISTIL, "max_position_embeddings": 12} if kind == "distilbert" else SMALL
    if kind in ("roberta", "camembert", "xlm-roberta", "mpnet"):
        settings = {**settings, "max_position_embeddings": 14, "pad_token_id": 1}
    made: nn.Module = getattr(transformers, f"{name}Model")(config(**settings)).eval()
    return made


def sentence_folder(
    path: Path,
    kind: str = "bert",
    pooling: dict[str, Any] | None = None,
    *,
    unit: bool = True,
    longest: int = 8,
) -> nn.Module:
    """Write what sentence-transformers writes; return the network of transformers."""
    made = network(kind)
    made.save_pretrained(path)  # type: ignore[operator]
    tokeniser().save(str(path / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if unit else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    flags = pooling or {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    return made


def static_folder(path: Path, *, unit: bool = True, **tensors: Tensor) -> Tensor:
    """Write what model2vec writes; return the vectors of its tokens."""
    path.mkdir()
    torch.manual_seed(0)
    table = torch.randn(len(WORDS), 4)
    save_file({"embeddings": table, **tensors}, path / "model.safetensors")
    tokeniser().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": unit}))
    static = {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}
    (path / "modules.json").write_text(json.dumps([static]))
    return table


def changed(file: Path, **values: Any) -> None:
    """Change entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
