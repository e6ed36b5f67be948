"""How much memory an engine takes: its weights once, and the KV that it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.kv_pages import KVPages
from engine.kernels import native
from engine.loading.checkpoint import open_checkpoint
from engine.loading.mapped_tensors import release

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUM_LAYERS = 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
MEASURES_A_LOAD = """
import json, sys
import torch
from engine.settings.config import EngineConfig
from engine.program.engine import Engine
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from cache import Namespace
import engine.runner.model_runner

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))

directory, attention = sys.argv[1:]
before = memory("VmRSS")
config = EngineConfig(model=directory, kv_pages=32, dtype="float32", attention=attention, threads=1)
runner = Engine.from_config(config).runner
num_tokens = config.kv_pages * config.page_size  # all pages are written
sampling = SamplingParams(temperature=0.0, max_tokens=1)
prompt = [5] * num_tokens
request = Request.make("a", prompt, sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
for start in range(0, num_tokens, 64):
    chunk = Chunk(request, start, 64, prompt[start : start + 64], range(config.kv_pages), samples=True)
    runner.run(StepPlan((chunk,)))
print(json.dumps({"before": before, "peak": memory("VmHWM"), "kv": runner.kv_bytes_per_token * num_tokens}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of some 200 MB in two files."""
    directory = tmp_path_factory.mktemp("model")
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(vocab, int)
    outer = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = {f"model.layers.{n}.{name}": shape for n in range(NUM_LAYERS) for name, shape in layer.items()}
    (directory / "config.json").write_text(json.dumps(CONFIG))
    places: dict[str, str] = {}
    for number, part in enumerate((outer, layers)):
        tensors = {f"{name}.weight": torch.rand(shape) * 0.1 for name, shape in part.items()}
        save_file(tensors, directory / f"{number}.safetensors")
        places |= dict.fromkeys(tensors, f"{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def attentions() -> list[str]:
    """The attention backends of both decoders, where both can run."""
    try:
        native.kernels(torch.float32)
    except native.NativeUnavailable:
        return ["reference"]
    return ["reference", "native"]


@linux
@pytest.mark.parametrize("attention", attentions())
def test_an_engine_takes_little_more_memory_than_its_weights_and_kv(checkpoint: Path, attention: str) -> None:
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert weights > 190e6
    arguments = [sys.executable, "-c", MEASURES_A_LOAD, str(checkpoint), attention]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] - found["before"] <= 1.3 * (weights + found["kv"]), found


@linux
@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_released_tensor_is_in_memory_no_more(checkpoint: Path, tmp_path: Path, is_pickled: bool) -> None:
    if is_pickled:
        weights: dict[str, torch.Tensor] = {}
        for path in checkpoint.glob("*.safetensors"):
            weights |= load_file(path)
        torch.save(weights, tmp_path / "pytorch_model.bin")
        del weights
    with ExitStack() as stack:
        tensors = open_checkpoint(tmp_path if is_pickled else checkpoint, stack)
        table = tensors["lm_head.weight"].read()
        torch.ones_like(table).sum()  # the code that sums lies in a file too
        before = resident("RssFile")
        expected = table.sum()
        assert resident("RssFile") - before > table.nbytes // 2
        release(table)
        assert resident("RssFile") - before < table.nbytes // 8
        assert tensors["lm_head.weight"].read().sum() == expected  # it is the file's, as it was


@linux
def test_kv_pages_take_memory_as_they_are_written() -> None:
    """Allocation takes no memory; writing takes at most a huge page for a layer's keys, and one for its values."""
    before = resident("RssAnon")
    pages = KVPages(4, 4096, 16, 8, 64, torch.float32, torch.device("cpu"))
    assert pages.data.nbytes >= 2**30
    assert pages.data.data_ptr() % 2**21 == 0
    assert not pages.layer(0)[:, pages.null_page].any()
    assert resident("RssAnon") - before < 2**20
    pages.data[:, :, 3] = 1.0
    assert resident("RssAnon") - before < 2**20 + 4 * 2 * 2 * 2**21


def resident(kind: str) -> int:
    """Bytes of this process that are in memory: "RssAnon" of its own, "RssFile" of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
