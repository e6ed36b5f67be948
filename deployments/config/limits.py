"""Bounds of a single HTTP request. Each is a field with its unit, and can be set in the YAML.

If the engine has its own bound (`engine.values.sampling_params`), a limit can be below it, but not above.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from deployments.config.section import Section
from engine.values import sampling_params as engine_bounds

MIB = 2**20


UnknownFields = Literal["refuse", "warn", "ignore"]


class Limits(Section):
    """Bounds on requests; each is checked before the work it bounds."""

    # Work larger than these runs in a thread, so that no stream waits for it; smaller work is not worth a switch
    # of threads. They are constants, not settings.
    inline_text_chars: ClassVar[int] = 8192
    """Characters of a text to tokenize; of a conversation, those that are not in the token cache."""
    inline_logprobs: ClassVar[int] = 2048
    """Log-probabilities of an answer to encode."""
    inline_body_bytes: ClassVar[int] = 256 * 1024
    """Bytes of a body to parse, and of a conversation to render."""
    inline_json_values: ClassVar[int] = 16_384
    """Values of a body to parse. Commas, colons and brackets in texts count too."""

    max_body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Largest request body, in bytes, packed and unpacked; a larger one is refused with 413 while it is read."""
    max_total_body_bytes: int = Field(default=64 * MIB, ge=4096)
    """Bytes of all bodies that an ingress reads and works on concurrently, each value in them counted as 8 more;
    beyond it a request gets a 429. At least 4 times `max_body_bytes`. Each tenant may use half; where there are
    none, each address three quarters."""
    max_json_values: int = Field(default=400_000, ge=1024)
    """Most values in a body, and in all arguments of its tool calls, counted before any is made. A value with a
    name counts 5 more, an array or object 10."""
    max_json_depth: int = Field(default=64, ge=8)
    """Deepest nesting of arrays and objects in a body."""
    unknown_fields: UnknownFields = "warn"
    """Treatment of fields that this server does not know, and of tools and images that it cannot use: a 400
    ("refuse"), omitted and named in the header x-raydix-ignored-fields and the request's log line ("warn"), or
    omitted."""
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Most bytes of a request outside its body: request line, headers, chunk extensions and trailers."""
    max_headers: int = Field(default=100, ge=10)
    """Most headers of a request."""
    max_choices: int = Field(default=128, ge=1)
    """Largest `n`, the number of choices per prompt."""
    max_answers: int = Field(default=1024, ge=1)
    """Most answers that one request generates: its prompts times `n` or `best_of`."""
    max_best_of: int = Field(default=16, ge=1)
    """Largest `best_of`, the number of answers generated per prompt, of which `n` are returned."""
    max_beam_width: int = Field(default=8, ge=1, le=engine_bounds.MAX_BEAM_WIDTH)
    """Most beams of a beam search, which its `best_of` or `n` asks for."""
    max_prompts: int = Field(default=64, ge=1)
    """Most prompts in one completions request."""
    max_inputs: int = Field(default=1024, ge=1)
    """Most inputs of an embeddings request, documents to rerank, and pairs to score."""
    max_messages: int = Field(default=4096, ge=1)
    """Most messages in one conversation."""
    max_content_parts: int = Field(default=256, ge=1)
    """Most text parts in one message."""
    max_tools: int = Field(default=128, ge=0)
    """Most tools of a request, and most tool calls of one message."""
    max_stop_strings: int = Field(default=engine_bounds.MAX_STOP_STRINGS, ge=0, le=engine_bounds.MAX_STOP_STRINGS)
    """Most strings in `stop`."""
    max_stop_string_chars: int = Field(
        default=engine_bounds.MAX_STOP_STRING_CHARS, ge=1, le=engine_bounds.MAX_STOP_STRING_CHARS
    )
    """Most characters of one stop string."""
    max_stop_token_ids: int = Field(
        default=engine_bounds.MAX_STOP_TOKEN_IDS, ge=0, le=engine_bounds.MAX_STOP_TOKEN_IDS
    )
    """Most ids in `stop_token_ids`."""
    max_logit_bias: int = Field(default=engine_bounds.MAX_LOGIT_BIAS, ge=0, le=engine_bounds.MAX_LOGIT_BIAS)
    """Most entries in `logit_bias`."""
    max_top_logprobs: int = Field(default=engine_bounds.MAX_LOGPROBS, ge=0, le=engine_bounds.MAX_LOGPROBS)
    """Largest `top_logprobs` of a chat completion."""
    max_completion_logprobs: int = Field(default=5, ge=0, le=engine_bounds.MAX_LOGPROBS)
    """Largest `logprobs` of a completion."""
    max_prompt_logprobs: int = Field(default=5, ge=0, le=engine_bounds.MAX_LOGPROBS)
    """Largest `prompt_logprobs`."""
    max_prompt_logprob_entries: int = Field(default=200_000, ge=0)
    """Most log-probabilities of prompt tokens in one answer, also echoed: tokens x (alternatives + 1) x `n`."""
    max_priority: int = Field(default=100, ge=0)
    """Largest `priority`; the smallest is its negative."""
    max_truncated_tokens: int = Field(default=1_000_000, ge=1)
    """Most tokens of a prompt that `truncate_prompt_tokens` is to shorten."""
    max_template_bytes: int = Field(default=256 * 1024, ge=2)
    """Most bytes of `chat_template_kwargs` and `documents`, as JSON."""
    max_hint_chars: int = Field(default=256, ge=1)
    """Most characters of a session id, a cache salt or a prompt cache key."""
    max_grammar_bytes: int = Field(default=64 * 1024, ge=1)
    """Largest JSON schema, regular expression, list of choices or grammar, in bytes."""
    closed_objects: bool = True
    """Whether objects of a JSON schema that does not say so (`additionalProperties`) have only its properties."""
    max_schema_depth: int = Field(default=32, ge=1)
    """Deepest nesting of objects and arrays in a JSON schema."""
    max_regex_chars: int = Field(default=2048, ge=1)
    """Most characters of a regular expression."""
    max_grammar_choices: int = Field(default=1000, ge=1)
    """Most entries in `structured_outputs.choice`."""
    grammar_compile_s: float = Field(default=2.0, gt=0)
    """Seconds of processor time that compiling a grammar may take; then its process is killed."""
    grammar_compile_bytes: int = Field(default=512 * MIB, ge=16 * MIB)
    """Bytes of memory that compiling a grammar may take, besides the tokenizer's."""
    grammar_processes: int = Field(default=2, ge=1)
    """Processes that compile grammars, for each ingress and model; they start with the first grammar."""
    grammar_processes_per_tenant: int = Field(default=1, ge=1)
    """Most of these processes that compile grammars of one tenant at a time; its others wait."""
    max_waiting_grammars: int = Field(default=64, ge=1)
    """Most grammars that are being compiled or wait for it; more are refused with 429."""
    known_grammar_bytes: int = Field(default=2 * MIB, ge=0)
    """Bytes in which an ingress remembers, for each model, which grammars can be used: some 500 for each."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a client may take to send its body."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds from a request's arrival to the end of its answer."""
    idle_timeout_s: float = Field(default=300.0, gt=0)
    """Most seconds between two events of a generation, and before the first."""
    slow_reader_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which a client may read too little of what waits for it; then its connection is ended."""
    slow_reader_min_bytes_per_s: float = Field(default=240.0, ge=0)
    """Bytes per second that a client must read in that time, as long as anything waits for it; 0: a single byte in
    all of it is enough."""
    max_unread_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Bytes of answers that an ingress holds while clients read them, but for those of up to 16 KiB; what finds no
    room gets a 429. Each tenant may use half; where there are none, each address three quarters."""
    max_chunks_per_s: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Most chunks that all streams of an ingress write per second; faster tokens share chunks. "auto": 1,000
    for each core of its machine, at most 8,000; a quarter of that through Serve's proxy. None: no bound."""
    token_cache_bytes: int = Field(default=64 * MIB, ge=0)
    """Bytes of conversations that an ingress keeps with their token ids, for each model; 0 keeps none."""
    prepare_threads: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Threads that parse, render and tokenize large requests; a single tenant gets all but one. "auto": one more
    than the machine's cores, at most 5."""

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ValueError(
                f"max_total_body_bytes ({self.max_total_body_bytes}) must be at least 4 times max_body_bytes "
                f"({self.max_body_bytes}), or the largest bodies would never be accepted; raise the first or "
                "lower the second"
            )
        return self
