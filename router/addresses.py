"""Addresses of replicas and the keys that prove identities, as each replica advertises them through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_STORE = "files:"
"""Prefix of the names of stores. Names of replicas have no colon there."""


def store_name(store: str) -> str:
    """Return routers' name of a store of files; replicas that advertise the same store share it."""
    return f"{_STORE}{store}"


def is_store(name: str) -> bool:
    """Whether a name is that of a store of files, not of a replica."""
    return name.startswith(_STORE)


@dataclass(frozen=True, slots=True)
class KVAddress:
    """Where a replica lends KV to others."""

    endpoint: str
    """ZeroMQ address."""
    secret: str = field(repr=False)
    """Key with which another replica proves that it is one."""
    public_key: str = ""
    """As in `ReplicaAddress`."""

    @classmethod
    def advertised(cls, metadata: Mapping[str, str]) -> KVAddress | None:
        """Return the address in what a replica advertised (`metadata`); None where it lends none."""
        if any(f"kv_{field.name}" not in metadata for field in fields(cls)):
            return None
        return cls(**{field.name: metadata[f"kv_{field.name}"] for field in fields(cls)})

    def metadata(self) -> dict[str, str]:
        """Return what a replica advertises."""
        return {f"kv_{field.name}": getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """How to reach a replica's wire."""

    replica: str
    endpoint: str
    """ZeroMQ address, "tcp://host:port"."""
    secret: str = field(repr=False)
    """Key with which an ingress proves that it is one; new with every start of a replica."""
    epoch: int | None = None
    """Number drawn at the replica's start; None when it was not advertised."""
    public_key: str = ""
    """Public key of the replica, with which traffic is encrypted; "" where it is not."""
    kv: KVAddress | None = None
    """Where it lends KV; None where it lends none."""
    role: str = ""
    """"prefill" or "decode" where prefill and decode are apart (`router.fetch.roles`)."""
    store: str = ""
    """Name of the store of files from which it reads KV (`store_name`); "" where it reads none."""
