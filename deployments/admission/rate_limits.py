"""Rate limits of each tenant: requests and tokens per minute as token buckets, and concurrent generations.

    start ── a request ─▶ admit ── its prompts, its generations ─▶ generated, generated, ... ─▶ close

A request counts as 1 before its body is read, and as its generations once it is known: with several prompts, n or
best_of it costs the same as so many requests. A prompt is charged when it is admitted; both are refunded when the
request is refused. Generated tokens are charged as they arrive, which may leave a debt that the next request must
wait for. A request larger than a whole bucket needs a full one. Time is an argument.

Limits hold per process: each of several ingresses enforces an equal share, which changes as they come and go. The
levels of the buckets, and debts, then stay the same. A new ingress begins with full buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from deployments.config.tenants import Tenant

LimitKind = Literal["requests_per_minute", "tokens_per_minute", "max_concurrency"]
BUSY_RETRY_S = 1.0
"""Retry-After at the concurrency limit, in seconds: the end of a generation cannot be predicted."""


class RateLimited(Exception):
    """A tenant's rate limit is reached. HTTP 429."""

    def __init__(self, kind: LimitKind, message: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers
        """x-ratelimit-*: the state of each limit."""


class Bucket:
    """A token bucket that holds at most a minute's worth and is refilled evenly. It may be in debt."""

    def __init__(self, per_minute: float, now: float) -> None:
        """The bucket holds at least 1, so that single requests remain possible."""
        self.capacity = max(per_minute, 1.0)
        self._per_second = per_minute / 60
        self._level, self._at = self.capacity, now

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate and the capacity. The level, or debt, stays the same."""
        level, before = self.level(now), self.capacity
        self.capacity, self._per_second = max(per_minute, 1.0), per_minute / 60
        self._level = level * self.capacity / before if level > 0 else level

    def level(self, now: float) -> float:
        """Return the amount that can be taken; negative in debt."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(now, self._at)
        return self._level

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until `amount`, or a full bucket if that is less, can be taken; 0 when it can."""
        missing = min(amount, self.capacity) - self.level(now)
        # Less than a millionth is a rounding error.
        return missing / self._per_second if missing > 1e-6 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take an amount, going into debt if necessary; a negative amount is a refund."""
        self._level = min(self.capacity, self.level(now) - amount)


class TenantLimits:
    """One tenant's limits and their use in this process."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float], num_shares: int = 1) -> None:
        """This process enforces one of `num_shares` equal shares of each limit."""
        self._clock = clock
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.num_open = 0
        """Number of generations that have not ended."""
        self.enforce(tenant, num_shares)

    def enforce(self, tenant: Tenant, num_shares: int) -> None:
        """Enforce one of `num_shares` equal shares of a tenant's limits from now on."""
        self.tenant, self._num_shares, now = tenant, num_shares, self._clock()
        self.requests = _resized(self.requests, tenant.requests_per_minute, num_shares, now)
        self.tokens = _resized(self.tokens, tenant.tokens_per_minute, num_shares, now)

    def divide(self, num_shares: int) -> None:
        """Enforce one of `num_shares` equal shares from now on."""
        self.enforce(self.tenant, num_shares)

    @property
    def max_concurrency(self) -> int | None:
        """Most concurrent generations in this process, at least 1. None: no limit."""
        most = self.tenant.max_concurrency
        return None if most is None else math.ceil(most / self._num_shares)

    def start(self, *, is_charged: bool = True) -> Ticket:
        """Charge a request before its body is read, and return its ticket. Raises RateLimited.

        One that continues a stream is charged later, unless that still runs.
        """
        now = self._clock()
        if is_charged:
            self.check_tokens(1, now)  # a tenant in debt is refused before its body is read
        self.check_concurrency(1)
        if is_charged:
            self.charge_request(now)
        return Ticket(self, self._clock, is_charged=is_charged)

    def charge_request(self, now: float) -> None:
        """Charge one request. Raises RateLimited."""
        if self.requests is not None:
            wait = self.requests.seconds_until(1, now)
            if wait:
                limit = f"{self.tenant.requests_per_minute:g} requests per minute"
                message = f"{limit}; the next is possible in {wait:.3g} s"
                raise self._limited("requests_per_minute", message, wait)
            self.requests.take(1, now)

    def check_generations(self, count: int, now: float) -> None:
        """Raise RateLimited when a request, which was charged as 1, must wait because it counts as `count`."""
        if self.requests is None:
            return
        self.requests.take(-1, now)
        has_to_wait = self.requests.seconds_until(count, now) > 0
        self.requests.take(1, now)
        if has_to_wait:
            wait = self.requests.seconds_until(count, now)
            limit = f"{self.tenant.requests_per_minute:g} requests per minute"
            message = (
                f"{limit}, and this one counts as {count}, one for each answer; it is possible in {wait:.3g} s"
            )
            raise self._limited("requests_per_minute", message, wait)

    def check_tokens(self, amount: int, now: float) -> None:
        """Raise RateLimited when a prompt of `amount` tokens must wait."""
        wait = self.tokens.seconds_until(amount, now) if self.tokens is not None else 0.0
        if wait:
            limit = f"{self.tenant.tokens_per_minute:g} tokens per minute"
            message = f"{limit}; this request is possible in {wait:.3g} s"
            raise self._limited("tokens_per_minute", message, wait)

    def check_concurrency(self, count: int) -> None:
        """Raise RateLimited when `count` more generations are too many; a single request may exceed the share."""
        most = self.max_concurrency
        if most is not None and self.num_open and self.num_open + count > most:
            message = f"{most} generations at once here, and {self.num_open} are open; wait until some have ended"
            raise self._limited("max_concurrency", message, BUSY_RETRY_S)

    def headers(self) -> dict[str, str]:
        """Return the state of each limit in this process, in the headers of OpenAI's API."""
        now = self._clock()
        headers = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(math.floor(bucket.capacity))
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now) + 1e-6)))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.seconds_until(bucket.capacity, now))
        return headers

    def _limited(self, kind: LimitKind, message: str, wait: float) -> RateLimited:
        whole = f"Rate limit reached for the tenant {self.tenant.name!r}: {message} (tenants[].{kind})."
        return RateLimited(kind, whole, wait, self.headers())


