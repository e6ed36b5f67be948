"""`raydix batch`: answers a file of requests at a running server, as many in parallel as the server accepts."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from deployments.batch.errors import BatchFileError, BatchStopped
from deployments.batch.file_batch import BatchProgress, run_file_batch
from deployments.batch.input_file import BatchFile
from deployments.batch.output_file import PartialOutput
from deployments.batch.runner import IGNORED_FIELDS, BatchRunner, NoReply, Reply
from deployments.cli.api_key import given_key
from deployments.cli.errors import UserError, one_line
from deployments.cli.printable import printable
from deployments.cli.unreachable import unreachable
from deployments.config.settings import BatchSettings

DEFAULT_KEY_ENV = "RAYDIX_API_KEY"
CONNECT_TIMEOUT_S = 5.0
REPORT_S = 10.0
"""Seconds between two lines about the progress if there is no terminal."""
SOME_FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of the command."""

    url: str
    key: str | None
    key_env: str | None
    settings: BatchSettings
    priority: int
    timeout_s: float
    max_line_bytes: int
    retry_failed: bool


def run(source: Path, target: Path, options: BatchOptions) -> int:
    """Answer the requests in `source`, and return the exit code. Raises UserError when that cannot be done."""
    key = given_key(options.key, options.key_env, DEFAULT_KEY_ENV)
    try:
        batch = BatchFile(source, options.max_line_bytes)
        with PartialOutput(batch, target, retry_failed=options.retry_failed) as output, View() as view:
            return _until_interrupted(batch, output, options, key, view)
    except BatchFileError as error:
        raise UserError(printable(str(error)), 2) from None


def _until_interrupted(
    batch: BatchFile, output: PartialOutput, options: BatchOptions, key: str | None, view: View
) -> int:
    try:
        progress = asyncio.run(_answer(batch, output, options, key, view))
    except asyncio.CancelledError:
        view.end(f"Interrupted. {_kept(batch, output)}")
        return INTERRUPTED
    except BatchStopped as error:
        raise UserError(printable(f"{one_line(error)}. {_kept(batch, output)}")) from None
    view.end(f"{progress.num_ok} of {progress.total} requests are answered in {output.path}{_failures(progress)}")
    return SOME_FAILED if progress.num_failed else 0


def _kept(batch: BatchFile, output: PartialOutput) -> str:
    return (
        f"{output.num_ok} of {batch.num_lines} lines are answered and kept in {output.partial}; the same command "
        "continues"
    )


def _failures(progress: BatchProgress) -> str:
    if not progress.num_failed:
        return "."
    return f", {progress.num_failed} failed: their lines say why. --retry-failed sends them again."


async def _answer(
    batch: BatchFile, output: PartialOutput, options: BatchOptions, key: str | None, view: View
) -> BatchProgress:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with Server(options.url, key, options.timeout_s) as server:
        await server.check()
        fields = {"priority": options.priority} if options.priority else {}
        return await run_file_batch(batch, output, BatchRunner(server.post, options.settings), fields, view.show)


class Server:
    """A server with OpenAI's API. An asynchronous context manager."""

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """An answer may take `timeout_s` seconds."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"} | (
            {} if key is None else {"authorization": f"Bearer {key}"}
        )
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url, headers=headers, timeout=timeout, limits=unbounded, transport=transport
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{url!r} is not a URL: {one_line(error)}", 2) from None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Raise UserError when the server cannot be reached, or refuses the key; the batch then sends nothing."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise UserError(unreachable(self.url, error)) from None
        if response.status_code in (401, 403):
            said = printable(response.text[:500])
            raise UserError(f"{self.url} refuses the key: {said} Give --key-env or --key.")

    async def post(self, url: str, body: bytes) -> Reply:
        """Send one request. Raises NoReply."""
        try:
            response = await self._http.post(url, content=body)
        except httpx.HTTPError as error:
            was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise NoReply(f"{self.url} gave no answer: {one_line(error)}", was_sent=was_sent) from None
        status, content = response.status_code, response.content
        try:
            answer = msgspec.json.format(content, indent=-1)
            is_object = answer.startswith(b"{")
        except msgspec.DecodeError:
            is_object = False
        if not is_object:
            answer = _foreign(response)
            status = 502 if status < 400 else status
        headers = response.headers
        return Reply(
            status,
            answer,
            headers.get("x-request-id", ""),
            retry_after_s=_retry_after(response),
            is_final=headers.get("x-should-retry") == "false",
            ignored_fields=headers.get(IGNORED_FIELDS, ""),
        )


def _foreign(response: httpx.Response) -> bytes:
    """Return the error object for an answer that is not JSON, as from some proxies."""
    message = f"HTTP {response.status_code} without a JSON object: {response.text[:200]}"
    return msgspec.json.encode(
        {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    )


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # or a date, which no server of this API sends
        return None


class View:
    """Shows the progress on standard error: a bar in a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = console = Console(stderr=True)
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed, {task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, failed=0, rate="0.0")
        self._started_at = self._reported_at = time.monotonic()
        self._num_before: int | None = None

    def __enter__(self) -> View:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: BatchProgress) -> None:
        """Show the progress of the batch."""
        now = time.monotonic()
        if self._num_before is None:
            self._num_before = progress.num_done
            if progress.num_ok:
                self._say(f"{progress.num_ok} of {progress.total} lines were answered before.")
        rate = f"{(progress.num_done - self._num_before) / max(now - self._started_at, 0.001):.1f}"
        done, failed = progress.num_done, progress.num_failed
        self._bar.update(self._task, completed=done, total=progress.total, failed=failed, rate=rate)
        if not self._console.is_terminal and now - self._reported_at >= REPORT_S:
            self._reported_at = now
            self._say(f"{done} of {progress.total} lines done, {failed} failed, {rate}/s")

    def end(self, message: str) -> None:
        """Remove the bar, and print how the batch ended."""
        self._bar.stop()
        self._say(message)

    def _say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)
