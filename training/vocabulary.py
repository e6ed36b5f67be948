"""Trains the embedded model's tokenizer: byte-level BPE on the dialogues, with a ChatML template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.dialogues import Writer
from training.prompts import NOTES

PAD, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZE = 4096
TEMPLATE = Path(__file__).parents[1] / "deployments" / "demo_model" / "chat_template.jinja"

# Qwen's split: words with at most one sign or space before them, single digits, separate newlines.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(writer: Writer, num_dialogues: int = 12_000) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `SIZE` tokens. Every byte is a token, so any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(writer, num_dialogues), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return fast


def _texts(writer: Writer, num_dialogues: int) -> Iterator[str]:
    yield from NOTES * 20
    yield from ("system", "user", "assistant") * num_dialogues
    for dialogue in islice(writer.dialogues(), num_dialogues):
        for message in dialogue:
            yield message["content"]
