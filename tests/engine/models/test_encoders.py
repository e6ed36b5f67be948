"""Encoders against transformers: states and scores, in batches and alone; names of weights; what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.base.errors import ModelLoadError, NeverFits
from engine.loading.encoder_targets import LEFT_OUT, encoder_prefix, encoder_targets
from engine.model_config.encoder import ENCODERS, EncoderConfig
from engine.models.encoders.encoder import EncoderModel
from engine.program.engine import Engine
from engine.program.llm import LLM
from engine.settings.config import EngineConfig
from engine.values.embedding import values_of
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from tests.engine.support.checkpoints import rewrite
from tests.engine.support.embedding_models import describe
from tests.engine.support.encoders import (
    ENCODER_FAMILIES,
    PUBLISHED_ENCODERS,
    VOCAB,
    save_encoder,
    their_score,
    their_states,
)
from tests.engine.support.oracle import random_ids

EMBEDDED, SCORED = SamplingParams(pooling=Pooling()), SamplingParams(pooling=Pooling(by_head=True))
PROMPTS = [
    [5],
    random_ids(1, 2),
    random_ids(2, 40),
    random_ids(3, 41),
    random_ids(4, 125),
    [1, *random_ids(5, 9), 1],
]
"""Of one token, longer than a window, and with tokens for padding in them (1)."""


def engine_for(model: Path, **settings: Any) -> Engine:
    return Engine.from_config(EngineConfig(model=str(model), device="cpu", **settings))


def values(engine: Engine, prompts: list[list[int]], params: SamplingParams = EMBEDDED) -> list[np.ndarray]:
    """Run prompts, submitted together; return what each one's only delta has."""
    for number, prompt in enumerate(prompts):
        engine.loop.submit(engine.new_request(str(number), prompt, params))
    found = {}
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.finish_reason == "stop" and event.pooled is not None, event
            found[event.request_id] = values_of(event.pooled)
    return [found[str(number)] for number in range(len(prompts))]


def expected_of(model: Path, pooling: str, prompt: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    states = their_states(model, prompt, dtype)
    return states[0] if pooling.startswith("cls") else states.mean(0)


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    """In one batch of all lengths, in steps of few tokens, and alone: within 1e-4 of each prompt by itself."""
    model = save_encoder(family, tmp_path, pooling)
    engine = engine_for(model)
    assert engine.tasks == {"embed"}
    expected = [expected_of(model, pooling, prompt).numpy() for prompt in PROMPTS]
    small = engine_for(model, max_step_tokens=32, max_running=3)
    alone = [values(engine, [prompt])[0] for prompt in PROMPTS]
    for found in (values(engine, PROMPTS), values(small, PROMPTS), alone):
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4
    assert sum(small.scheduler.account()) == small.cache.num_pages == small.scheduler.account().free


def edit(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**changes, **json.loads(path.read_text()), **changes}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": YARN, "rope_parameters": None, "global_rope_theta": 333.0, "local_rope_theta": 77.0},
        {"global_attn_every_n_layers": 2, "layer_types": None},
        {"global_attn_every_n_layers": 2, "layer_types": ["full_attention"] * 4},
        {"norm_eps": 0.1, "layer_norm_eps": 0.2},
    ],
    ids=lambda changes: " and ".join(changes),
)
def test_keys_with_the_same_meaning_count_as_in_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = save_encoder("modernbert", tmp_path)
    edit(model, **changes)
    [found] = values(engine_for(model), PROMPTS[3:4])
    assert np.abs(found - expected_of(model, "cls", PROMPTS[3]).numpy()).max() < 1e-4


