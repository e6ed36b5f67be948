"""Checks the files of all models before replicas are replaced, on the nodes that may run their engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from deployments.config.args import AppArgs, ModelArgs
from deployments.control.surge import has_room
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.settings.config import EngineConfig

logger = logging.getLogger("ray.serve")
ANSWER_S = 120.0
"""Seconds that other nodes have to answer; silent ones count as without the files."""

AskNodes = Callable[[ModelArgs], Mapping[str, str | None]]
"""Makes the other nodes that may run a model's engines check its files: by node, the error, or None."""


class ModelFilesError(ValueError):
    """No node has files that an engine can load; the message names the model and the error."""


def check_model_files(args: AppArgs, ask_nodes: AskNodes | None = None) -> None:
    """Raise ModelFilesError when a model's files are missing or broken on this node and on all others."""
    for model in args.served.values():
        fault = fault_of(model.engine)
        if fault is None:
            continue
        elsewhere = (ask_nodes or _ask_nodes)(model)
        if all(elsewhere.values()):
            others = "".join(f"; on node {node}: {each}" for node, each in elsewhere.items() if each != fault)
            raise ModelFilesError(f"the model {model.name} cannot be loaded: {fault}{others}")
        for node, each in elsewhere.items():
            if each is not None:
                logger.warning("the model %s cannot be loaded on node %s: %s", model.name, node, each)


def fault_of(config: EngineConfig) -> str | None:
    """Return why an engine could not load its models on this machine; None when no reason is known."""
    from engine.loading.check_model import check_model  # torch

    try:
        check_model(config)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def facts(config: EngineConfig) -> ModelConfig | EncoderConfig:
    """Return the facts in the files of an engine's model, on this machine or the hub. Raises ValueError."""
    from engine.model_config.any_model import model_facts
    from engine.model_files.model_directory import described_on_hub, local_model

    local = local_model(config.model, config.model_revision)
    return model_facts(local or described_on_hub(config.model, config.model_revision)[0])


def known_facts(config: EngineConfig) -> ModelConfig | EncoderConfig | None:
    """Return the same; None if the files are not here, because only other nodes may have them."""
    try:
        return facts(config)
    except ValueError:
        return None


def _ask_nodes(model: ModelArgs) -> dict[str, str | None]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        return {}
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here and _may_run(model, node)]
    ask = ray.remote(num_cpus=0, max_retries=0)(fault_of)
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            model.engine
        ): node["NodeManagerAddress"]
        for node in nodes
    }
    ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else None
    return {node: _answer(reference) for reference, node in asked.items()}


def _answer(reference: Any) -> str | None:
    import ray

    try:
        answer: str | None = ray.get(reference, timeout=0)
    except Exception as error:
        return f"it could not be asked ({type(error).__name__})"
    return answer


def _may_run(model: ModelArgs, node: Mapping[str, Any]) -> bool:
    """Whether a node has, in use or not, the resources that one rank of the model's engine reserves."""
    return has_room(model.rank_resources, node["Resources"])
