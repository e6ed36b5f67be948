"""docs/upgrade.md says what a change of each setting restarts, as the code declares it."""

from __future__ import annotations

import pytest

from deployments.config.live import AT_START, COUNTS, LIVE, LIVE_IN_HUB, is_live
from tests.docs.support.known_names import settings
from tests.docs.support.upgrade_table import PAGE, effects, page


def test_the_table_agrees_with_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.docs.support.upgrade_table"


@pytest.mark.parametrize("name", [*LIVE, *AT_START, *COUNTS, *LIVE_IN_HUB])
def test_each_name_in_it_is_a_setting_or_a_section(name: str) -> None:
    assert any(f"{path}.".startswith((f"{name}.", f"{name}[].")) for path in settings())


@pytest.mark.parametrize("path", sorted(settings()))
def test_each_setting_is_in_exactly_one_row(path: str) -> None:
    """By its own name, or by that of a section that does not exclude it."""
    plain = path.replace("[]", "")
    rows = [effect for effect, named in effects().items() if any(_covers(name, plain) for name in named)]
    assert len(rows) == 1, rows
    assert rows[0].startswith("nothing: requests") == is_live(plain)


def _covers(named: str, path: str) -> bool:
    name, _, excluded = named.partition(" (but not ")
    name = name.strip("`").replace("[]", "")
    others = [f"{name}.{each.strip('`')}" for each in excluded.rstrip(")").split(", ") if each]
    return f"{path}.".startswith(f"{name}.") and not any(f"{path}.".startswith(f"{each}.") for each in others)
