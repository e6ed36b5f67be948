"""Who may ask, and for how much: tenants as the configuration names them, found by their API keys.

    "Authorization: Bearer rdx-..." ── sha256 ──▶ compared with every hash ──▶ Tenant

Keys themselves are nowhere: the configuration holds their SHA-256, which is enough for keys drawn at random
(`raydix hash-key` draws them). Without tenants the service is open and everybody is `ANONYMOUS`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

RESERVED_NAMES = frozenset({"anonymous", "admin"})


def hash_key(key: str) -> str:
    """What the configuration holds of an API key: its SHA-256, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def _check_hash(value: str) -> str:
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(
            "a key hash is the SHA-256 of an API key, 64 lower-case hex digits; `raydix hash-key` prints it"
        )
    if value == hash_key(""):
        raise ValueError("this is the hash of an empty key; `raydix hash-key` makes one that is hard to guess")
    return value


def _check_name(value: str) -> str:
    if value in RESERVED_NAMES:
        raise ValueError(f"the name {value!r} is taken by the service itself; choose another")
    return value


KeyHash = Annotated[str, AfterValidator(_check_hash)]


class TenantSettings(BaseModel):
    """One tenant. Limits count requests that generate; each ingress allows its share: limit / ingresses.count."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"), AfterValidator(_check_name)]
    """Unique; shown in metrics, logs and error messages. Letters, digits, dot, dash and underscore."""
    key_hashes: tuple[KeyHash, ...] = Field(min_length=1)
    """SHA-256 of each of its API keys, in hex; several let keys be changed without a gap."""
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    """Share of the engines beside other tenants when all are busy: twice the weight, twice the tokens."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Generations at once; a request with n choices counts n. None: no limit."""
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests a minute, and at most a minute's worth at once. None: no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tokens a minute: prompts when they are admitted, generated tokens as they come. None: no limit."""
    isolate_cache: bool = False
    """Share no cached prefix with other tenants, so that none can tell from timing what it has asked."""
    priority: int = Field(default=0, ge=-100, le=100)
    """In an engine, requests of a higher one go first and are preempted last."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request belongs to."""

    name: str
    weight: float = 1.0
    max_concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    isolate_cache: bool = False
    priority: int | None = None
    """None: each request's own, where nobody is to be protected from anybody."""

    def salt(self, cache_salt: str) -> str:
        """What roots its prefixes in the cache, of a request's own `cache_salt`.

        Different tenants or salts never give the same one: names hold no colon. Empty only when nothing asks
        for a salt.
        """
        if self.isolate_cache:
            return f"tenant:{self.name}:{cache_salt}"
        return f"salt:{cache_salt}" if cache_salt else ""


ANONYMOUS = Tenant("anonymous")
ADMIN = Tenant("admin")
"""Whom requests with the admin key belong to: weight 1, no limits."""


def distinct_tenants(tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
    """`tenants`, when no name and no key appears twice. Raises ValueError."""
    names = Counter(tenant.name for tenant in tenants)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"tenants: the name {twice[0]!r} is used twice")
    owners: dict[str, str] = {}
    for tenant in tenants:
        for key_hash in tenant.key_hashes:
            if key_hash in owners:
                pair = f"{owners[key_hash]!r} and {tenant.name!r}"
                raise ValueError(f"tenants: the key hash {key_hash[:8]}… is listed twice, for {pair}")
            owners[key_hash] = tenant.name
    return tenants


class KeyRing:
    """All keys' hashes and what each opens."""

    def __init__(self, tenants: Sequence[TenantSettings] = (), admin_key_hash: str | None = None) -> None:
        self.tenants = tuple(_tenant(settings) for settings in tenants)
        self._owners = [
            (bytes.fromhex(key_hash), tenant)
            for settings, tenant in zip(tenants, self.tenants, strict=True)
            for key_hash in settings.key_hashes
        ]
        if admin_key_hash is not None:
            self._owners.append((bytes.fromhex(admin_key_hash), ADMIN))

    @property
    def is_open(self) -> bool:
        """Whether requests without a key are served."""
        return not self.tenants

    def find(self, key: str) -> Tenant | None:
        """Whom a key belongs to. Compares with every hash, each in constant time: nothing leaks of where it is."""
        digest = hashlib.sha256(key.encode()).digest()
        found: Tenant | None = None
        for key_digest, tenant in self._owners:
            if hmac.compare_digest(digest, key_digest):
                found = tenant
        return found


def _tenant(settings: TenantSettings) -> Tenant:
    return Tenant(
        settings.name,
        settings.weight,
        settings.max_concurrency,
        settings.requests_per_minute,
        settings.tokens_per_minute,
        settings.isolate_cache,
        settings.priority,
    )
