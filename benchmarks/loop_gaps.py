"""Measure how long one request stops an ingress's event loop, for every endpoint and field at the largest body.

    python -m benchmarks.loop_gaps [--only TEXT] [--context 131072] [--json FILE]

The real API runs in this process over an engine that answers at once, with the embedded model's tokenizer and a
template that shows everything. Each body is as large as `limits.max_body_bytes` allows and made of one thing:
many small values, or one that is huge. Columns:

    gap ms    the longest time between two turns of the loop: what each stream of the ingress waits
    own ms    the longest time that the loop's own thread computed in one turn
    took ms   from the request to its answer

On a machine that does other things too, gaps are those of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp, Message

from benchmarks import loop_gap_cases, this_machine
from benchmarks.loop_gap_cases import Case, cases
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.client.protocol import FleetHealth, GenerateRequest, Turn
from deployments.client.timeline import Timeline
from deployments.config.settings import ChatSettings
from deployments.telemetry.garbage import GarbagePauses
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import load_tokenizer
from engine.values.logprobs import TokenLogprobs
from engine.values.stream_delta import StreamDelta

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.id }}{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
CHUNK = 64 * 1024
HIDDEN_SIZE = 4096


class Watch:
    """Looks at an event loop for as long as it is entered."""

    def __init__(self) -> None:
        self.gap_s = self.own_s = 0.0
        """Seconds: the longest time between two turns, and the longest that the loop's thread computed in one."""

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._look())
        await asyncio.sleep(0.01)
        self.gap_s = self.own_s = 0.0
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.sleep(0.005)
        self._task.cancel()

    async def _look(self) -> None:
        wall, own = time.perf_counter(), time.thread_time()
        while True:
            # Every millisecond: a loop that never rests would take the interpreter's lock from threads.
            await asyncio.sleep(0.001)
            now, used = time.perf_counter(), time.thread_time()
            self.gap_s, self.own_s = max(self.gap_s, now - wall), max(self.own_s, used - own)
            wall, own = now, used


@dataclass
class _Answer:
    """A stream of one token; or of `LONG_ANSWER` in few deltas, as after pauses, where so many were asked for."""

    request: GenerateRequest
    replica: str | None = "replica"
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0, 0.0))
    num_deltas: int = 0

    def __aiter__(self) -> _Answer:
        return self

    @property
    def request_id(self) -> str:
        return self.request.request_id

    async def __anext__(self) -> StreamDelta:
        sampling = self.request.sampling
        if sampling.pooling is not None:
            values = array("f", [0.123456] * (len(sampling.pooling.token_ids) or HIDDEN_SIZE)).tobytes()
            return StreamDelta(self.request_id, finish_reason="stop", pooled=values)
        if sampling.max_tokens != loop_gap_cases.LONG_ANSWER:
            return StreamDelta(self.request_id, [5], finish_reason="length")
        await asyncio.sleep(0)
        ids = [300 + number % 1000 for number in range(loop_gap_cases.LONG_ANSWER // 8)]
        tops = tuple((100 + number, -1.0 - number) for number in range(sampling.logprobs or 0))
        self.num_deltas += 1
        return StreamDelta(
            self.request_id, ids, logprobs=[TokenLogprobs(token, -0.5, tops) for token in ids],
            finish_reason="length" if self.num_deltas == 8 else None,
        )  # fmt: skip

    def explain(self) -> dict[str, Any] | None:
        return None

    async def aclose(self) -> None:
        pass


class _Engine:
    """Answers at once."""

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        return request

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> Any:
        return _Answer(request)

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return []

    async def health(self) -> FleetHealth:
        return FleetHealth("healthy", 1, ())


def application(limits: Limits, context: int) -> ASGIApp:
    """Return the API over an engine that answers at once, with a context of so many tokens."""
    tokenizer: Any = load_tokenizer(demo_model_path())
    tokenizer.chat_template = TEMPLATE
    card = ModelCard(
        "demo", 1, context, len(tokenizer), tasks=("generate", "embed", "rerank"), hidden_size=HIDDEN_SIZE
    )
    engine: Any = _Engine()

    async def metrics_text() -> tuple[bytes, str]:
        return b"", "text/plain"

    served = ServedModel(card, engine, TextCodec(tokenizer, ChatSettings(tools="hermes")))
    return create_app(ApiService({"demo": served}, metrics_text, limits), is_eager=True)


async def post(app: ASGIApp, case: Case) -> tuple[int, list[bytes]]:
    """Send a request as a server does, in pieces of 64 KiB; return the status and the answer's pieces."""
    unread = iter(range(0, len(case.body), CHUNK))
    sent: list[Message] = []

    async def receive() -> Message:
        begin = next(unread, None)
        if begin is None:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # no disconnect
        end = begin + CHUNK
        return {"type": "http.request", "body": case.body[begin:end], "more_body": end < len(case.body)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": case.path, "raw_path": case.path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], [message.get("body", b"") for message in sent[1:]]


async def measure(app: ASGIApp, chosen: Iterable[Case], console: Console) -> list[dict[str, Any]]:
    """Send each request; return the rows of the table."""
    rows = []
    for case in chosen:
        num_bytes = len(case.body)  # it is made now, and not while the event loop is watched
        async with Watch() as watch:
            began = time.perf_counter()
            status, content = await post(app, case)
            took = time.perf_counter() - began
        answer = "" if status == 200 else json.loads(b"".join(content))["error"]["message"]
        row = {
            "path": case.path,
            "name": case.name,
            "bytes": num_bytes,
            "status": status,
            "gap_ms": round(watch.gap_s * 1e3, 2),
            "own_ms": round(watch.own_s * 1e3, 2),
            "took_ms": round(took * 1e3, 2),
        }
        rows.append(row)
        console.print(
            f"{row['gap_ms']:7.1f} {row['own_ms']:7.1f} {row['took_ms']:8.0f}  {status} "
            f"{case.path} {case.name}  [dim]{answer[:70]}[/dim]",
            highlight=False, markup=True, soft_wrap=True,
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, print a table with the worst first, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure only bodies with this text in their name or path")
    parser.add_argument("--context", type=int, default=131_072, help="the model's context, in tokens")
    parser.add_argument("--worst", type=int, default=20, help="rows of the table")
    parser.add_argument("--json", type=Path, help="where to write the results")
    asked = parser.parse_args()
    limits, console = Limits(), Console()
    chosen = (case for case in cases(limits.max_body_bytes) if asked.only in f"{case.path} {case.name}")
    app = application(limits, asked.context)
    GarbagePauses().settle()
    console.print("gap ms  own ms   took ms  answer")
    rows = asyncio.run(measure(app, chosen, console))
    table = Table(title="the longest gaps")
    for column in ("gap ms", "own ms", "took ms", "status", "body"):
        table.add_column(column, justify="left" if column == "body" else "right")
    for row in sorted(rows, key=lambda row: -row["gap_ms"])[: asked.worst]:
        figures = (f"{row[name]:.1f}" for name in ("gap_ms", "own_ms", "took_ms"))
        table.add_row(*figures, str(row["status"]), f"{row['path']} {row['name']}")
    console.print(table)
    if asked.json:
        machine = this_machine.described()
        asked.json.write_text(
            json.dumps({"machine": machine, "context": asked.context, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
