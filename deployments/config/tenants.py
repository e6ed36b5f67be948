"""The tenants of the configuration, found by their API keys, with the limits on their requests.

    "Authorization: Bearer rdx-..." ── sha256 ──▶ compared with every hash ──▶ Tenant

Keys are stored nowhere: the configuration holds their SHA-256, which is safe for keys drawn at random
(`raydix hash-key` draws them). Without tenants the service is open, and every request is `ANONYMOUS`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from deployments.config.section import Section

RESERVED_NAMES = frozenset({"anonymous", "admin"})


def hash_key(key: str) -> str:
    """Hash an API key as the configuration holds it: SHA-256, in hex."""
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
        raise ValueError(f"the name {value!r} is reserved for the service itself; choose another")
    return value


KeyHash = Annotated[str, AfterValidator(_check_hash)]


class TenantSettings(Section):
    """One tenant. Limits apply to generation requests; each ingress allows its share, limit / ingresses.count."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"), AfterValidator(_check_name)]
    """Unique name, shown in metrics, logs and error messages: letters, digits, dot, dash and underscore."""
    key_hashes: tuple[KeyHash, ...] = Field(min_length=1)
    """SHA-256 of each of the tenant's API keys, in hex; with several, keys can be replaced one by one."""
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    """Share of busy engines relative to other tenants: twice the weight gets twice the tokens."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Most concurrent generations; a request with n choices counts as n. None: no limit."""
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most requests per minute, and most in one burst; a request counts as many as the answers that it generates:
    prompts times `n` or `best_of`. None: no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most tokens per minute; prompts count when admitted, generated tokens as they come. None: no limit."""
    isolate_cache: bool | None = None
    """Whether cached prefixes are kept from other tenants, so that nothing reveals this one's prompts to them.
    None: where there is more than one tenant."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Requests of a lower priority go first in an engine and are preempted last."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request: a `TenantSettings` without its keys."""

    name: str
    weight: float = 1.0
    max_concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    isolate_cache: bool = False
    shares_cache: bool = False
    """Whether other tenants may find its cached prefixes, and it theirs."""
    priority: int | None = None
    """None: each request says its own, as where there are no tenants to protect from each other."""

    def salt(self, cache_salt: str) -> str:
        """The salt that roots a request's prefixes in the cache, given the request's own `cache_salt`.

        Different tenants or salts never give the same result, as names contain no colon. Empty only where neither
        the tenant nor the request asks for a salt.
        """
        if self.isolate_cache:
            return f"tenant:{self.name}:{cache_salt}"
        return f"salt:{cache_salt}" if cache_salt else ""


ANONYMOUS = Tenant("anonymous")
ADMIN = Tenant("admin")
"""Owner of requests with the admin key: weight 1, no limits."""


def distinct_tenants(tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
    """Return `tenants`. Raises ValueError when a name or a key appears twice."""
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
    """The hashes of all keys, and the tenant that each belongs to."""

    def __init__(self, tenants: Sequence[TenantSettings] = (), admin_key_hash: str | None = None) -> None:
        self.tenants = tuple(_tenant(settings, is_only_tenant=len(tenants) == 1) for settings in tenants)
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

    @property
    def by_name(self) -> dict[str, Tenant]:
        """The tenants by their names."""
        return {tenant.name: tenant for tenant in self.tenants}

    @property
    def weights(self) -> dict[str, float]:
        """The tenants' weights by their names."""
        return {tenant.name: tenant.weight for tenant in self.tenants}

    def find(self, key: str) -> Tenant | None:
        """The tenant a key belongs to. Compares with every hash in constant time: timing reveals nothing."""
        digest = hashlib.sha256(key.encode()).digest()
        found: Tenant | None = None
        for key_digest, tenant in self._owners:
            if hmac.compare_digest(digest, key_digest):
                found = tenant
        return found


def _tenant(settings: TenantSettings, *, is_only_tenant: bool) -> Tenant:
    declared = settings.isolate_cache
    isolated = not is_only_tenant if declared is None else declared
    rest = settings.model_dump(exclude={"key_hashes", "isolate_cache"})
    return Tenant(**rest, isolate_cache=isolated, shares_cache=not (isolated or is_only_tenant))
