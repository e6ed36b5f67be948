"""A Llama of about 15M parameters, random weights and a tokenizer of its own: a model that costs next to nothing.

What it says means nothing, but it says it as a real one does: vocabulary, shapes and files are a checkpoint's.
"""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 288, 6, 6, 6, 768
VOCABULARY, CONTEXT = 32_000, 2048
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_small_llama(directory: Path, seed: int = 0) -> Path:
    """Write the model into `directory` unless it is there; returns it."""
    if (directory / "model.safetensors").exists():
        return directory
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    _make_tokenizer(directory)
    return directory


def words(count: int, first: int = 0) -> str:
    """Text of `count` words that the tokenizer knows, each one token: the `first`-th one and those after it."""
    return "".join(f" {_word(first + number)}" for number in range(count))


def _word(number: int) -> str:
    """The words are numbers of four syllables; neighbours differ in the last."""
    digits = []
    for _ in range(3):
        number, digit = divmod(number, len(_SYLLABLES))
        digits.append(_SYLLABLES[digit])
    return "".join(reversed(digits))


def _make_tokenizer(directory: Path) -> None:
    """Bytes, then words: a byte-level BPE, as most models have, whose merges spell the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((words(1000, at) for at in range(0, VOCABULARY, 1000)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
