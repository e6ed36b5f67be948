"""Runs a replica's ranks after the first as Ray actors, each in a bundle of the replica's own placement group.

bundle 0  EngineReplica = rank 0 ─┐
bundle 1  Rank                    ├─ on one node (STRICT_PACK), ended with the replica
bundle 2  Rank                   ─┘
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.base.machine import prepare_process
from engine.program.engine import Engine
from engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from engine.ranks.launcher import RankSpec


def load_engine(config: EngineConfig) -> Engine:
    """Load the engine of a Serve replica. Raises as `Engine.from_config` does."""
    # Imported and loaded objects stay, so collections would find nothing, and take a third of torch's import.
    gc.disable()
    try:
        return Engine.from_config(config, launcher=RayRanks() if config.tensor_parallel_size > 1 else None)
    finally:
        gc.enable()


def bundles(config: EngineConfig, options: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the resources of each of a replica's ranks, all the same; `options` are its `ray_actor_options`.

    Raises ValueError if a rank reserves nothing, because Ray has no empty bundles.
    """
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    each = {name: float(amount) for name, amount in named.items() if amount}
    if not each:
        raise ValueError(
            f"{config.name}: tensor_parallel_size is {config.tensor_parallel_size}, but its engines reserve "
            "no resource that Ray could keep on one machine; set engines.num_cpus above 0, or device to cuda"
        )
    return [each] * config.tensor_parallel_size


class Rank:
    """A rank after the first. It ends its process when rank 0 is gone."""

    def work(self, spec: RankSpec) -> None:
        """Compute as rank 0 orders, until it is gone."""
        prepare_process()
        from engine.ranks.worker import work  # imports torch, which then reads how its threads wait

        work(spec, lambda: os._exit(0))


class RayRanks:
    """Starts a replica's other ranks, from inside the replica."""

    shares_gpus = False

    def launch(self, specs: Sequence[RankSpec]) -> RayActors:
        """Start one rank in each bundle after the first. Raises RuntimeError outside of a placement group."""
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        if group is None:
            raise RuntimeError(
                "ranks as Ray actors need the replica's placement group, but this process is in none"
            )
        kind, actors = ray.remote(Rank), {}
        for spec in specs:
            needs = dict(group.bundle_specs[spec.rank])
            options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.rank)
            actor = kind.options(scheduling_strategy=place, **options).remote()
            actors[actor] = actor.work.remote(spec)
        return RayActors(actors)


class RayActors:
    """The started ranks: each actor, and its running call of `work`."""

    def __init__(self, actors: Mapping[Any, Any]) -> None:
        self._actors = actors

    def ended(self) -> str | None:
        """Implement `Workers.ended`."""
        import ray

        calls = list(self._actors.values())
        done, _ = ray.wait(calls, timeout=0)
        if not done:
            return None
        rank = calls.index(done[0]) + 1
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            return f"rank {rank} ended: {str(error).strip().splitlines()[0]}"
        return f"rank {rank} ended"

    def close(self) -> None:
        """Implement `Workers.close`."""
        import ray

        # When the process ends, Ray may be gone earlier; the ranks then end with their connections to rank 0.
        with contextlib.suppress(Exception):
            for actor in self._actors:
                ray.kill(actor)
