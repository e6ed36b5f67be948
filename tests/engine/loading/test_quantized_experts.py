"""Mixtures of experts that are quantized already: kept so in memory, on one rank and on several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import ModelLoadError
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.experts import Experts, route
from engine.models.torch_operations import TorchOperations
from engine.parallel.collective import ALONE, Collective
from engine.parallel.shard import Shard
from tests.engine.support.checkpoints import (
    AWQ,
    FP8_BLOCKS,
    INT8,
    awq,
    fp8_blocks,
    fp8_channels,
    fp8_config,
    gptq,
    gptq_config,
    int8_channels,
    integers_config,
    make,
    packed,
)
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.quantized_decoders import layers, load, memory, rounded
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

CPU = torch.device("cpu")
_SMALL = {"moe_intermediate_size": 64}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": _SMALL,
    "glm4_moe": _SMALL,
    "minimax_m2": {},
    "deepseek_v3": {**_SMALL, "q_lora_rank": 64, "v_head_dim": 32},
}
FOUR_BITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq(True, 1), gptq_config(dynamic={r"-:.*\.gate$": {}})),
    "awq": (awq, {**AWQ, "modules_to_not_convert": ["gate"]}),
    "packed": (packed(True), integers_config()),
    "packed, asymmetric": (packed(False), integers_config(symmetric=False)),
}
EIGHT_BITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 by outputs": (fp8_channels, fp8_config()),
    "fp8 in blocks": (fp8_blocks, FP8_BLOCKS),
}


KINDS = [*FOUR_BITS, *EIGHT_BITS]


def experts_of(decoder: Decoder) -> list[Experts]:
    return [module for module in decoder.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("mixtral", kind) for kind in KINDS),
        *zip(list(MIXTURES)[1:], KINDS[:4], strict=True),
        ("deepseek_v3", "gptq"),
        ("deepseek_v3", "fp8 in blocks"),
    ],
)
def test_experts_are_kept_quantized_and_latent_expansions_widened(family: str, kind: str, tmp_path: Path) -> None:
    made = make(tmp_path, *(FOUR_BITS | EIGHT_BITS)[kind], family, **MIXTURES[family])
    plain, found = load(made.plain), load(made.quantized)
    experts = {name: layer for name, layer in layers(found).items() if ".apart." in name}
    config = ModelConfig.from_directory(made.quantized)
    assert config.experts is not None
    assert len(experts) == 2 * len(config.experts.layers) * config.experts.num_experts
    rtol, atol = (2**-4, 1e-4) if kind == "fp8 in blocks" else (1e-6, 1e-8)
    for name, layer in experts.items():
        layers_name, _, place = name.partition(".apart.")
        expert, _, matrix = place.partition(".")
        stacked = plain.get_parameter(f"{layers_name}.{matrix}")
        assert torch.allclose(layer.dequantized(), stacked[int(expert)], rtol, atol), name
    for name, weight in found.named_parameters():
        if name.endswith("expansion"):
            assert torch.allclose(weight, plain.get_parameter(name), rtol=1e-6), name
    corrections = sum(weight.nbytes for name, weight in found.named_parameters() if name.endswith("correction"))
    assert memory(found) - corrections == config.weight_bytes(4) < memory(plain) / 2


@pytest.mark.parametrize(("family", "kind"), list(zip(MIXTURES, [*FOUR_BITS, "gptq"], strict=True)))
def test_mixtures_in_four_bits_generate_the_same_as_plain_ones(family: str, kind: str, tmp_path: Path) -> None:
    made = make(tmp_path, *FOUR_BITS[kind], family, **MIXTURES[family])
    prompts = [random_ids(1, 5), random_ids(2, 40)]
    expected = [oracle_greedy(made.plain, prompt, GREEDY.max_tokens) for prompt in prompts]
    events = run_prompts(engine_for(made.quantized, 16, 1024), prompts)
    assert [tokens_of(each) for each in events] == expected


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_mixtures_in_fp8_are_plain_ones_with_rounded_activations(kind: str, tmp_path: Path) -> None:
    made = make(tmp_path, *EIGHT_BITS[kind], "mixtral", num_hidden_layers=1)
    (plain,), (found,) = (experts_of(load(path)) for path in (made.plain, made.quantized))
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(4))
    chosen, weights = route(x @ plain.router.t(), 2, True)
    again = rounded if kind == "fp8 in blocks" else torch.clone
    expected = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for share, expert in zip(weights[token], experts, strict=True):
            gate, up = (rounded(x[token]) @ again(plain.gate_up_proj[expert]).t()).chunk(2)
            inner = rounded(torch.nn.functional.silu(gate) * up)
            expected[token] += share * (inner @ again(plain.down_proj[expert]).t())
    operations = TorchOperations.__new__(TorchOperations)  # whose products and sums depend on no positions
    with torch.inference_mode():
        difference = (found(x, operations) - expected).norm()
    assert difference < 0.01 * expected.norm() < (plain(x, operations) - expected).norm()


@pytest.mark.parametrize("splits_experts", [False, True])
@pytest.mark.parametrize("kind", ["awq", "packed", "fp8 by outputs", "int8"])
def test_each_rank_has_its_experts_or_its_part_of_all(kind: str, splits_experts: bool, tmp_path: Path) -> None:
    maker = {**FOUR_BITS, **EIGHT_BITS, "int8": (int8_channels, INT8)}[kind]
    made = make(tmp_path, *maker, "mixtral", num_local_experts=4, intermediate_size=128)
    for rank in (0, 1):
        ranks = Collective(Shard(rank, 2, splits_experts))
        plain, found = (
            load_decoder(path, ModelConfig.from_directory(path), torch.float32, CPU, ranks=ranks)
            for path in (made.plain, made.quantized)
        )
        for layer, (theirs, ours) in enumerate(zip(experts_of(plain), experts_of(found), strict=True)):
            for matrix in ("gate_up_proj", "down_proj"):
                stacked = theirs.get_parameter(matrix)
                if ours.apart is None:
                    own: torch.Tensor = ours.get_parameter(matrix)
                else:
                    own = torch.stack([getattr(expert, matrix).dequantized() for expert in ours.apart])
                assert torch.allclose(own, stacked, rtol=1e-6), (rank, layer, matrix)


def test_experts_that_the_checkpoint_did_not_quantize_are_stacked(tmp_path: Path) -> None:
    def most(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return ({f"{name}.weight": matrix}, matrix) if ".experts." in name else fp8_channels(name, matrix)

    made = make(tmp_path, most, fp8_config(ignore=["lm_head", r"re:.*\.experts\..*"]), "mixtral")
    plain, found = load(made.plain), load(made.quantized)
    assert len(layers(found)) == 2 * 3
    stacked = "layers.1.mlp.gate_up_proj"
    assert torch.equal(found.get_parameter(stacked), plain.get_parameter(stacked))


def test_projections_of_all_experts_are_quantized_or_none(tmp_path: Path) -> None:
    """Files may leave all second matrices plain, which then lie one after the other too, but not a single one."""

    def but(left: str) -> tuple[Any, dict[str, Any]]:
        def quantize(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            is_left = re.match(left, name) is not None
            return ({f"{name}.weight": matrix}, matrix) if is_left else fp8_channels(name, matrix)

        return quantize, fp8_config(ignore=["lm_head", f"re:{left}"])

    made = make(tmp_path / "some", *but(r".*\.w2$"), "mixtral")
    plain, found = load(made.plain), load(made.quantized)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(4))
    operations = TorchOperations.__new__(TorchOperations)
    with torch.inference_mode():
        for ours, theirs in zip(experts_of(found), experts_of(plain), strict=True):
            down = torch.stack([matrix.weight for matrix in ours.matrices_apart[1]])
            assert torch.equal(down, theirs.down_proj)
            assert len({matrix.weight.untyped_storage().data_ptr() for matrix in ours.matrices_apart[1]}) == 1
            assert (ours(x, operations) - theirs(x, operations)).norm() < 0.1 * theirs(x, operations).norm()
    with pytest.raises(ModelLoadError, match=r"only some experts of layers\.1\.mlp are quantized"):
        load(make(tmp_path / "one", *but(r".*\.1\..*experts\.2\.w2$"), "mixtral").quantized)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_moe", _SMALL), ("mixtral", {"num_local_experts": 4}), ("qwen3_5_moe", {}), ("llama4", {})],
)
def test_plain_experts_are_rounded_as_they_are_loaded(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Whether files hold each by itself, or those of a layer as one tensor; on each of two ranks too."""
    model = save_tiny(family, tmp_path, **settings)
    config = ModelConfig.from_directory(model)
    for ranks in (ALONE, Collective(Shard(1, 2)), Collective(Shard(1, 2, True))):
        plain, found = (
            load_decoder(model, config, torch.float32, CPU, ranks=ranks, fp8=fp8) for fp8 in (False, True)
        )
        for theirs, ours in zip(experts_of(plain), experts_of(found), strict=True):
            assert ours.apart is not None
            for matrix in ("gate_up_proj", "down_proj"):
                each = [getattr(expert, matrix) for expert in ours.apart]
                expected = rounded(theirs.get_parameter(matrix))
                assert torch.allclose(torch.stack([layer.dequantized() for layer in each]), expected, rtol=1e-6)
                assert len({layer.weight.untyped_storage().data_ptr() for layer in each}) == 1
        if ranks is ALONE:
            assert memory(found) == config.weight_bytes(4, "fp8") < memory(plain) / 2


def test_experts_that_no_kernel_takes_rounded_stay_plain(tmp_path: Path) -> None:
    """gpt-oss' have biases, which rounded ones have not."""
    model = save_tiny("gpt_oss", tmp_path)
    config = ModelConfig.from_directory(model)
    found = load_decoder(model, config, torch.float32, CPU, fp8=True)
    assert all(experts.apart is None for experts in experts_of(found))
    assert memory(found) == config.weight_bytes(4, "fp8")
