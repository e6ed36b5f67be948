"""Every block is executed (tests/e2e/test_docs.py), validated here, or marked with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.app import chat
from tests.docs.support.code_blocks import ADDRESS, EXECUTED, dialogue, is_like, marker_problem, validate_yaml
from tests.docs.support.markdown_pages import COMMAND_PAGES, ROOT, Block, read_page
from tests.monitoring.support.promql import problems

BLOCKS = [block for path in COMMAND_PAGES for block in read_page(path).blocks]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_executed_validated_or_marked(block: Block) -> None:
    if block.marker is not None:
        assert marker_problem(block) is None
    elif block.language == "yaml":
        validate_yaml(block.text)
    elif block.language == "promql":
        assert problems(block.text) == []
    else:
        assert block.language in (*EXECUTED, "text"), (
            f"blocks in {block.language!r} can be neither executed nor validated"
        )


def test_chat_talks_to_the_address_that_pages_use() -> None:
    assert chat.__defaults__ is not None and ADDRESS in chat.__defaults__


def block(text: str, language: str = "sh", marker: tuple[str, str] | None = None) -> Block:
    return Block(ROOT / "docs/x.md", 1, language, text, marker)


TEST = "tests/e2e/test_cli.py::test_serve_is_ready_answers_and_leaves_nothing_behind"


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("serve deploy x.yaml", ("needs", "luck")),
        ("raydix serve --port 1", ("tested by", "tests/e2e/test_cli.py::test_no_such")),
        ("raydix serve --port 1", ("tested by", "tests/no_such.py")),
        ("raydix serve --host 1", ("tested by", TEST)),
        ("raydix serve\nraydix info demo", ("tested by", TEST)),
        ("make clean", ("tested by", TEST)),
        ("make tset", ("tested by", ".ci/run")),
    ],
)
def test_a_marker_that_is_not_true_is_noticed(text: str, marker: tuple[str, str]) -> None:
    assert marker_problem(block(text, marker=marker)) is not None


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("serve deploy x.yaml", ("needs", "cluster")),
        ("raydix serve --port 9000  # there", ("tested by", TEST)),
        ("make serve  # a comment\nmake test", ("tested by", f"{TEST}, .ci/run")),
    ],
)
def test_a_true_marker_passes(text: str, marker: tuple[str, str]) -> None:
    assert marker_problem(block(text, marker=marker)) is None


def test_a_marker_counts_only_right_before_its_block(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text("<!-- needs: gpu -->\n```sh\na\n```\n\n<!-- needs: gpu -->\n\nText.\n\n```sh\nb\n```\n")
    assert [block.marker for block in read_page(page).blocks] == [("needs", "gpu"), None]


@pytest.mark.parametrize(
    "text",
    [
        "engine: {modell: x}",
        "applications:\n  - {import_path: 'deployments.app:build', args: {routre: {}}}",
        "http_option: {}\napplications:\n  - {import_path: 'deployments.app:build'}",
    ],
)
def test_a_mistake_in_yaml_is_noticed(text: str) -> None:
    with pytest.raises(ValueError):
        validate_yaml(text)


def test_output_is_compared_but_for_dots() -> None:
    [(first, shown), (second, nothing)] = dialogue("$ a \\\n>  b\n{…}\nx\n$ c\n")
    assert (first, shown, second, nothing) == ("a \\\n b", "{…}\nx", "c", "")
    assert is_like("{1, 2}\nx\n", shown) and is_like("anything", nothing)
    assert not is_like("{1, 2}\ny", shown) and not is_like("{1}\nx\nz", shown)
