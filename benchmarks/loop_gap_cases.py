"""The requests of `loop_gaps.py`: each is as large as a body may be, and made of one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
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
    # Special tokens are not part of the text, so no few of them tell how the text of a prompt ends.
    special = ",".join(["[" + ",".join(["0"] * 131_000) + "]"] * 3)
    yield Case(
        "3 prompts of 131,000 special ids, n=16", COMPLETIONS, f'{model}"prompt":[{special}],"n":16}}'.encode()
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
