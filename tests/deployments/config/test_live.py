"""A running process takes over some settings, by the rules for `args`, and refuses all others by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.args import AppArgs
from deployments.config.live import AT_START, LIVE, LIVE_IN_HUB, check_live, is_live, leaves, merged, with_live
from deployments.config.tenants import hash_key
from deployments.ingress.access_file import with_access_file

TENANT = {"name": "t", "key_hashes": [hash_key("a")]}
ROLES = {"engine": {"host_kv_gib": 1.0}, "engines": {"roles": {"prefill": 2, "decode": {"min": 1, "max": 3}}}}


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ({"limits": {"max_choices": 3}}, "limits.max_choices", 3),
        ({"limits": {"max_chunks_per_s": None}}, "limits.max_chunks_per_s", None),
        ({"admission": {"max_wait_s": 1}}, "admission.max_wait_s", 1.0),
        ({"slo": {"ttft_s": 9}}, "slo.ttft_s", 9.0),
        ({"router": {"policy": "random", "key_blocks": 2}}, "router.policy", "random"),
        ({"logging": {"level": "ERROR"}}, "logging.level", "ERROR"),
        ({"tokenizer_info": False}, "tokenizer_info", False),
        ({"admin_key_hash": hash_key("x")}, "admin_key_hash", hash_key("x")),
        ({}, "limits.max_choices", 7),
    ],
)
def test_live_settings_replace_those_of_args_and_the_rest_stays(given: Any, path: str, value: object) -> None:
    args = AppArgs.model_validate({"limits": {"max_choices": 7, "max_prompts": 5}, "engine": {"page_size": 8}})
    changed = with_live(args, given)
    found: Any = changed
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert (changed.limits.max_prompts, changed.engine.page_size) == (5, 8)


@pytest.mark.parametrize(
    "args",
    [
        {},
        ROLES,
        {"engines": {"autoscaling": {"max": 3}}},
        {"models": [{"engine": {"served_name": "a"}}, {"engine": {"served_name": "b"}, "load_at_start": False}]},
        {"tenants": [TENANT], "admin_key_hash": hash_key("root"), "protect_metrics": True},
        {"engine": {"speculation": {"method": "ngram"}, "kv_tier": None, "tasks": ["generate"]}},
        {"wire": {"ports": [2000, 2010]}, "ingresses": {"cors_origins": ["https://a.example"]}},
    ],
)
def test_without_settings_of_its_own_a_process_has_those_of_args(args: Any) -> None:
    given = AppArgs.model_validate(args)
    assert with_live(given, {}) == given


def test_a_list_is_replaced_as_a_whole() -> None:
    args = AppArgs.model_validate({"tenants": [TENANT]})
    other = {"name": "u", "key_hashes": [hash_key("b")]}
    assert [tenant.name for tenant in with_live(args, {"tenants": [other]}).tenants] == ["u"]
    assert with_live(args, {"tenants": []}).tenants == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limits": {"max_choicez": 3}}, r"limits: unknown setting 'max_choicez'; did you mean max_choices"),
        ({"limits": {"max_choices": 0}}, r"limits\.max_choices: .*greater than or equal to 1"),
        ({"limits": {"max_choices": None}}, r"limits\.max_choices"),
        ({"limits": None}, "limits"),
        ({"limits": 5}, "limits"),
        ({"limits": {"max_total_body_bytes": 4096}}, "at least 4 times max_body_bytes"),
        ({"tenants": [TENANT, TENANT]}, "the name 't' is used twice"),
        ({"tenants": [{"name": "t"}]}, r"tenants\.0\.key_hashes: must be given"),
        ({"protect_metrics": True}, "needs an admin_key_hash"),
        ({"router": {"policy": "cheapest"}}, "unknown routing policy"),
        ({"router": {"policy": "no_such_module:Mine"}}, "no_such_module cannot be imported"),
        ({"logging": {"level": "LOUD"}}, r"logging\.level"),
        ({"slo": {"ttft_s": "soon"}}, r"slo\.ttft_s"),
    ],
)
def test_wrong_values_are_refused_as_in_args(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_live(AppArgs(), given)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"engine": {"model": "x"}}, "engine.model"),
        ({"limits": {"prepare_threads": 3}}, "limits.prepare_threads"),
        ({"router": {"max_blocks": 3}}, "router.max_blocks"),
        ({"logging": {"encoding": "json"}}, "logging.encoding"),
        ({"engines": {"count": 3}}, "engines.count"),
        ({"limit": {"max_choices": 3}}, "limit.max_choices"),
        ({"logging": None}, "logging"),
        ({"models": []}, "models"),
        ({"access_file": "/keys"}, "access_file"),
    ],
)
def test_a_setting_that_no_running_process_takes_over_is_refused_by_name(given: Any, path: str) -> None:
    with pytest.raises(ValueError, match=f"user_config has {path}, .* give it under args"):
        with_live(AppArgs(), given)


def test_an_error_shows_no_hash() -> None:
    wrong = hash_key("secret")[:-1]
    with pytest.raises(ValueError, match="64 lower-case hex digits") as raised:
        with_live(AppArgs(), {"tenants": [{"name": "t", "key_hashes": [wrong]}]})
    assert wrong not in str(raised.value)


def test_keys_in_a_file_are_read_again_and_allow_none_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"tenants": [TENANT]}))
    args = AppArgs(access_file=str(keys))
    assert [tenant.name for tenant in with_access_file(with_live(args, {})).tenants] == ["t"]
    keys.write_text(yaml.safe_dump({"tenants": [{**TENANT, "name": "renamed"}]}))
    assert [tenant.name for tenant in with_access_file(with_live(args, {})).tenants] == ["renamed"]
    with pytest.raises(ValueError, match="both here and by access_file"):
        with_live(args, {"tenants": [TENANT]})


def test_the_hub_takes_over_only_the_log_level() -> None:
    check_live({"logging": {"level": "ERROR"}}, LIVE_IN_HUB)
    with pytest.raises(ValueError, match=r"limits\.max_choices"):
        check_live({"limits": {"max_choices": 3}}, LIVE_IN_HUB)
    with pytest.raises(ValueError, match="A running process can adopt none"):
        check_live({"logging": {"level": "ERROR"}}, ())


@pytest.mark.parametrize("path", AT_START)
def test_a_size_that_is_fixed_at_the_start_is_not_live_although_its_section_is(path: str) -> None:
    assert not is_live(path) and is_live(path.partition(".")[0])
    assert path.partition(".")[0] in LIVE


def test_sections_are_merged_and_lists_are_leaves() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2], "e": {"f": 1}}) == {
        "a": {"b": 3, "c": 2},
        "d": [2],
        "e": {"f": 1},
    }
    assert list(leaves({"a": {"b": [{"c": 1}], "d": {}}, "e": None})) == ["a.b", "e"]
