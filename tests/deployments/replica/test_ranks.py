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


def test_the_ranks_of_a_stage_reserve_the_same_on_one_machine() -> None:
    engine = {"model": "demo", "device": "cuda", "tensor_parallel_size": 4}
    config = deployment_of(engine, {"num_cpus": 2, "resources": {"engine_node": 0.25}}).replica_config
    assert config.placement_group_bundles == [{"CPU": 8, "GPU": 4, "engine_node": 1}]
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.ray_actor_options["num_gpus"] == 1  # rank 0's, in the first of them


def test_the_ready_made_file_shares_a_model_among_four_gpus() -> None:
    (application,) = yaml.safe_load((ROOT / "examples/config/llama_70b.yaml").read_text())["applications"]
    # The file's own model would have to be found on the hub.
    engine = application["args"]["engine"] | {"model": "demo", "max_model_len": None}
    deployment = deployment_of(engine, application["args"]["engines"])
    assert deployment.replica_config.placement_group_bundles == [{"CPU": 4, "GPU": 4}]


@pytest.mark.parametrize(
    ("placement", "strategy"),
    [(None, "PACK"), ("stages", "PACK"), ("pack", "STRICT_PACK"), ("spread", "STRICT_SPREAD")],
)
def test_each_stage_has_a_bundle_and_the_setting_places_them(placement: str | None, strategy: str) -> None:
    engine = {"model": "demo", "device": "cuda", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    engines = {} if placement is None else {"placement": placement}
    config = deployment_of(engine, engines).replica_config
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 2}] * 3
    assert config.placement_group_strategy == strategy


def test_files_of_pages_need_all_stages_on_one_machine(tmp_path: Path) -> None:
    engine = {
        "model": "demo",
        "pipeline_parallel_size": 2,
        "host_kv_gib": 0.1,
        "kv_tier": {"directory": str(tmp_path), "disk_gib": 1},
    }
    with pytest.raises(ValidationError, match=r"set engines\.placement to pack, or leave engine\.kv_tier out"):
        deployment_of(engine, {})
    assert deployment_of(engine, {"placement": "pack"}).replica_config.placement_group_strategy == "STRICT_PACK"


def test_one_rank_needs_no_group() -> None:
    assert deployment_of({"model": "demo"}, {}).replica_config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ({"num_gpus": 4}, "num_gpus is 4.*leave engines.num_gpus out"),
        ({"num_cpus": 0}, "set engines.num_cpus above 0"),
    ],
)
def test_reservations_that_make_no_sense_are_refused(engines: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=said):
        deployment_of({"model": "demo", "tensor_parallel_size": 4}, engines)
