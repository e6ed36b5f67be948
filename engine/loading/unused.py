"""Lists the unused content of a model's directory: keys of config.json, tensors and files."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import ModelLoadError
from engine.gguf.documents import is_gguf
from engine.model_files.weight_files import weight_files
from engine.model_parts.config_keys import UnusedKeys
from engine.settings.generation_defaults import unused_recommendations

logger = logging.getLogger(__name__)

_READ = """
    config.json generation_config.json model.safetensors.index.json pytorch_model.bin.index.json
    tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json
    vocab.json vocab.txt merges.txt tekken.json chat_template.jinja chat_template.json additional_chat_templates
    modules.json sentence_bert_config.json 1_Pooling"""
"""The files that Raydix or the tokenizer library reads, besides weights."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_CHOOSING = """
    stop_strings bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    no_repeat_ngram_size encoder_repetition_penalty sequence_bias typical_p epsilon_cutoff eta_cutoff num_beams
    penalty_alpha guidance_scale watermarking_config exponential_decay_length_penalty min_length min_new_tokens"""
"""Keys of generation_config.json that decide which tokens transformers chooses."""
_MOST_NAMES = 12


@dataclass(frozen=True, slots=True)
class Unused:
    """Names of unused keys, tensors and files."""

    keys: tuple[str, ...] = ()
    generation: tuple[str, ...] = ()
    """Keys of generation_config.json."""
    tensors: tuple[str, ...] = ()
    """Tensors of all layers are listed as one: "model.layers.*.self_attn.k_scale (32)"."""
    files: tuple[str, ...] = ()
    source: str = "config.json"
    """Name of the file with the keys."""

    @classmethod
    def of(cls, directory: Path, keys: UnusedKeys, tensors: Iterable[str]) -> Unused:
        """Describe a model's directory, given the names of unread keys and tensors."""
        numberless = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in tensors)
        together = (name if count == 1 else f"{name} ({count})" for name, count in sorted(numberless.items()))
        return cls(
            (*keys.uncertain, *keys.without_effect),
            tuple(unused_recommendations(directory)),
            tuple(together),
            tuple(_files(directory)),
            keys.source,
        )

    def lines(self) -> list[str]:
        """Return a line for each kind of unused content that exists."""
        kinds = {
            f"keys of {self.source}": self.keys,
            "keys of generation_config.json": self.generation,
            "tensors": self.tensors,
            "files": self.files,
        }
        return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]

    def log(self, directory: Path) -> None:
        """Log it, as a warning if answers may depend on it: on weights, or on the choice of tokens."""
        has_weights = any(name.endswith(_WEIGHTS) for name in self.files)
        chooses = any(key in _CHOOSING.split() for key in self.generation)
        level = logging.WARNING if has_weights or chooses else logging.INFO
        if lines := self.lines():
            logger.log(level, "not used of %s: %s", directory, "; ".join(lines))


def _files(directory: Path) -> Iterable[str]:
    """Yield the files in a directory that are not read.

    Hidden files, and files next to a GGUF file, do not belong to a model.
    """
    if is_gguf(directory):
        return
    try:
        used: Collection[str] = [path.name for path in weight_files(directory)]
    except ModelLoadError:  # Only the model's description is here.
        used = ()
    for path in sorted(directory.iterdir()):
        if path.name not in used and path.name not in _READ.split() and not path.name.startswith("."):
            yield f"{path.name}/" if path.is_dir() else path.name


def _some(names: Collection[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(list(names)[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
