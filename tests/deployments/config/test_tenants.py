"""Tenants: keys and their hashes, mistakes in the configuration, and salts that never collide."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.tenants import KeyRing, Tenant, hash_key


def tenant(name: str, *keys: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "key_hashes": [hash_key(key) for key in keys or (f"key-of-{name}",)], **fields}


def ring(*settings: dict[str, Any], admin: str | None = None) -> KeyRing:
    checked = AppArgs.model_validate({"tenants": settings}).tenants
    return KeyRing(checked, None if admin is None else hash_key(admin))


def test_a_key_belongs_to_its_tenant() -> None:
    keys = ring(tenant("a", "a1", "a2"), tenant("b", weight=2.5), admin="root")
    found = {key: keys.find(key) for key in ("a1", "a2", "key-of-b", "root", "A1", "", "a1 ")}
    named = {key: owner.name for key, owner in found.items() if owner is not None}
    assert named == {"a1": "a", "a2": "a", "key-of-b": "b", "root": "admin"}
    assert [(t.name, t.weight) for t in keys.tenants] == [("a", 1.0), ("b", 2.5)]


def test_every_key_is_compared_wherever_the_right_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys = ring(*(tenant(f"t{number}") for number in range(5)), admin="root")
    for key in ("key-of-t0", "key-of-t4", "root", "wrong"):
        compared.clear()
        keys.find(key)
        assert len(compared) == 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"tenants": [tenant("a"), tenant("a", "x")]}, "'a' is used twice"),
        ({"tenants": [tenant("a", "k"), tenant("b", "k")]}, "listed twice, for 'a' and 'b'"),
        ({"tenants": [tenant("a", "k", "k")]}, "listed twice"),
        ({"tenants": [{"name": "a", "key_hashes": ["secret"]}]}, "64 lower-case hex digits"),
        ({"tenants": [{"name": "a", "key_hashes": [hash_key("k").upper()]}]}, "64 lower-case hex digits"),
        ({"tenants": [{"name": "a", "key_hashes": [hash_key("")]}]}, "empty key"),
        ({"tenants": [{"name": "a", "key_hashes": []}]}, "key_hashes"),
        ({"tenants": [{"name": "a"}]}, "key_hashes"),
        ({"tenants": [tenant("a", weight=0)]}, "weight"),
        ({"tenants": [tenant("a", weight=-1)]}, "weight"),
        ({"tenants": [tenant("a", weight=float("nan"))]}, "weight"),
        ({"tenants": [tenant("a", tokens_per_minute=0)]}, "tokens_per_minute"),
        ({"tenants": [tenant("a", max_concurency=3)]}, "max_concurency"),
        ({"tenants": [tenant("admin")]}, "reserved for the service"),
        ({"tenants": [tenant("a:b")]}, "name"),
        ({"tenants": [tenant("")]}, "name"),
        ({"tenants": [tenant("a", "k")], "admin_key_hash": hash_key("k")}, "key of the tenant 'a' too"),
        ({"admin_key_hash": "root"}, "64 lower-case hex digits"),
        ({"protect_metrics": True}, "admin_key_hash"),
        ({"admission": {"ttft_target_s": 0}}, "ttft_target_s"),
    ],
)
def test_mistakes_are_reported(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate(arguments)


NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,5}\Z")
ASKING = st.tuples(NAMES, st.booleans(), st.text(max_size=8) | st.sampled_from(["tenant:a:", "salt:"]))


@given(ASKING, ASKING)
def test_an_isolated_tenant_shares_nothing(one: tuple[str, bool, str], other: tuple[str, bool, str]) -> None:
    """Two requests share prefixes only if their own salts are equal and, where isolated, so are their tenants."""
    salts = [Tenant(name, isolate_cache=isolated).salt(salt) for name, isolated, salt in (one, other)]
    spaces = [(name if isolated else None, salt) for name, isolated, salt in (one, other)]
    assert (salts[0] == salts[1]) == (spaces[0] == spaces[1])


def test_tenants_are_isolated_where_there_is_more_than_one_of_them() -> None:
    alone, *several = ring(tenant("a")).tenants, ring(tenant("a"), tenant("b")).tenants
    assert [[one.isolate_cache for one in tenants] for tenants in (alone, *several)] == [[False], [True, True]]
    declared = ring(tenant("a", isolate_cache=False), tenant("b", isolate_cache=True), tenant("c")).tenants
    assert [one.isolate_cache for one in declared] == [False, True, True]
    assert [one.isolate_cache for one in ring(tenant("a", isolate_cache=True)).tenants] == [True]
