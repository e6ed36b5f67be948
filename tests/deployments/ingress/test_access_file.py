"""The access file: what it may contain, and the errors about its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.tenants import KeyRing, hash_key
from deployments.ingress.access_file import with_access_file

TENANT = {"name": "search", "key_hashes": [hash_key("a-key-of-search-1")], "weight": 2}
ADMIN = hash_key("a-key-of-admins-1")


def from_file(tmp_path: Path, content: Any, **arguments: Any) -> AppArgs:
    path = tmp_path / "access.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return with_access_file(AppArgs.model_validate({"access_file": str(path), **arguments}))


def test_the_file_says_which_keys_may_ask(tmp_path: Path) -> None:
    args = from_file(tmp_path, {"tenants": [TENANT], "admin_key_hash": ADMIN}, protect_metrics=True)
    keys = KeyRing(args.tenants, args.admin_key_hash)
    assert not keys.is_open
    found = keys.find("a-key-of-search-1")
    assert found is not None and (found.name, found.weight) == ("search", 2)
    assert keys.find("another-key-0000") is None
    assert with_access_file(args) is args


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "names no tenant"),
        ({"admin_key_hash": ADMIN}, "names no tenant"),
        ({"tenants": [TENANT], "engine": {}}, "engine"),
        ({"tenants": [TENANT | {"key_hashes": ["x"]}]}, r"tenants\.0\.key_hashes"),
        ({"tenants": [TENANT], "admin_key_hash": TENANT["key_hashes"][0]}, "use another"),  # type: ignore[index]
        ("tenants: [", "not YAML"),
        ("just text", "access.yaml"),
        ("", "names no tenant"),
    ],
)
def test_a_file_that_is_wrong_opens_nothing(tmp_path: Path, content: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        from_file(tmp_path, content)
    assert TENANT["key_hashes"][0] not in str(caught.value)  # type: ignore[index]


def test_a_file_that_is_missing_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        with_access_file(AppArgs(access_file=str(tmp_path / "none.yaml")))


def test_protected_metrics_need_the_files_admin(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="protect_metrics needs"):
        from_file(tmp_path, {"tenants": [TENANT]}, protect_metrics=True)


def test_the_files_tenants_close_the_metrics(tmp_path: Path) -> None:
    assert from_file(tmp_path, {"tenants": [TENANT]}).protects_metrics
    assert not from_file(tmp_path, {"tenants": [TENANT]}, protect_metrics=False).protects_metrics


def test_keys_are_in_one_place() -> None:
    with pytest.raises(ValidationError, match="move them all into that file"):
        AppArgs.model_validate({"access_file": "x", "tenants": [TENANT]})
