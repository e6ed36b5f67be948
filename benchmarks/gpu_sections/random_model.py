"""An engine with random weights, made where they are used: no file is written or read but a config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Int4Linear, QuantizedLinear
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.loading.load_model import load_model
from engine.loading.stage_decoder import keep_own, leave_out_others
from engine.loading.weights import allocate, plan_loading
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.collective import ALONE, Collective
from engine.program.engine import Engine, thread_of_gpu
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig


def load_engine(raw: Mapping[str, Any], directory: Path, **settings: Any) -> Engine:
    """An engine for a model of such a config.json. `settings` are those of `EngineConfig`."""
    (directory / "config.json").write_text(json.dumps(dict(raw)))
    config = EngineConfig(model=str(directory), max_step_ms=None, max_step_stretch=None, **settings)
    device, load = thread_of_gpu(config), partial(load_model, config, load_weights=random_decoder)
    return Engine(config, load() if device is None else device.launch(load).wait(), device=device)


def attention_of(engine: Engine) -> str:
    """The backend that an engine chose."""
    return cast(ModelRunner, engine.runner).attention_name


def random_decoder(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
    ranks: Collective = ALONE,
    **_: Any,
) -> Decoder:
    """A decoder whose activations stay about 1 in size, whatever its shape; the same one in every run. With `fp8`
    the layers' matrices are rounded to eight bits; those that `config` says are quantized are drawn so. Of several
    `ranks` each draws its own share, which is no part of one model.

    Matrices are drawn with a deviation of inputs ** -0.5, so that each keeps the size of what it gets, which a
    norm has brought to 1; what layers add to the stream grows with the root of their number.
    """
    decoder, _targets, _groups = plan_loading(config, ranks, {}, config.weight_format)
    if ranks.stage.count > 1:
        leave_out_others(decoder, ranks.stage)
    allocate(decoder, partial(torch.empty, device=device), dtype)
    generator = torch.Generator(device).manual_seed(0)
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(0.0 if name == "bias" else 1.0)
        if isinstance(module, QuantizedLinear):
            draw(module, generator)
    if fp8:
        for module in [*decoder.layers.modules()]:
            for name, child in module.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, _rounded(child, device))
    if ranks.stage.count > 1:
        keep_own(decoder, ranks.stage)
    return decoder.eval()


def draw(layer: QuantizedLinear, generator: torch.Generator) -> None:
    """Draw a matrix of a deviation of inputs ** -0.5, or the nearest power of two in MXFP4. Codes of four bits are
    -8 to 7, of a deviation of 4.6; numbers of four bits have one of 2.9.
    """
    deviation = layer.in_features**-0.5
    if isinstance(layer, Int4Linear):
        layer.packed.random_(generator=generator)
        layer.scales.fill_(deviation / 4.6)
        layer.zeros.fill_(8)
    elif isinstance(layer, Mxfp4Linear):
        layer.packed.random_(generator=generator)
        layer.exponents.fill_(127 + round(math.log2(deviation / 2.9)))
    else:
        assert isinstance(layer, Fp8Linear | Fp8BlockLinear)
        numbers = torch.empty(layer.weight.shape, device=layer.weight.device)
        layer.weight.copy_(numbers.normal_(generator=generator))
        layer.scale.fill_(deviation)


def _rounded(plain: torch.nn.Linear, device: torch.device) -> Fp8Linear:
    rounded = Fp8Linear(plain)
    rounded.allocate(device)
    rounded.put(slice(None), plain.weight)
    return rounded
