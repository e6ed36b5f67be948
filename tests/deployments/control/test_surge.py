"""A change starts new replicas first where they have room; a replica that has none would wait for ever."""

from __future__ import annotations

import pytest

from deployments.app import build_with
from deployments.config.args import AppArgs
from deployments.config.placement import Placement
from deployments.config.settings import EngineDeploymentSettings, IngressSettings
from deployments.control.surge import surge_percent
from tests.support.bound_deployments import deployments_of

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("needed", "num_ranks", "nodes", "percent"),
    [
        (CPU, 1, [{"CPU": 0.5}], 0),
        (CPU, 1, [{"CPU": 0.5}, {"CPU": 1.0}], 20),
        (CPU, 1, [], 0),
        (GPU, 1, [{"CPU": 8.0}], 0),
        (GPU, 1, [{"CPU": 8.0, "GPU": 1.0}], 20),
        (GPU, 2, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], 0),
        (GPU, 2, [{"CPU": 8.0, "GPU": 2.0}], 20),
        ({"fast": 1.0}, 1, [{"CPU": 8.0}], 0),
        ({}, 1, [{}], 20),
    ],
)
def test_auto_asks_whether_one_more_replica_fits_on_a_node(
    needed: dict[str, float], num_ranks: int, nodes: list[dict[str, float]], percent: int
) -> None:
    assert surge_percent("auto", needed, num_ranks, lambda: nodes) == percent


@pytest.mark.parametrize(
    ("placement", "nodes", "percent"),
    [
        ("stages", [2, 2], 20),
        ("stages", [4], 20),
        ("stages", [3, 1], 0),
        ("pack", [2, 2], 0),
        ("pack", [4], 20),
        ("spread", [4], 0),
        ("spread", [4, 2], 20),
    ],
)
def test_auto_asks_whether_the_stages_of_one_more_replica_fit(
    placement: Placement, nodes: list[int], percent: int
) -> None:
    """Two stages of two GPUs."""
    free = [{"CPU": 8.0, "GPU": float(gpus)} for gpus in nodes]
    assert surge_percent("auto", GPU, 2, lambda: free, num_stages=2, placement=placement) == percent


def test_a_number_is_taken_as_it_is() -> None:
    assert [surge_percent(number, GPU, 1, list) for number in (0, 50, 100)] == [0, 50, 100]


def test_ingresses_surge_by_default_and_engines_where_there_is_room() -> None:
    assert (IngressSettings().surge_percent, EngineDeploymentSettings().surge_percent) == (100, "auto")
    settings = {"ingresses": {"surge_percent": 30}, "engines": {"surge_percent": 40}}
    for args, percents in ((AppArgs(), (100, 0)), (AppArgs.model_validate(settings), (30, 40))):
        bound = deployments_of(build_with(args, lambda config: None))  # type: ignore[arg-type, return-value]
        assert tuple(bound[name].config.max_surge_percent for name in ("Ingress", "EngineReplica")) == percents


@pytest.mark.parametrize("wrong", [-1, 101, "all", None, 0.5])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="surge_percent"):
        AppArgs.model_validate({"ingresses": {"surge_percent": wrong}})
