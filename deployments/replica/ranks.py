"""Runs a replica's ranks after the first as Ray actors, in the replica's own placement group.

bundle 0  stage 0: EngineReplica = rank 0, Rank = 1   a bundle is on one node, and several bundles are
bundle 1  stage 1:                 Rank = 2, Rank = 3   where `engines.placement` allows

The actors end with the replica.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.config.settings import HealthSettings
from deployments.replica.liveness import Beat
from engine.base.machine import prepare_process
from engine.parallel.rank_network import ONE_MACHINE, RankNetwork
from engine.program.engine import Engine
from engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from engine.ranks.launcher import RankSpec

_BEAT_S = 5.0
"""Seconds between two marks of a rank's file, of which a probe accepts one of 30 s ago."""


def load_engine(config: EngineConfig, health: HealthSettings | None = None) -> Engine:
    """Load the engine of a Serve replica. `health` says when the host of a rank is lost; None: the defaults.

    Raises as `Engine.from_config` does.
    """
    # Imported and loaded objects stay, so collections would find nothing, and take a third of torch's import.
    gc.disable()
    try:
        size, health = config.tensor_parallel_size, health or HealthSettings()
        return Engine.from_config(config, launcher=RayRanks(size, health) if config.num_ranks > 1 else None)
    finally:
        gc.enable()


def bundles(config: EngineConfig, options: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the resources of each stage of a replica: those of all its ranks, each of which needs as many as the
    replica itself; `options` are its `ray_actor_options`.

    Raises ValueError if a rank reserves nothing, because Ray has no empty bundles.
    """
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    stage = {name: float(amount * config.tensor_parallel_size) for name, amount in named.items() if amount}
    if not stage:
        raise ValueError(
            f"{config.name}: tensor_parallel_size times pipeline_parallel_size is {config.num_ranks}, but its "
            "engines reserve no resource by which Ray could place their ranks; set engines.num_cpus above 0, or "
            "device to cuda"
        )
    return [stage] * config.pipeline_parallel_size


class Rank:
    """A rank after the first. It ends its process when rank 0 is gone."""

    def work(self, spec: RankSpec, beat_directory: str | None) -> None:
        """Compute the steps that rank 0 sends until it is gone, and show this node's probes that it lives."""
        prepare_process()
        beat = Beat(beat_directory, f"rank-{spec.rank}-{os.getpid()}")
        threading.Thread(target=_keep_marking, args=(beat,), daemon=True).start()
        from engine.ranks.worker import work  # imports torch, which then reads how its threads wait

        work(spec, lambda: os._exit(0))


def _keep_marking(beat: Beat) -> None:
    """Mark a rank's file while its process lives: it ends with the replica, and Serve ends an unhealthy one."""
    while True:
        beat.mark()
        time.sleep(_BEAT_S)


class RayRanks:
    """Starts a replica's other ranks, from inside the replica."""

    shares_gpus = False

    def __init__(self, stage_size: int, health: HealthSettings) -> None:
        """`stage_size`: ranks of each stage. Raises RuntimeError outside of a placement group."""
        from ray.util.placement_group import get_current_placement_group

        self._group: Any = get_current_placement_group()
        if self._group is None:
            raise RuntimeError(
                "ranks as Ray actors need the replica's placement group, but this process is in none"
            )
        self._stage_size, self._health = stage_size, health

    @property
    def network(self) -> RankNetwork:
        """The loopback address if all bundles are on this node, else this node's address in Ray."""
        import ray
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"].values()
        if len(set(nodes)) == 1:
            return ONE_MACHINE
        return RankNetwork(ray.util.get_node_ip_address(), self._health.lost_after_s)

    def launch(self, specs: Sequence[RankSpec]) -> RayActors:
        """Start the ranks of each stage in its bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind, actors = ray.remote(Rank), {}
        for spec in specs:
            bundle = spec.rank // self._stage_size
            needs = {name: all_of / self._stage_size for name, all_of in self._group.bundle_specs[bundle].items()}
            options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            actor = kind.options(scheduling_strategy=place, **options).remote()
            actors[actor] = actor.work.remote(spec, self._health.beat_directory)
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