class Ticket:
    """One request's use of its tenant's limits."""

    def __init__(self, limits: TenantLimits, clock: Callable[[], float], *, is_charged: bool = True) -> None:
        """`is_charged`: whether the request has been charged."""
        self._limits, self._clock, self._is_charged = limits, clock, is_charged
        self._prompt_tokens = self._num_more = 0
        self._num_open = 0

    def admit(self, num_generations: int, prompt_tokens: int, *, is_charged: bool = True) -> None:
        """Charge a valid request's prompt and generations. Raises RateLimited, or ValueError if it never fits.

        Does nothing the second time: a response in the background is admitted before it is begun. Generations that
        run already, and were charged when they began, are only counted as open.
        """
        if self._num_open:
            return
        most = self._limits.tenant.max_concurrency
        if most is not None and num_generations > most:
            raise ValueError(
                f"the request needs {num_generations} concurrent choices, but this tenant may have {most} "
                "(tenants[].max_concurrency)"
            )
        now = self._clock()
        self._limits.check_concurrency(num_generations)
        if is_charged:
            if not self._is_charged:
                self._limits.charge_request(now)
                self._is_charged = True
            self._limits.check_tokens(prompt_tokens, now)
            self._limits.check_generations(num_generations, now)
        self._prompt_tokens, self._num_open = prompt_tokens, num_generations
        self._num_more = max(0, num_generations - 1) if is_charged else 0
        self._limits.num_open += num_generations
        self._take(prompt_tokens, self._num_more)

    def generated(self, count: int) -> None:
        """Charge generated tokens."""
        self._take(count)

    def refuse(self) -> None:
        """Refund the prompt and the generations of a refused request, which still counts as one. Idempotent."""
        self._take(-self._prompt_tokens, -self._num_more)
        self._prompt_tokens = self._num_more = 0

    def close(self) -> None:
        """Release the request's generations. Idempotent."""
        self._limits.num_open -= self._num_open
        self._num_open = 0

    def headers(self) -> dict[str, str]:
        """Return the state of the tenant's limits as headers."""
        return self._limits.headers()

    def _take(self, tokens: int, requests: int = 0) -> None:
        if self._limits.tokens is not None:
            self._limits.tokens.take(tokens, self._clock())
        if requests and self._limits.requests is not None:
            self._limits.requests.take(requests, self._clock())


def _resized(bucket: Bucket | None, per_minute: float | None, num_shares: int, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute / num_shares, now)
    bucket.resize(per_minute / num_shares, now)
    return bucket


def _duration(seconds: float) -> str:
    """Format seconds as OpenAI does: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:g}s"
