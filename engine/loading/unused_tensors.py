"""Lists the tensors of a checkpoint that are not loaded, and checks the headers of its files as loading does.

Most models are checked without torch, because its import takes two seconds of each start.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from engine.gguf.documents import is_gguf
from engine.loading.checkpoint import open_checkpoint
from engine.loading.contents import check_decoder_tensors, check_encoder_tensors
from engine.loading.encoder_targets import encoder_prefix, encoder_targets
from engine.loading.targets import HEAD, weight_targets
from engine.loading.tensor_groups import Expected
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.parallel.shard import Shard


def unused_tensors(directory: Path, config: ModelConfig, *, needs_head: bool = False) -> list[str]:
    """Return the names of a decoder's tensors that are not loaded. The files' headers are checked as in loading.
    Raises ModelLoadError.
    """
    if config.weight_format is None and config.experts is None and not is_gguf(directory):
        with ExitStack() as stack:
            tensors = open_checkpoint(directory, stack, is_read=False)
            # Otherwise the files decide whether there is a head, which may differ from the table.
            if config.tied_embeddings != any(name.endswith(HEAD) for name in tensors):
                targets = weight_targets(config, Shard(), tensors)
                expected = [Expected(name, target.shape) for name, target in targets.items()]
                return check_decoder_tensors(tensors, expected, config)
    from engine.loading import weights  # torch

    return weights.unused_tensors(directory, config, needs_head=needs_head)


def unused_encoder_tensors(directory: Path, config: EncoderConfig) -> list[str]:
    """Return the names of a checkpoint's tensors that are not loaded. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack, is_read=False)
        targets = encoder_targets(config, encoder_prefix(tensors))
        return check_encoder_tensors(
            tensors, [Expected(name, target.shape) for name, target in targets.items()], config
        )