def test_an_encoder_that_does_not_see_later_tokens_is_refused(tmp_path: Path) -> None:
    model = save_encoder("xlm_roberta", tmp_path)
    edit(model, is_decoder=True)
    with pytest.raises(ModelLoadError, match="is_decoder is true"):
        engine_for(model)


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_in_bfloat16_they_are_as_near_as_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Both are compared with those in float64, by the length of the difference: ours is at most twice theirs, and
    a tenth of the embedding's.
    """
    model = save_encoder(family, tmp_path)
    (ours,) = values(engine_for(model, dtype="bfloat16"), [PROMPTS[3]])
    exact, theirs = (expected_of(model, "cls", PROMPTS[3], dtype) for dtype in (torch.float64, torch.bfloat16))
    distance = (torch.from_numpy(ours.copy()) - exact).norm()
    assert distance < min(2 * float((theirs - exact).norm()), 0.1 * float(exact.norm()))


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_encoder(family, tmp_path, head=True)
    engine = engine_for(model)
    assert engine.tasks == {"rerank"}
    found = [float(score[0]) for score in values(engine, PROMPTS, SCORED)]
    assert found == pytest.approx([their_score(model, prompt) for prompt in PROMPTS], abs=1e-5)


def test_the_offline_api_embeds_texts(tmp_path: Path) -> None:
    model = save_encoder("xlm_roberta", tmp_path, "mean_tokens")
    llm = LLM(str(model), device="cpu")
    texts = ["a heap", "the largest items of a list"]
    found = llm.embed(texts)
    for text, vector in zip(texts, found, strict=True):
        expected = expected_of(model, "mean", llm.tokenizer.encode(text))
        assert vector == pytest.approx((expected / expected.norm()).numpy(), abs=1e-5)
    told = "is an encoder, served to embed, not to generate: use /v1/embeddings, or"
    with pytest.raises(ValueError, match=told):
        llm.generate("a heap", progress=False)
    with pytest.raises(ValueError, match=told):
        llm.engine.new_request("0", [5], SamplingParams())


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_hold_whole_prompts(tmp_path: Path, overlap: bool) -> None:
    """A step is filled with whole prompts up to its bound; a longer prompt has one alone. None waits for ever."""
    engine = engine_for(save_encoder("modernbert", tmp_path), max_step_tokens=64, max_running=32, overlap=overlap)
    sizes = []
    prepare = engine.runner.prepare

    def watch(plan: Any) -> Any:
        sizes.append([(chunk.start, chunk.num_tokens) for chunk in plan.chunks])
        return prepare(plan)

    engine.runner.prepare = watch  # type: ignore[method-assign]
    lengths = [100, *[20] * 7, 3]
    values(engine, [random_ids(number, length) for number, length in enumerate(lengths)])
    chunks = [chunk for step in sizes for chunk in step]
    assert sorted(length for _, length in chunks) == sorted(lengths) and {start for start, _ in chunks} == {0}
    assert all(len(step) == 1 or sum(length for _, length in step) <= 64 for step in sizes)
    assert max(map(len, sizes)) >= 3


def test_longer_prompts_never_fit(tmp_path: Path) -> None:
    """XLM-R counts positions from behind its token for padding: of 130 rows, 128 are left."""
    model = save_encoder("xlm_roberta", tmp_path)
    engine = engine_for(model)
    assert engine.max_model_len == 128
    values(engine, [random_ids(1, 128)])
    with pytest.raises(NeverFits, match="129 prompt tokens, but this engine holds at most 128"):
        engine.loop.submit(engine.new_request("0", random_ids(1, 129), EMBEDDED))
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    assert engine_for(model).max_model_len == 64


@pytest.mark.parametrize("name", PUBLISHED_ENCODERS)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    raw = copy.deepcopy(dict(PUBLISHED_ENCODERS[name]))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "x.Pooling"}]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    config = EncoderConfig.from_directory(tmp_path)
    fields = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", "id2label")}
    if config.has_head:
        fields["num_labels"] = 1
    with torch.device("meta"):
        kind = getattr(transformers, raw["architectures"][0])
        model = kind._from_config(transformers.AutoConfig.for_model(raw["model_type"], **fields))
        ours = EncoderModel(config)
    theirs = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    prefix = encoder_prefix(theirs)
    targets = {key: target.shape for key, target in encoder_targets(config, prefix).items()}
    assert targets.items() <= theirs.items()
    left = [key for key in theirs if key not in targets]
    assert all(key.startswith(tuple(f"{prefix}{name}" for name in LEFT_OUT)) for key in left), left
    numbers = {key: parameter.numel() for key, parameter in ours.named_parameters()}
    assert {target.parameter for target in encoder_targets(config, prefix).values()} == set(numbers)
    assert sum(np.prod(shape) for shape in targets.values()) == sum(numbers.values())


@pytest.mark.parametrize(
    ("family", "head", "changes", "message"),
    [
        (
            "xlm_roberta",
            False,
            {"hidden_act": "relu2"},
            "unsupported activation 'relu2'; supported are gelu, gelu_",
        ),
        ("modernbert", False, {"hidden_activation": "silu"}, "unsupported activation 'silu'"),
        (
            "xlm_roberta",
            False,
            {"position_embedding_type": "relative_key"},
            "'relative_key'; supported is absolute",
        ),
        (
            "modernbert",
            False,
            {"rope_parameters": {"full_attention": {"rope_type": "ntk"}}},
            "unsupported rope type 'ntk'",
        ),
        (
            "modernbert",
            False,
            {"layer_types": ["linear_attention"] * 4},
            "unsupported layer type 'linear_attention'",
        ),
        ("modernbert", True, {"id2label": {"0": "a", "1": "b"}}, r"gives 2 scores \(id2label\), expected 1"),
        ("modernbert", True, {"classifier_pooling": "max"}, "unsupported classifier_pooling 'max'"),
        ("xlm_roberta", False, {"num_hidden_layers": "four"}, "'four'; expected an integer from 1 to 4096"),
        ("xlm_roberta", False, {"vocab_size": None}, "holds a value of the wrong type"),
        ("xlm_roberta", False, {"hidden_size": 50}, "3 heads cannot share hidden_size 50 evenly"),
        (
            "xlm_roberta",
            False,
            {"intermediate_size": 60},
            r"intermediate.dense.weight has shape \(64, 48\), but .* by config",
        ),
    ],
)
def test_an_unsupported_key_is_named(
    tmp_path: Path, family: str, head: bool, changes: dict[str, Any], message: str
) -> None:
    model = save_encoder(family, tmp_path, head=head)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ModelLoadError, match=message):
        engine_for(model)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling of embeddings is max_tokens; supported are cls and mean"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            (),
            "pooling of embeddings is cls_token, mean_tokens",
        ),
        (
            {"pooling_mode_cls_token": True},
            ("Dense",),
            "modules.json has Dense, and only Transformer, Pooling, Norm",
        ),
        (None, None, "do not say how its embeddings are pooled: expected modules.json and 1_Pooling/config.json"),
    ],
)
def test_an_unsupported_pooling_is_refused(
    tmp_path: Path, pooling: dict[str, Any] | None, modules: tuple[str, ...] | None, message: str
) -> None:
    model = save_encoder("xlm_roberta", tmp_path)
    if modules is None:
        (model / "modules.json").unlink()
    else:
        describe(model, pooling, *modules)
    with pytest.raises(ModelLoadError, match=message):
        engine_for(model)


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    model = save_encoder("modernbert", tmp_path)
    rewrite(model, lambda tensors: tensors.update({"layers.9.mlp.Wi.weight": torch.zeros(1)}))
    with pytest.raises(
        ModelLoadError, match=r"hold layers\.9\.mlp\.Wi\.weight, which this ModernBertModel does not"
    ):
        engine_for(model)
    rewrite(model, lambda tensors: (tensors.pop("layers.9.mlp.Wi.weight"), tensors.pop("final_norm.weight")))
    with pytest.raises(ModelLoadError, match=r"the weights lack final_norm\.weight, which ModernBertModel needs"):
        engine_for(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tasks": ["generate"]},
            r"engine.tasks is \['generate'\], but the model is an encoder that can only embed",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but XLMRobertaModel is an encoder"),
        ({"quantization": "fp8"}, "quantization is 'fp8', but XLMRobertaModel is an encoder"),
        ({"max_model_len": 129}, "max_model_len is 129, but the model was made for 128 tokens"),
    ],
)
def test_settings_for_decoders_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(save_encoder("xlm_roberta", tmp_path), **settings)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    engine = engine_for(save_encoder("xlm_roberta", tmp_path))
    with pytest.raises(ValueError, match=f"not in the vocabulary of {VOCAB} tokens"):
        engine.new_request("0", [VOCAB], EMBEDDED)
    assert set(ENCODERS) >= {json.loads((tmp_path / "config.json").read_text())["architectures"][0]}
