"""A replica's ranks after the first, as Ray actors: each in a bundle of the replica's own placement group.

bundle 0  EngineReplica = rank 0 ─┐
bundle 1  Rank                    ├─ on one node (STRICT_PACK), and gone with the replica
bundle 2  Rank                   ─┘
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.machine import prepare_process

if TYPE_CHECKING:
    from engine.ranks.launcher import RankSpec


def load_engine(config: EngineConfig) -> Engine:
    """The engine of a Serve replica. Raises as `Engine.from_config`."""
    return Engine.from_config(config, launcher=RayRanks() if config.tensor_parallel_size > 1 else None)


def bundles(config: EngineConfig, options: Mapping[str, Any]) -> list[dict[str, float]]:
    """What the ranks of a replica reserve, each the same. `options` are the replica's `ray_actor_options`.

    Raises ValueError where that is nothing: Ray knows no such bundles.
    """
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    each = {name: float(amount) for name, amount in named.items() if amount}
    if not each:
        raise ValueError(
            f"{config.name}: tensor_parallel_size is {config.tensor_parallel_size}, but engines reserve nothing "
            "that could be kept on one machine; set engines.num_cpus above 0, or device to cuda"
        )
    return [each] * config.tensor_parallel_size


class Rank:
    """One of them. Ends its process when rank 0 is gone."""

    def work(self, spec: RankSpec) -> None:
        """Return when rank 0 is gone."""
        prepare_process()
        from engine.ranks.worker import work  # torch, whose threads then know how to wait

        work(spec, lambda: os._exit(0))


class RayRanks:
    """Starts them; for use inside the replica."""

    shares_gpus = False

    def launch(self, specs: Sequence[RankSpec]) -> RayActors:
        """One in each bundle but the first. Raises RuntimeError outside of a placement group."""
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        if group is None:
            raise RuntimeError("ranks as Ray actors need the replica's placement group, and there is none")
        kind, actors = ray.remote(Rank), {}
        for spec in specs:
            needs = dict(group.bundle_specs[spec.rank])
            options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.rank)
            actor = kind.options(scheduling_strategy=place, **options).remote()
            actors[actor] = actor.work.remote(spec)
        return RayActors(actors)


class RayActors:
    """Ranks that were started: each actor, and the call that is its work."""

    def __init__(self, actors: Mapping[Any, Any]) -> None:
        self._actors = actors

    def ended(self) -> str | None:
        """As `Workers.ended`."""
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
        """As `Workers.close`."""
        import ray

        with contextlib.suppress(
            Exception
        ):  # of a process that ends: Ray is gone, and they with their connections
            for actor in self._actors:
                ray.kill(actor)
