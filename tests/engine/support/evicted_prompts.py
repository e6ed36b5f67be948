"""Prompts that push each other from the device, which has room for two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.support.script import Script

A, B, C, D = (range(start, start + 41) for start in (1, 100, 200, 300))
"""Prompts that take 11 pages of 4 tokens each; the engines have 24 pages."""


def made(engine: Callable[..., Script], **options: Any) -> Script:
    return engine(**{"num_pages": 24, "host_pages": 40, "limits": {"max_running": 2}, **options})


def ask(script: Script, prompt: range | list[int], **options: Any) -> str:
    name = script.arrive(prompt, **{"max_tokens": 2, **options})
    script.run()
    return name


def evict(script: Script, *prompts: range) -> None:
    """Have the device give its pages to others."""
    for prompt in prompts or (B, C, D):
        ask(script, prompt)
