"""Settings of a simulation: the fleet, its load, the delay of reports, and failures."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from deployments.simulator.fleet.roles import Roles
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies: its cache is gone and its unfinished requests are placed again."""

    replica: int
    """0 is the first."""
    time: float
    """Seconds after the first arrival."""

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read "REPLICA@SECONDS", such as "2@600". Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)", text.strip())
        if found is None:
            raise ValueError(f"expected REPLICA@SECONDS, such as 2@600, got {text!r}")
        return cls(int(found[1]), float(found[2]))


HandOver = Literal["nothing", "arbitrary", "worth"]
"""A replica hands over nothing, or streams and prefixes in an arbitrary order, or by their worth."""


@dataclass(frozen=True, slots=True)
class AnnouncedEnd:
    """A replica's machine announces its end: it takes no new requests, and dies when the time is up."""

    replica: int
    """0 is the first."""
    time: float
    """Seconds after the first arrival."""
    grace_s: float
    """Seconds from the notice to the end."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings of one run, except the trace and the policy."""

    num_replicas: int = 16
    cache_tokens: int = 2_097_152
    """KV memory of each replica, in tokens."""
    load: float = 0.85
    """Offered prompt tokens/s as a share of the fleet's prefill rate: what it would compute without any cache."""
    num_ingresses: int = 1
    cache_delay: float = 1.0
    """Seconds until an ingress learns which blocks a replica stored or evicted."""
    load_delay: float = 0.05
    """Seconds until an ingress learns of a replica's load. Its own dispatches count immediately."""
    service: ServiceModel = field(default_factory=ServiceModel)
    tiers: Tiers = field(default_factory=Tiers)
    """Where else than on the device KV can be, and how fast it moves."""
    roles: Roles | None = None
    """Which replicas compute prompts, and which decode; None: all do both."""
    kills: tuple[Kill, ...] = ()
    notices: tuple[AnnouncedEnd, ...] = ()
    hand_over: HandOver = "worth"
    keep_tokens: int = 65_536
    """Tokens of the most used prefixes, of which a replica hands over its own: `engines.kv_fetch.keep_tokens`."""
    restart_s: float = 30.0
    """Seconds from a replica's death until it serves again, empty."""
    seed: int = 0
    """Of the arrivals, the choice of ingress and the randomness of policies."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits into the whole fleet, in all tiers."""
        tiers = self.tiers
        num_stores = 1 if tiers.is_file_store_shared else self.num_replicas
        return self.num_replicas * (self.cache_tokens + tiers.host_tokens) + num_stores * tiers.file_tokens

    def __post_init__(self) -> None:
        for name in ("num_replicas", "cache_tokens", "num_ingresses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.load > 0.0:
            raise ValueError(f"load must be above 0, got {self.load}")
        for name in ("cache_delay", "load_delay", "restart_s"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} must be at least 0 s, got {getattr(self, name)}")
        if self.roles is not None:
            self.roles.check(self.num_replicas, self.tiers.peer_bandwidth is not None)
        if self.notices and self.hand_over != "nothing" and self.tiers.peer_bandwidth is None:
            raise ValueError("a hand-over moves KV between replicas: give tiers.peer_bandwidth")
        ends: tuple[Kill | AnnouncedEnd, ...] = (*self.kills, *self.notices)
        for kill in ends:
            if kill.replica >= self.num_replicas:
                raise ValueError(
                    f"there is no replica {kill.replica} to kill: the fleet has {self.num_replicas}, from 0"
                )
