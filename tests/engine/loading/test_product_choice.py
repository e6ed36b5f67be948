"""The faster of two kernels is chosen for each of a model's matrices, once for each GPU. No kernel runs here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:  # not imported here, as other tests set first that it interprets
    pytest.skip("Triton is not installed here", allow_module_level=True)
from engine.layers.linear import PlainLinear
from engine.loading.product_choice import Work, choose, choose_products
from engine.models.decoder import Decoder
from tests.engine.support.checkpoints import fp8_channels, fp8_config, make
from tests.engine.support.oracle import save_tiny
from tests.engine.support.quantized_decoders import load

CPU = torch.device("cpu")


class Timer:
    """Says that work of ours takes as long as a rule says, and the library's a second."""

    def __init__(self, ours: Callable[[int, int], float]) -> None:
        """`ours`: of the number of rows and of outputs."""
        self._ours = ours
        self.num_timed = 0

    def __call__(self, works: Sequence[Work]) -> float:
        self.num_timed += 1
        name, (x, weight, *_) = works[0].func.__name__, works[0].args  # type: ignore[attr-defined]
        return self._ours(len(x), len(weight)) if name == "plain_few_rows" else 1.0


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return load(save_tiny("qwen3", tmp_path / "model", num_hidden_layers=2))


def plain_layers(decoder: Decoder) -> dict[str, PlainLinear]:
    return {name: module for name, module in decoder.named_modules() if isinstance(module, PlainLinear)}


def test_each_shape_gets_the_kernel_that_was_faster_for_so_many_rows(decoder: Decoder, tmp_path: Path) -> None:
    name = "layers.0.attention.qkv_proj"
    qkv = decoder.get_submodule(name)
    assert isinstance(qkv, torch.nn.Linear)
    weight, path = qkv.weight, tmp_path / "some" / "products.json"
    timer = Timer(lambda rows, outputs: 0.5 if outputs == len(weight) and rows != 4 else 2.0)
    ours = choose(decoder, CPU, path, "a GPU", timer)
    assert len(ours) == 1, "is compiled at once"
    found = plain_layers(decoder)
    assert sorted(found) == [name, "layers.1.attention.qkv_proj"]
    for layer in found.values():
        assert layer.few_rows == {1, 2, 5, 6, 7, 8}, "three rows are multiplied as four are"
    assert found[name].weight is weight
    assert decoder.head_few_rows == frozenset()
    x = torch.randn(2, qkv.in_features)
    assert torch.equal(found[name](x), qkv(x)), "on a CPU by the library"


def test_experts_are_not_timed_one_by_one(tmp_path: Path) -> None:
    """Their second matrices are plain, and quantized layers are timed on GPUs alone: the head is left."""

    def but_second(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return ({f"{name}.weight": matrix}, matrix) if name.endswith(".w2") else fp8_channels(name, matrix)

    made = make(
        tmp_path, but_second, fp8_config(ignore=["lm_head", r"re:.*\.w2$"]), "mixtral", num_hidden_layers=1
    )
    timer, decoder = Timer(lambda rows, outputs: 0.5), load(made.quantized)
    choose(decoder, CPU, tmp_path / "products.json", "a GPU", timer)
    assert timer.num_timed == 4 * 2 and not plain_layers(decoder)


def test_measurements_are_read_at_the_next_start(tmp_path: Path) -> None:
    model, path = save_tiny("qwen3", tmp_path / "model", num_hidden_layers=1), tmp_path / "products.json"
    first = Timer(lambda rows, outputs: 0.5)
    choose(load(model), CPU, path, "a GPU", first)
    assert first.num_timed == 5 * 4 * 2, "four kinds of matrices and the head, four numbers of rows, two kernels"
    again, other = Timer(lambda rows, outputs: 2.0), Timer(lambda rows, outputs: 2.0)
    decoder = load(model)
    choose(decoder, CPU, path, "a GPU", again)
    assert again.num_timed == 0 and len(plain_layers(decoder)) == 4
    assert decoder.head_few_rows == set(range(1, 9))
    decoder = load(model)
    choose(decoder, CPU, path, "another GPU", other)
    assert other.num_timed == first.num_timed and not plain_layers(decoder)
    assert sorted(json.loads(path.read_text())) == ["a GPU", "another GPU"]


@pytest.mark.parametrize("content", ["", "[1]", '{"a GPU": 3}', '{"a GPU": {"x": 1}}'])
def test_a_file_that_says_nothing_is_replaced(content: str, decoder: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    path.write_text(content)
    choose(decoder, CPU, path, "a GPU", Timer(lambda rows, outputs: 0.5))
    assert len(plain_layers(decoder)) == 8
    assert len(json.loads(path.read_text())["a GPU"]) == 5


def test_a_directory_that_cannot_be_written_only_costs_the_next_start(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    choose(decoder, CPU, tmp_path / "file" / "products.json", "a GPU", Timer(lambda rows, outputs: 0.5))
    assert len(plain_layers(decoder)) == 8
    assert "the next start has to measure again" in caplog.text


def test_nothing_is_measured_on_a_cpu(decoder: Decoder) -> None:
    choose_products(decoder, CPU)
    assert not plain_layers(decoder)
