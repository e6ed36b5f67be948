"""The commands in README.md and docs/ do what the pages say, on the running application."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deployments.config.tenants import hash_key
from tests.docs.support.code_blocks import EXECUTED, Sandbox, missing_tools
from tests.docs.support.markdown_pages import COMMAND_PAGES, ROOT, read_page
from tests.e2e.conftest import Service, running

pytestmark = pytest.mark.e2e

KEYS = {
    "RAYDIX_API_KEY": "the key of a tenant in tests".replace(" ", "-"),
    "RAYDIX_ADMIN_KEY": "the-admin-key-in-tests",
}
"""What pages call the keys of the application in docs/security.md."""


@pytest.fixture(scope="module")
def guarded(service: Service) -> Iterator[Service]:
    """The application that docs/security.md shows, its keys being these, beside the session's."""
    blocks = read_page(ROOT / "docs/security.md").blocks
    pages = [yaml.safe_load(block.text) for block in blocks if block.language == "yaml"]
    [[application]] = [page["applications"] for page in pages if "applications" in page]
    arguments = application["args"]
    arguments["admin_key_hash"] = hash_key(KEYS["RAYDIX_ADMIN_KEY"])
    arguments["tenants"][0]["key_hashes"] = [hash_key(KEYS["RAYDIX_API_KEY"])]
    with running("guarded", arguments, external_scaler_enabled=application["external_scaler_enabled"]) as guarded:
        yield guarded


@pytest.mark.parametrize("path", COMMAND_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_work(
    path: Path, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All unmarked blocks run one after the other, as they build on those before them."""
    sandbox = Sandbox(tmp_path, KEYS)
    monkeypatch.chdir(tmp_path)
    missing: dict[str, list[str]] = {}
    for block in read_page(path).blocks:
        if tools := missing_tools(block):
            missing[str(block)] = tools
        elif block.marker is None and block.language in EXECUTED:
            needs_keys = any(name in block.text for name in KEYS)
            asked: Service = request.getfixturevalue("guarded") if needs_keys else service
            with contextlib.redirect_stdout(io.StringIO()):
                sandbox.run(block, asked.url)
    if missing:
        pytest.skip(f"not installed here: {missing}; all other blocks work")
