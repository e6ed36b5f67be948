"""The part of the configuration that an engine replica receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.config.kv_events import KvEventSettings
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import (
    ChatSettings,
    DrainSettings,
    HealthSettings,
    MetricsSettings,
    StreamSettings,
    WarmUpSettings,
    WireSettings,
)
from deployments.config.shared_prefixes import SharedPrefixSettings
from deployments.wire.server import WireTimings
from engine.base.machine import CpuPolicy
from router.fetch.roles import Role


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The sections of the configuration that a replica reads, besides its engine's."""

    num_sharing: int | None = None
    """Engine ranks that share a machine's cores because they reserve none; None: each has its reserved ones."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of a replica of each engine deployment, with which these are counted again when a replica starts."""
    health: HealthSettings = field(default_factory=HealthSettings)
    streams: StreamSettings = field(default_factory=StreamSettings)
    drain: DrainSettings = field(default_factory=DrainSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    warm_up: WarmUpSettings = field(default_factory=WarmUpSettings)
    """Used if there is a hub to ask."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """How conversations are turned into prompts; used for shared prefixes."""
    shared_prefixes: tuple[SharedPrefixSettings, ...] = ()
    """Computed at the start, for all tenants; each has its text."""
    kv_events: KvEventSettings | None = None
    """Where blocks of KV are announced to other systems' routers, if anywhere."""
    kv_fetch: KvFetchSettings | None = None
    """How KV is exchanged with other replicas, if at all."""
    role: Role | None = None
    """The role of its replicas; None: both."""
    cpu_policy: CpuPolicy = "normal"
    """How the kernel schedules its threads."""
    timings: WireTimings = field(default_factory=WireTimings)
    """Periods of the wire; its heartbeat is `health.heartbeat_s`."""
