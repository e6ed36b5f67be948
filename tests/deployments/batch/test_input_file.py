"""Files of requests: what is read, what is an error of a line, and what of the whole file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.record.observation import ENDPOINTS
from deployments.batch.errors import BatchFileError
from deployments.batch.input_file import URLS, BatchFile, BatchRequest, InvalidLine, parse_line
from tests.deployments.batch.support.batch_files import request_line, write_input


def test_urls_of_a_batch_are_endpoints_that_generate() -> None:
    assert set(URLS) <= set(ENDPOINTS)


def test_a_file_is_read_in_order_without_its_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"\ufeff{request_line('b', seed=1)}\r\n\n  \n{request_line('a', x=[0.1, None])}")
    batch = BatchFile(path)
    assert list(batch) == [
        BatchRequest("b", "/v1/completions", b'{"prompt": "b", "seed": 1}'),
        BatchRequest("a", "/v1/completions", b'{"prompt": "a", "x": [0.1, null]}'),
    ]
    assert (batch.num_lines, batch.num_invalid) == (2, 0)
    assert [batch.index(name) for name in ("b", "a", "c")] == [0, 1, None]


GOOD = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {}}


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        ("nonsense", None, "not valid JSON"),
        ('{"custom_id": "x", "body": {"a":' + "[" * 100_000, None, "not valid JSON"),
        ('{"custom_id": "\ud800"}', None, "not valid JSON"),
        ("[]", None, "no request of a batch"),
        (json.dumps({**GOOD, "custom_id": 7}), None, "`str`, got `int` - at `$.custom_id`"),
        (json.dumps({"custom_id": "x", "method": "POST", "url": URLS[0]}), "x", "missing required field `body`"),
        (json.dumps({**GOOD, "body": "text"}), "x", "`object`, got `str` - at `$.body`"),
        (json.dumps({**GOOD, "method": "GET"}), "x", "method is 'GET'; only POST"),
        (json.dumps({**GOOD, "url": "/v1/models"}), "x", "url is '/v1/models'; it must be /v1/chat"),
        (json.dumps({**GOOD, "body": {"stream": True}}), "x", "body.stream is set"),
        (json.dumps({**GOOD, "body": {"stream": False, "background": True}}), "x", "body.background is set"),
    ],
)
def test_a_wrong_line_gives_an_error_that_says_what_is_wrong(
    line: str, custom_id: str | None, message: str
) -> None:
    found = parse_line(line.encode(errors="surrogatepass"))
    assert isinstance(found, InvalidLine) and found.custom_id == custom_id
    assert message in found.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda part: st.lists(part), max_leaves=4
)


@given(
    st.dictionaries(st.sampled_from(["a", "priority", "seed", "x y"]), JSON), st.sampled_from(["", " ", "\n\t"])
)
def test_a_body_gets_the_fields_that_it_lacks_and_keeps_its_own(body: dict[str, object], space: str) -> None:
    text = f"{space}{json.dumps(body)}{space}".replace("{", "{" + space, 1)
    fields = {"priority": 10, "seed": 3}
    assert json.loads(BatchRequest("a", URLS[0], text.encode()).with_fields(fields)) == {**fields, **body}


@given(st.binary() | st.dictionaries(st.sampled_from(sorted(GOOD)), st.none() | st.text()).map(json.dumps))
def test_any_line_is_a_request_or_invalid(line: bytes | str) -> None:
    assert isinstance(parse_line(line if isinstance(line, bytes) else line.encode()), BatchRequest | InvalidLine)


def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(tmp_path: Path) -> None:
    path = write_input(
        tmp_path / "in.jsonl", request_line("a"), request_line("b", x="y" * 5000), request_line("c")
    )
    first, second, third = BatchFile(path, max_line_bytes=1024)
    assert isinstance(first, BatchRequest) and isinstance(third, BatchRequest)
    assert second == InvalidLine(None, "This line is longer than 1024 bytes.", "line_too_long")


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    line = request_line("a")
    path = write_input(tmp_path / "in.jsonl", line, request_line("bb"))
    first, second = BatchFile(path, max_line_bytes=len(line))
    assert isinstance(first, BatchRequest) and isinstance(second, InvalidLine)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), 'has no request; it is empty; expected {"custom_id": "...", "method": "POST", '),
        (("", " "), "has no request; it is empty"),
        (("question,answer", "1,2"), "has no request; line 1: This line is not valid JSON"),
        (("", request_line("a"), "x", request_line("a")), "the custom_id 'a' twice, in lines 2 and 4"),
        # Lines that are wrong in other ways are told apart by their custom_id too.
        (
            (request_line("b"), json.dumps({**GOOD, "custom_id": "a", "method": "GET"}), request_line("a")),
            "2 and 3",
        ),
    ],
)
def test_a_file_that_cannot_be_a_batch_is_refused_as_a_whole(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BatchFileError) as refused:
        BatchFile(write_input(tmp_path / "in.jsonl", *lines))
    assert str(tmp_path / "in.jsonl") in str(refused.value) and message in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"in\.jsonl cannot be read: no such file"):
        BatchFile(tmp_path / "in.jsonl")


@pytest.mark.parametrize("lines", [("b", "a"), ("a",), ("a", "b", "c"), ("a", "x")])
def test_a_file_that_changes_under_the_reader_is_noticed(tmp_path: Path, lines: tuple[str, ...]) -> None:
    path = write_input(tmp_path / "in.jsonl", request_line("a"), request_line("b"))
    batch = BatchFile(path)
    write_input(path, *map(request_line, lines))
    with pytest.raises(BatchFileError, match="was changed while it was read"):
        list(batch)
