"""A whole model with experts in MXFP4, which our kernels widen in registers, compared with transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.layers.operations import Rotary
from engine.loading.load_model import load_model
from engine.models.decoder import Decoder
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan
from tests.engine.support.checkpoints import mxfp4_gpt_oss
from tests.engine.support.oracle import oracle_logits, random_ids
from tests.engine.support.quantized_decoders import load_packed
from tests.engine.support.steps_by_hand import RequestByHand

pytest.importorskip("triton")
from engine.models.triton_operations import TritonOperations

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a prompt in two chunks, then of a token."""
    made, tokens = mxfp4_gpt_oss(tmp_path), random_ids(6, 30)
    expected = oracle_logits(made.plain, tokens, torch.float64)
    settings = EngineConfig(str(made.quantized), device="cpu", attention="reference", kv_pages=8, threads=1)
    runner = load_model(settings, load_weights=load_packed)
    facts, decoder = runner.model_config, runner.decoder
    assert isinstance(decoder, Decoder)
    decoder.operations = partial(TritonOperations, Rotary.of(facts.ropes, facts.head_dim, torch.float32, CPU))
    for start, end in ((0, 20), (20, 29), (29, 30)):
        got = runner.logits(StepPlan((RequestByHand(tokens[:end], range(2), computed=start).chunk(),)))
        assert (got[0] - expected[end - 1]).abs().max() < 1e-4
