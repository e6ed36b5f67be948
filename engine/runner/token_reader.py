"""Copies sampled tokens to the host without stalling the device."""

from __future__ import annotations

import time

import torch

# Seconds between two checks whether a GPU is done.
_POLL_SECONDS = 0.0002


class TokenReader:
    """Copies tokens from a GPU on a separate stream into pinned memory; the host waits only for that copy."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU nothing has to be copied."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, tokens: torch.Tensor) -> TokensUnderway:
        """Begin to copy int64 [R] tokens, which the current stream computes."""
        if self._stream is None:
            return TokensUnderway(tokens, None)
        self._stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(self._stream):
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            on_host.copy_(tokens, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        tokens.record_stream(self._stream)
        return TokensUnderway(on_host, there)


class TokensUnderway:
    """Tokens that are being copied."""

    def __init__(self, on_host: torch.Tensor, there: torch.cuda.Event | None) -> None:
        self._on_host, self._there = on_host, there
        self._tokens: list[int] | None = None

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the tokens; returns whether they are there."""
        ends_at = time.monotonic() + seconds
        while self._there is not None and not self._there.query():
            left = ends_at - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL_SECONDS))
        return True

    def wait(self) -> list[int]:
        """Wait for the tokens and return them, in any thread."""
        if self._tokens is None:
            if self._there is not None:
                self._there.synchronize()
            self._tokens = self._on_host.tolist()
        return self._tokens
