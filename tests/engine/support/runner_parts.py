"""A loaded runner with parts that its device would not get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.by_heads import AttentionByHeads
from engine.attention.triton import TritonAttention
from engine.layers.operations import Rotary
from engine.models.decoder import Decoder
from engine.runner.model_runner import ModelRunner


def with_attention(runner: ModelRunner, attention: AttentionBackend) -> ModelRunner:
    """Return a runner with the same model and as many pages and slots for states, one more of each for graphs, and
    another attention.
    """
    states = runner.pages.states
    max_drafts = 0 if states is None else max(0, states.layer(0).drafts.shape[1] - 1)
    own = runner.with_pages(runner.num_pages + 1, runner.num_state_slots + 1, max_drafts)
    made = ModelRunner(own.model_config, own.decoder, attention, own.pages, groups=own.layer_groups)
    made.max_model_len, made.fingerprint = own.max_model_len, own.fingerprint
    return made


def with_our_kernels(runner: ModelRunner) -> ModelRunner:
    """Return a runner like `with_attention` whose layers launch our Triton kernels."""
    from engine.models.triton_operations import TritonOperations

    facts, decoder = runner.model_config, runner.decoder
    assert isinstance(decoder, Decoder)
    ropes, turned = zip(*facts.rotations, strict=True)
    rotary = Rotary.of(ropes, turned, decoder.embed.weight.dtype, runner.device)
    decoder.operations = partial(TritonOperations, rotary)
    kinds = {
        kind: TritonAttention(AttentionShape.of(heads, windows, runner.page_size))
        for kind, (heads, windows) in facts.kinds_of_heads.items()
    }
    return with_attention(runner, AttentionByHeads(kinds) if len(kinds) > 1 else next(iter(kinds.values())))


@contextmanager
def graphs_of_gpus() -> Iterator[None]:
    """Let graphs that are made meanwhile choose tokens and advance rows by Triton kernels, as on a GPU."""
    from engine.kernels.triton import rows
    from engine.sampling.graph_chooser import triton_graph_chooser

    with (
        patch("engine.runner.model_runner.graph_chooser_for", lambda device: triton_graph_chooser()),
        patch("engine.graphs.device_rows.row_kernels", lambda device: rows),
    ):
        yield
