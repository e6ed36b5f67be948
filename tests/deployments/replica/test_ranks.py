"""The resources that a replica's ranks reserve, and the reservations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.app import build
from deployments.config.args import AppArgs
from tests.support.bound_deployments import Bound, deployments_of

ROOT = Path(__file__).resolve().parents[3]


def deployment_of(engine: dict[str, Any], engines: dict[str, Any]) -> Bound:
    """The engine deployment as `build` binds it."""
    args = AppArgs.model_validate({"engine": engine, "engines": engines})
    return deployments_of(build(args))["EngineReplica"]


def test_each_rank_reserves_the_same_on_one_machine() -> None:
    engine = {"model": "demo", "device": "cuda", "tensor_parallel_size": 4}
    config = deployment_of(engine, {"num_cpus": 2, "resources": {"engine_node": 0.25}}).replica_config
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 1, "engine_node": 0.25}] * 4
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.ray_actor_options["num_gpus"] == 1  # rank 0's, in the first of them


def test_the_ready_made_file_shares_a_model_among_four_gpus() -> None:
    (application,) = yaml.safe_load((ROOT / "examples/config/llama_70b.yaml").read_text())["applications"]
    # The file's own model would have to be found on the hub.
    engine = application["args"]["engine"] | {"model": "demo", "max_model_len": None}
    deployment = deployment_of(engine, application["args"]["engines"])
    assert deployment.replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 1}] * 4


def test_one_rank_needs_no_group() -> None:
    assert deployment_of({"model": "demo"}, {}).replica_config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("engines", "said"),
    [({"num_gpus": 4}, "num_gpus is 4.*leave it out"), ({"num_cpus": 0}, "set engines.num_cpus above 0")],
)
def test_reservations_that_make_no_sense_are_refused(engines: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=said):
        deployment_of({"model": "demo", "tensor_parallel_size": 4}, engines)
