"""Small tokenizers of the families that models have, with their real splits, special tokens and templates.

Only the vocabularies are small: they are trained on the pages in docs/, in a second each. A family's directory is
loaded as a model's is, so what `transformers` makes of its files is what is tested.
"""

# ruff: noqa: RUF001 - the letters of real special tokens

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.tokenizer import load_tokenizer

DOCS = Path(__file__).resolve().parents[3] / "docs"
SIZE = 1500

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium<|end|>{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    " {{ message.content }}{{ eos_token }}{% else %}[INST] {{ message.content }}[/INST]{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What distinguishes one family's tokenizers, as their tokenizer.json has it."""

    template: str
    special: tuple[str, ...]
    """The first is the beginning of a sequence; the last ends a message."""
    pre_tokenizer: Any = None
    normalizer: Any = None
    is_byte_level: bool = True
    """Whether letters are bytes; otherwise spaces are "▁", and unknown characters fall back to bytes."""
    also_added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    strips_space: bool = False
    """Whether a text loses the space with which it begins, which the tokenizer has put there."""
    swallows_space_after: bool = False
    """Whether special tokens but for the first swallow the whitespace after them."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of tokenizer_config.json."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_type: str = "llama"

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the family's tokenizer_config.json."""
        return {
            "tokenizer_class": self.tokenizer_class,
            "bos_token": self.special[0],
            "eos_token": self.special[-1],
            "chat_template": self.template,
            **self.config,
        }


def _split_bytes(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SENTENCEPIECE = ("<s>", "<unk>", "</s>")
_SPACES = normalizers.Replace(" ", "▁")
_PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), _SPACES])

FAMILIES: dict[str, Family] = {
    "qwen": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        _split_bytes(_QWEN),
        normalizers.NFC(),
        also_added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        config={"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        tokenizer_class="Qwen2Tokenizer",
        model_type="qwen3",
    ),
    "llama-3": Family(
        LLAMA3_CHAT,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        _split_bytes(_LLAMA3),
    ),
    "harmony": Family(
        HARMONY,
        ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|end|>"),
        _split_bytes(_O200K),
    ),
    "gpt-2": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _split_bytes(
            r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", r"[!-/:-~]?[A-Za-z]+| ?\p{P}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        also_added=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "llama-2": Family(
        INST,
        _SENTENCEPIECE,
        None,
        _PREPENDED,
        is_byte_level=False,
        strips_space=True,
        tokenizer_class="LlamaTokenizer",
    ),
    "mistral-v3": Family(
        INST,
        ("<s>", "<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
        pre_tokenizers.Metaspace("▁", "first", split=False),
        is_byte_level=False,
        strips_space=True,
        tokenizer_class="LlamaTokenizer",
        model_type="mistral",
    ),
    "zephyr": Family(
        ZEPHYR, _SENTENCEPIECE, pre_tokenizers.Metaspace("▁", "always"), is_byte_level=False, strips_space=True
    ),
    "phi-3": Family(
        PHI3,
        ("<s>", "<unk>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        None,
        _PREPENDED,
        is_byte_level=False,
        strips_space=True,
        swallows_space_after=True,
    ),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<unk>", "<pad>", "<start_of_turn>", "<end_of_turn>"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        _SPACES,
        is_byte_level=False,
        also_added=("\n\n", "\n\n\n", "▁▁", "<td>", "</td>"),
        tokenizer_class="GemmaTokenizer",
        model_type="gemma2",
    ),
}


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Train a family's tokenizer and load it as a model's."""
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(trained(name))
        Path(folder, "tokenizer_config.json").write_text(json.dumps(family.tokenizer_config()))
        Path(folder, "config.json").write_text(json.dumps({"model_type": family.model_type}))
        return load_tokenizer(Path(folder))


@functools.cache
def trained(name: str) -> str:
    """Return a family's tokenizer.json."""
    family = FAMILIES[name]
    spelled = [] if family.is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>") if spelled else models.BPE()
    )
    if family.normalizer is not None:
        tokenizer.normalizer = family.normalizer
    if family.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = family.pre_tokenizer
    tokenizer.decoder = _spaces_decoder(family.strips_space) if spelled else decoders.ByteLevel()
    special = [
        AddedToken(text, special=True, normalized=False, rstrip=family.swallows_space_after and at > 0)
        for at, text in enumerate(family.special)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE + len(spelled),
        special_tokens=[*special, *spelled],
        initial_alphabet=[] if spelled else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.also_added])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in spelled]
    return json.dumps(content)


def _spaces_decoder(strips_space: bool) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)


def _lines() -> Iterator[str]:
    for page in sorted(DOCS.glob("*.md"))[:2]:
        yield from page.read_text(encoding="utf-8").splitlines(keepends=True)
