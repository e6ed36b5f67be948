"""`raydix generate`: run one prompt through the offline engine, without Ray and without a server."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from deployments.cli.errors import UserError, one_line
from engine.model_files.model_directory import resolve_model

if TYPE_CHECKING:
    from engine import RequestOutput


def run(
    model: str,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    *,
    as_chat: bool,
    dtype: str,
    page_size: int,
) -> None:
    """Print the generated text to standard output, and token counts and time to standard error."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty: give at least one character", 2)
    console = Console(stderr=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with console.status(f"Loading {escape(model)}"):
        try:
            resolve_model(model)  # report a misspelt name before importing torch
            from engine import LLM, SamplingParams

            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            llm = LLM(model, dtype=dtype, page_size=page_size)
        except ValueError as error:  # ModelLoadError and InvalidSamplingParams are among them
            raise UserError(one_line(error)) from None
    if as_chat and not getattr(llm.tokenizer, "chat_template", None):
        raise UserError(f"{model} has no chat template: leave out --chat")
    started = time.perf_counter()
    try:
        if as_chat:
            [output] = llm.chat([{"role": "user", "content": text}], params, progress=False)
        else:
            [output] = llm.generate([text], params, progress=False)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    _report(output, time.perf_counter() - started, console)


def _report(output: RequestOutput, seconds: float, console: Console) -> None:
    if output.error is not None:
        raise UserError(output.error)
    print(output.text)
    count = len(output.token_ids)
    console.print(
        f"[dim]{len(output.prompt_ids)} prompt tokens, {count} generated in {seconds:.2f} s "
        f"({count / seconds:.0f} tokens/s), ended by {output.finish_reason}[/]"
    )
