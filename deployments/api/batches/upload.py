"""Receives a file as a multipart form, piece by piece, and writes it to the spool: it is never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.http.body import ClientGone
from deployments.batch.in_thread import in_thread
from deployments.batch.stored_files import StoredFiles, Upload
from deployments.config.limits import Limits
from deployments.wire.deadlines.time_limit import TimeLimit

PIECE_BYTES = 256 * 1024
"""Bytes that are parsed and written in one go, in a thread."""
MAX_PARTS, MAX_FIELD_BYTES, MAX_NAME_CHARS = 16, 1024, 255
_BOUNDARY = re.compile(rb"[!-~ ]{0,69}[!-~]")
"""As long as RFC 2046 has it; no space at its end."""
_PLAIN_ENCODINGS = (b"", b"7bit", b"8bit", b"binary")
_FORM_BYTES = 64 * 1024
"""Most bytes of a form besides the file's."""


@dataclass(slots=True)
class FileForm:
    """The contents of a form. Close it in any case."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    upload: Upload | None = None

    def close(self) -> None:
        """Remove the file, unless it was kept. Idempotent."""
        if self.upload is not None:
            self.upload.close()


async def receive_form(request: Request, files: StoredFiles, limits: Limits, max_bytes: int) -> FileForm:
    """Return the form in a request's body, whose part `file` is in the spool.

    A file may have `max_bytes`. Raises `ApiError` 400, 408, 413 or 415; SpoolFull where there is no room for it.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise ApiError(
            415, "A file is sent as a form: the content type must be multipart/form-data with a boundary."
        )
    boundary = options.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise invalid(
            f"The content type multipart/form-data has {_shown(boundary)}; it must have one of 1 to 70 letters, "
            "digits and other printable ASCII characters.",
            "content-type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "A compressed form is not supported; send the file as it is.")
    announced = request.headers.get("content-length", "")
    num_announced = int(announced) if re.fullmatch("[0-9]{1,15}", announced) else 0
    if num_announced > max_bytes + _FORM_BYTES or len(announced) > 15:
        raise _too_large(max_bytes)
    form = FileForm()
    try:
        await _read(request, _Reader(boundary, form, files, max_bytes, num_announced), limits)
        if form.upload is None:
            raise invalid("The form has no file; send it as the part named file.", "file")
    except BaseException:
        await in_thread(form.close)
        raise
    return form


async def _read(request: Request, reader: _Reader, limits: Limits) -> None:
    """Read the body: each piece of it must arrive in time."""
    pending, chunks = bytearray(), request.stream()
    limit = TimeLimit(total_s=limits.body_timeout_s)
    try:
        while True:
            with limit:
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            pending += chunk
            if len(pending) >= PIECE_BYTES:
                data, pending = bytes(pending), bytearray()
                await in_thread(reader.feed, data)
                limit.close()
                limit = TimeLimit(total_s=limits.body_timeout_s)
        await in_thread(reader.feed, bytes(pending))
    except TimeoutError:
        seconds = f"{limits.body_timeout_s:g} seconds (limits.body_timeout_s)"
        raise ApiError(408, f"A piece of {PIECE_BYTES} bytes did not arrive within {seconds}.") from None
    except ClientDisconnect:
        raise ClientGone from None
    except FormParserError:
        raise invalid(
            "The body is not a valid multipart form with the boundary that its content type names."
        ) from None
    finally:
        limit.close()
    reader.check_end()


class _Reader:
    """Parses a form. Each of its parts is a field, or the file."""

    def __init__(
        self, boundary: bytes, form: FileForm, files: StoredFiles, max_bytes: int, num_announced: int
    ) -> None:
        """A body of `num_announced` bytes has a file that is slightly shorter; 0: unknown."""
        self._form, self._files, self._max_bytes = form, files, max_bytes
        self._num_expected = max(num_announced - _FORM_BYTES, 1)
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name, self._field, self._num_parts = "", bytearray(), 0
        self._is_file = self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Take a piece. Raises FormParserError, `ApiError`."""
        if data:
            self._parser.write(data)

    def check_end(self) -> None:
        """Raise `ApiError` 400 unless the form was complete."""
        if not self._has_ended:
            raise invalid("The form ends before its closing boundary; send all of it.")

    def _on_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts; send file, purpose and expires_after.")
        self._headers, self._field, self._is_file = {}, bytearray(), False

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _on_headers(self) -> None:
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in _PLAIN_ENCODINGS:
            raise invalid("A part has a content-transfer-encoding; send its bytes as they are.")
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            return
        if self._form.upload is not None:
            raise invalid("The form has two parts named file; send one file at a time.", "file")
        given = options.get(b"filename", b"").decode("utf-8", "replace")
        self._form.filename = _plain(given) or "file"
        self._form.upload, self._is_file = self._files.begin(self._num_expected), True

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        upload = self._form.upload
        if not self._is_file or upload is None:
            self._field += data[start:end]
            if len(self._field) > MAX_FIELD_BYTES:
                raise invalid(f"{quoted(self._name)} is longer than {MAX_FIELD_BYTES} bytes.", quoted(self._name))
            return
        size = upload.num_bytes + end - start
        if size > self._max_bytes:
            raise _too_large(self._max_bytes)
        upload.write(data[start:end])

    def _on_part_end(self) -> None:
        if not self._is_file:
            self._form.fields[self._name] = self._field.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._has_ended = True


def _shown(boundary: bytes) -> str:
    return f"the boundary {quoted(boundary.decode('latin-1'))}" if boundary else "no boundary"


def _plain(name: str) -> str:
    """Return a file's own name, without its folders and unprintable characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:MAX_NAME_CHARS]


def _too_large(max_bytes: int) -> ApiError:
    message = f"The file is larger than {max_bytes} bytes (files.max_file_bytes); send it in parts."
    return ApiError(413, message, code="request_too_large")


def ttl_in(fields: Mapping[str, str]) -> int | None:
    """Return the seconds for which a file is to be kept, by its form; None where it does not say."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 12
    return checked_ttl(anchor, int(seconds) if is_number and seconds is not None else seconds, "expires_after")


SHORTEST_S, LONGEST_S = 3600, 2_592_000
"""Seconds for which a client may have a file kept, as in OpenAI's API."""
EXPIRY_SECONDS: dict[str, JsonValue] = {"type": "integer", "minimum": SHORTEST_S, "maximum": LONGEST_S}
"""The same as /openapi.json says it."""


def checked_ttl(anchor: object, seconds: object, name: str) -> int:
    """Return the seconds of an expiry policy. Raises `ApiError` 400."""
    if anchor != "created_at":
        raise invalid(f'{name}.anchor must be "created_at", got {quoted(anchor)}.', f"{name}.anchor")
    if not isinstance(seconds, int) or not SHORTEST_S <= seconds <= LONGEST_S:
        raise invalid(
            f"{name}.seconds must be an integer in [{SHORTEST_S}, {LONGEST_S}], got {quoted(seconds)}.",
            f"{name}.seconds",
        )
    return seconds
