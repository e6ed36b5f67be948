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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp, Message

from benchmarks import this_machine
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.client.protocol import FleetHealth, GenerateRequest, Turn
from deployments.client.timeline import Timeline
from deployments.config.settings import ChatSettings
from deployments.telemetry.garbage import GarbagePauses
from engine.loading.model_directory import demo_model_path
from engine.logprobs import TokenLogprobs
from engine.stream_delta import StreamDelta
from engine.tokenizer import load_tokenizer

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
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
HIDDEN_SIZE = 4096
LONG_ANSWER = 20_000


@dataclass(frozen=True)
class Case:
    """One request. Its body is made when it is first asked for."""

    name: str
    path: str
    made: bytes | Callable[[], bytes]

    @cached_property
    def body(self) -> bytes:
        """The body."""
        return self.made if isinstance(self.made, bytes) else self.made()


def cases(max_bytes: int) -> Iterator[Case]:
    """Yield a request for each endpoint and field, each of nearly `max_bytes`."""

    def case(name: str, path: str, head: str, unit: str, tail: str, separator: str = ",") -> Case:
        room = max_bytes - len(head.encode()) - len(tail.encode()) - 64
        count = room // len((unit + separator).encode())
        return Case(name, path, lambda: (head + separator.join([unit] * count) + tail).encode())

    model = '{"model":"demo",'
    user = '{"role":"user","content":"a"}'
    prompt, chat = model + '"prompt":"a",', model + f'"messages":[{user}],'
    words = "lorem ipsum, dolor: "
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
    assistant = model + '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b",'
    called = assistant + '"tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"'

    for name, unit in (
        ("ids", "12345"), ("small ids", "1"), ("prompts of one id", "[1]"), ("empty lists", "[]"),
        ("objects", "{}"), ("empty texts", '""'), ("short texts", '"abc"'), ("deep lists", "[[[[1]]]]"),
        ("numbers", "1.5"), ("nulls", "null"), ("named values", '{"a":1}'),
    ):  # fmt: skip
        yield case(f"prompt: {name}", COMPLETIONS, model + '"prompt":[', unit, "]}")
        yield case(f"unknown field: {name}", COMPLETIONS, prompt + '"metadata":[', unit, "]}")
    for name, unit in (
        ("words", words), ("one letter", "a"), ("spaces", " "), ("line breaks", "\\n"), ("quotes", '\\"'),
        ("backslashes", "\\\\"), ("emoji", "\U0001f469\u200d"), ("Cyrillic", "слово "), ("escaped", "\\u0436"),
        ("special tokens", "<|im_end|>"), ("commas", ","),
    ):  # fmt: skip
        yield case(f"prompt: {name}", COMPLETIONS, model + '"prompt":"', unit, '"}', "")
        yield case(f"content: {name}", CHAT, model + '"messages":[{"role":"user","content":"', unit, '"}]}', "")
        yield case(f"prompt: {name}", "/tokenize", model + '"prompt":"', unit, '"}', "")
    contexts = ",".join(["[" + ",".join(["1234"] * 65_000) + "]"] * 6)
    for name, fields in (
        ("", '"max_tokens":1'),
        (", echoed", '"echo":true,"max_tokens":0'),
        (", echoed with ids, n=8", '"echo":true,"max_tokens":0,"return_token_ids":true,"n":8'),
    ):
        body = f'{model}"prompt":[{contexts}],{fields}}}'
        yield Case(f"6 prompts of 65,000 ids{name}", COMPLETIONS, body.encode())
    longest = ",".join(["[" + ",".join(["123"] * 131_000) + "]"] * 3)
    yield Case(
        "3 prompts of 131,000 ids, echoed", COMPLETIONS, f'{model}"prompt":[{longest}],"echo":true}}'.encode()
    )
    many = ",".join(["[5,6]"] * 64)
    yield Case("64 prompts, echoed", COMPLETIONS, f'{model}"prompt":[{many}],"echo":true}}'.encode())
    yield Case("64 prompts, 16 answers each", COMPLETIONS, f'{model}"prompt":[{many}],"best_of":16}}'.encode())
    for name, unit, separator in (
        ("messages", user, ","),
        ("messages with parts", '{"role":"user","content":[{"type":"text","text":""}]}', ","),
    ):
        yield case(name, CHAT, model + '"messages":[', unit, "]}", separator)
        yield case(name, "/tokenize", model + '"messages":[', unit, "]}", separator)
        most = ",".join([unit] * 4096)
        yield Case(f"4,096 {name}", CHAT, f'{model}"messages":[{most}]}}'.encode())
        yield Case(f"2,000 {name}", CHAT, f'{model}"messages":[{",".join([unit] * 2000)}]}}'.encode())
        yield Case(f"500 {name}", CHAT, f'{model}"messages":[{",".join([unit] * 500)}]}}'.encode())
    calls = '{"role":"assistant","tool_calls":[' + ",".join([call] * 100) + "]}"
    yield case(
        "parts", CHAT, model + '"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"
    )
    yield case("calls", CHAT, model + '"messages":[{"role":"assistant","tool_calls":[', call, "]}]}")
    yield case("messages of 100 calls", CHAT, model + '"messages":[', calls, "]}")
    yield Case("60 messages of 100 calls", CHAT, f'{model}"messages":[{",".join([calls] * 60)}]}}'.encode())
    yield case("tools", CHAT, chat + '"tools":[', tool, "]}")
    yield case("tools", "/tokenize", chat + '"tools":[', tool, "]}")
    for name, head, tail in (
        ("reasoning", assistant + '"reasoning":"', '"}]}'),
        ("id of a call", assistant + '"tool_calls":[{"id":"',
         '","type":"function","function":{"name":"f","arguments":"{}"}}]}]}'),
        ("arguments: a text", called + '{\\"a\\":\\"', '\\"}"}}]}]}'),
        ("description of a tool", chat + '"tools":[{"type":"function","function":{"name":"f","description":"',
         '"}}]}'),
        ("name", model + '"messages":[{"role":"tool","tool_call_id":"x","content":"a","name":"', '"}]}'),
        ("role", model + '"messages":[{"content":"a","role":"', '"}]}'),
        ("cache_salt", chat + '"cache_salt":"', '"}'),
        ("user", chat + '"user":"', '"}'),
        ("an unknown field's name", '{"', '":1}'),
    ):  # fmt: skip
        yield case(f"{name}: words", CHAT, head, words.replace(",", ""), tail, "")
    for name, unit in (("lists", "[1]"), ("ids", "12345"), ("objects", "{}")):
        yield case(f"arguments: {name}", CHAT, called + '{\\"a\\":[', unit, ']}"}}]}]}')
        yield case(f"schema: {name}", CHAT, chat + _format('{"enum":['), unit, "]}}}}")
        head = chat + '"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":['
        yield case(f"parameters: {name}", CHAT, head, unit, "]}}}]}")
        head = chat + '"structured_outputs":{"json":"{\\"enum\\":['
        yield case(f"structured_outputs.json: {name}", CHAT, head, unit, ']}"}}')
    function = '"strict":true,"parameters":{"type":"object","description":"' + words.replace(":", "") * 3000
    big = [f'{{"type":"function","function":{{"name":"f{number}",{function}"}}}}}}' for number in range(128)]
    yield Case("128 tools of 60 kB, strict", CHAT, f'{chat}"tools":[{",".join(big)}]}}'.encode())
    for name, unit in (("stop", '""'), ("stop_token_ids", "1")):
        yield case(name, COMPLETIONS, f'{prompt}"{name}":[', unit, "]}")
    biases = ",".join(f'"{number:07d}":1' for number in range((max_bytes - 100) // 12))
    yield Case("logit_bias", COMPLETIONS, f'{prompt}"logit_bias":{{{biases}}}}}'.encode())
    yield case("structured_outputs.choice", CHAT, chat + '"structured_outputs":{"choice":[', '"a"', "]}}")
    for name in ("regex", "grammar"):
        yield case(f"structured_outputs.{name}", CHAT, chat + f'"structured_outputs":{{"{name}":"', "a", '"}}', "")
    yield from _anthropic(case)
    yield from _responses(case)
    yield from _pooling(case)
    yield from _conversations(case)
    yield from large_answers()
    for name, unit in (("ids", "1"), ("texts", '""')):
        yield case(f"tokens: {name}", "/detokenize", model + '"tokens":[', unit, "]}")
    ids = ",".join(["1234"] * 131_000)
    yield Case("131,000 tokens", "/detokenize", f'{model}"tokens":[{ids}]}}'.encode())
    for name, unit in (("brackets", "["), ("digits", "9"), ("quotes", '"'), ("backslashes", "\\")):
        yield case(f"not JSON: {name}", COMPLETIONS, model + '"prompt":[', unit, "", "")
    yield case("a number of digits", COMPLETIONS, model + '"prompt":[', "9", "]}", "")
    yield case("a fraction of digits", COMPLETIONS, model + '"prompt":[0.', "9", "]}", "")
    yield case("spaces between", COMPLETIONS, "{", " ", '"model":"demo"}', "")
    yield case("almost JSON", COMPLETIONS, model + '"prompt":"', "a", '"', "")
    yield Case("not UTF-8", COMPLETIONS, b'{"model":"' + b"\xff" * (max_bytes - 100) + b'"}')


def _anthropic(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield requests for Anthropic's API; `case` makes one of many units."""
    head = '{"model":"demo","max_tokens":9,'
    text, use = '{"type":"text","text":""}', '{"type":"tool_use","id":"a","name":"f","input":{"a":[1]}}'
    result = '{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"b"}]}'
    turns = ['{"role":"user","content":"a"}', f'{{"role":"assistant","content":[{text},{use}]}}']
    turns[0] = f'{{"role":"user","content":[{result},{text}]}}'
    tool = '{"name":"f","input_schema":{"type":"object"}}'
    user = head + '"messages":[{"role":"user","content":['
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        yield case("messages of blocks", path, head + '"messages":[', ",".join(turns), "]}")
        yield case("blocks", path, user, text, "]}]}")
        yield case("blocks of a system", path, user + text + ']}],"system":[', text, "]}")
        yield case("tools", path, user + text + ']}],"tools":[', tool, "]}")
        yield case("content: words", path, user + '{"type":"text","text":"', "lorem ipsum: ", '"}]}]}', "")
        for count in (250, 1000, 2048):
            body = f'{head}"messages":[{",".join(turns * count)},{turns[0]}]}}'
            yield Case(f"{2 * count:,} messages of blocks", path, body.encode())
        for name, unit in (("lists", "[1]"), ("objects", "{}")):
            yield case(f"input: {name}", path, user + use[:-5] + "[", unit, "]}}]}]}")
    yield case("content of a result", MESSAGES, user + result[:-2] + ",", text, "]}]}]}")
    yield case("stop_sequences", MESSAGES, user + text + ']}],"stop_sequences":[', '""', "]}")


def _responses(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield requests for the Responses API."""
    head, text = '{"model":"demo",', '{"type":"input_text","text":""}'
    message, call = (
        '{"role":"user","content":"a"}',
        '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}',
    )
    tool = '{"type":"function","name":"f","parameters":{"type":"object"}}'
    for name, unit in (
        ("messages", message),
        ("calls", call),
        ("references", '{"type":"item_reference","id":"a"}'),
    ):
        yield case(f"items: {name}", RESPONSES, head + '"input":[', unit, "]}")
        for count in (500, 4096):
            items = ",".join([unit] * count)
            yield Case(f"{count:,} items: {name}", RESPONSES, f'{head}"input":[{items}]}}'.encode())
    yield case("parts of an item", RESPONSES, head + '"input":[{"role":"user","content":[', text, "]}]}")
    yield case("input: words", RESPONSES, head + '"input":"', "lorem ipsum: ", '"}', "")
    yield case("instructions: words", RESPONSES, head + '"input":"a","instructions":"', "lorem ipsum: ", '"}', "")
    yield case("metadata: words", RESPONSES, head + '"input":"a","metadata":{"a":"', "lorem ipsum: ", '"}}', "")
    yield case("flat tools", RESPONSES, head + '"input":"a","tools":[', tool, "]}")
    for name, unit in (("lists", "[1]"), ("objects", "{}")):
        form = '"input":"a","text":{"format":{"type":"json_schema","name":"x","schema":{"enum":['
        yield case(f"schema of a text: {name}", RESPONSES, head + form, unit, "]}}}}")
        flat = '"input":"a","tools":[{"type":"function","name":"f","parameters":{"enum":['
        yield case(f"parameters of a flat tool: {name}", RESPONSES, head + flat, unit, "]}}]}")


def _pooling(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield requests for embeddings, rankings and scores."""
    head, words = '{"model":"demo",', "lorem ipsum: "
    for name, unit in (
        ("words", f'"{words}"'),
        ("empty texts", '""'),
        ("ids", "5"),
        ("lists of ids", "[5]"),
        ("objects", '{"text":""}'),
    ):
        yield case(f"input: {name}", EMBEDDINGS, head + '"input":[', unit, "]}")
        yield case(f"documents: {name}", RERANK, head + '"query":"a","documents":[', unit, "]}")
        yield case(f"text_2: {name}", SCORE, head + '"text_1":"a","text_2":[', unit, "]}")
    for path, start in (
        (EMBEDDINGS, '"input"'),
        (RERANK, '"documents":["a"],"query"'),
        (SCORE, '"text_2":"a","text_1"'),
    ):
        yield case("one text", path, head + start + ':"', words, '"}', "")
    texts = ",".join([f'"{words * 500}"'] * 1024)
    for path, start in (
        (EMBEDDINGS, '"input"'),
        (RERANK, '"query":"a","documents"'),
        (SCORE, '"text_1":"a","text_2"'),
    ):
        yield Case("1,024 texts", path, f"{head}{start}:[{texts}]}}".encode())


def _conversations(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield requests that keep items."""
    text = '{"type":"input_text","text":""}'
    for name, unit in (("messages", '{"role":"user","content":"a"}'), ("lists", "[1]"), ("ids", "5")):
        yield case(f"items: {name}", CONVERSATIONS, '{"items":[', unit, "]}")
    yield case("parts of an item", CONVERSATIONS, '{"items":[{"role":"user","content":[', text, "]}]}")
    yield case(
        "content: words", CONVERSATIONS, '{"items":[{"role":"user","content":"', "lorem ipsum: ", '"}]}', ""
    )
    yield case("metadata: words", CONVERSATIONS, '{"metadata":{"a":"', "lorem ipsum: ", '"}}', "")


def large_answers() -> Iterator[Case]:
    """Yield requests whose answers are large: of many embeddings, and of `LONG_ANSWER` tokens, each with as many
    alternatives as may be.
    """
    ids = ",".join(["[5,6]"] * 1024)
    for form in ("float", "base64"):
        body = f'{{"model":"demo","input":[{ids}],"encoding_format":"{form}"}}'
        yield Case(f"1,024 embeddings, {form}", EMBEDDINGS, body.encode())
    user = '"messages":[{"role":"user","content":"a"}],"logprobs":true,"top_logprobs":20'
    chat = f'{user},"max_tokens":{LONG_ANSWER}'
    text = f'"prompt":"a","max_tokens":{LONG_ANSWER},"logprobs":5'
    response = f'"input":"a","max_output_tokens":{LONG_ANSWER},"top_logprobs":20'
    for path, fields in ((CHAT, chat), (COMPLETIONS, text), (RESPONSES, response)):
        for way in ("whole", "streamed"):
            body = f'{{"model":"demo",{fields},"stream":{"true" if way == "streamed" else "false"}}}'
            yield Case(f"an answer with log-probabilities, {way}", path, body.encode())


def _format(schema: str) -> str:
    return '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + schema


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
        if sampling.max_tokens != LONG_ANSWER:
            return StreamDelta(self.request_id, [5], finish_reason="length")
        await asyncio.sleep(0)
        ids = [300 + number % 1000 for number in range(LONG_ANSWER // 8)]
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
    return create_app(ApiService({"demo": served}, metrics_text, limits), at_once=True)


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
