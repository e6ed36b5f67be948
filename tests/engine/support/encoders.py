"""Tiny random encoders, what transformers computes with them, and numbers of published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.engine.support.embedding_models import describe

VOCAB = 120
WORDS = ["a", "heap", "list", "of", "the", "items", "largest", "smallest", "return", "iterable", "nothing"]
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "initializer_range": 0.2,
}
ENCODER_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "xlm_roberta": ("XLMRoberta", {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": (
        "ModernBert",
        {
            "max_position_embeddings": 128,
            "local_attention": 12,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "cls_token_id": 0,
            "sep_token_id": 2,
        },
    ),
    "modernbert_biased": (
        "ModernBert",
        {
            "max_position_embeddings": 128,
            "local_attention": 12,
            "pad_token_id": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
}


def save_encoder(
    family: str, directory: Path, pooling: str = "cls", *, head: bool = False, **overrides: Any
) -> Path:
    """A tiny float32 encoder with sentence-transformers' files, or with a classification head instead, and a
    tokenizer of whole words, which puts marks around texts as XLM-R's does.
    """
    prefix, differences = ENCODER_FAMILIES[family]
    fields = {**_COMMON, **differences, **overrides, **({"num_labels": 1} if head else {})}
    config = getattr(transformers, f"{prefix}Config")(**fields)
    kind = f"{prefix}{'ForSequenceClassification' if head else 'Model'}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif "norm" in name.lower():
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    if not head:
        describe(directory, {"word_embedding_dimension": 48, f"pooling_mode_{pooling}": True}, "Normalize")
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(directory)


def their_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The encoder as transformers runs it, with its plainest attention."""
    kind = json.loads((directory / "config.json").read_text())["architectures"][0]
    options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
    return getattr(transformers, kind).from_pretrained(directory, **options).eval()


@torch.inference_mode()
def their_states(directory: Path, prompt: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 [len(prompt), hidden_size]: the states of a prompt that is computed alone."""
    states: torch.Tensor = their_model(directory, dtype)(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states.float()


@torch.inference_mode()
def their_score(directory: Path, prompt: Sequence[int]) -> float:
    """The sigmoid of the classification head's output."""
    return float(their_model(directory)(torch.tensor([list(prompt)])).logits[0, 0].sigmoid())


_XLM_R_LARGE = {
    "model_type": "xlm-roberta", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 250002, "type_vocab_size": 1, "hidden_act": "gelu", "pad_token_id": 1,
    "layer_norm_eps": 1e-05, "position_embedding_type": "absolute",
}  # fmt: skip
_MODERNBERT = {
    "model_type": "modernbert", "vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_eps": 1e-05,
    "hidden_activation": "gelu", "position_embedding_type": "absolute",
}  # fmt: skip
_BASE = {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
PUBLISHED_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "BAAI/bge-m3": {**_XLM_R_LARGE, "architectures": ["XLMRobertaModel"], "max_position_embeddings": 8194},
    "intfloat/multilingual-e5-large": {
        **_XLM_R_LARGE, "architectures": ["XLMRobertaModel"], "max_position_embeddings": 514,
    },
    "BAAI/bge-reranker-v2-m3": {
        **_XLM_R_LARGE, "architectures": ["XLMRobertaForSequenceClassification"], "max_position_embeddings": 8194,
        "id2label": {"0": "LABEL_0"},
    },
    "Alibaba-NLP/gte-modernbert-base": {**_MODERNBERT, **_BASE, "architectures": ["ModernBertModel"]},
    "Alibaba-NLP/gte-reranker-modernbert-base": {
        **_MODERNBERT, **_BASE, "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean", "id2label": {"0": "LABEL_0"},
    },
}  # fmt: skip
"""What decides names and shapes of weights, as published config.json files have it."""
