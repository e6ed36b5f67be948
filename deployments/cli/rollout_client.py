"""The client of `raydix rollout`: asks a server for its rollouts, gives it orders, and words its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from deployments.cli.errors import UserError
from deployments.cli.loose_json import number, text
from deployments.cli.printable import printable
from deployments.cli.unreachable import unreachable

_PATH = "/v1/cluster/rollouts"
_TIMEOUT_S = 10.0


def ask(method: str, url: str, path: str, key: str | None) -> dict[str, Any]:
    """Return the server's answer. Raises UserError."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    server = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.request(method, f"{server}{_PATH}{path}", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.InvalidURL, ValueError):
        raise UserError(f"{url!r} is not a URL", 2) from None
    except httpx.HTTPError as error:
        raise UserError(unreachable(server, error)) from None
    try:
        document = answer.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and answer.is_success:
        return document
    error_object = document.get("error") if isinstance(document, dict) else None
    said = text(error_object.get("message")) if isinstance(error_object, dict) else None
    raise UserError(f"{server}: {printable(said) if said else f'HTTP {answer.status_code}'}")


def described(model: Mapping[str, Any]) -> list[str]:
    """Return a model's versions and its rollout as lines for a terminal. Raises UserError."""
    try:
        return [printable(line) for line in _lines(model)]
    except (AttributeError, TypeError, ValueError):
        raise UserError("the server's answer cannot be read; is it a Raydix server of this version?") from None


def _lines(model: Mapping[str, Any]) -> Iterator[str]:
    weights = model.get("weights")
    shares = (
        [f"{name} {_percent(weight)}" for name, weight in weights.items()] if isinstance(weights, dict) else []
    )
    yield f"{model.get('model')}: {', '.join(shares)}"
    rollout = model.get("rollout")
    if not isinstance(rollout, dict):
        return
    steps = rollout.get("steps") or []
    parts = [
        f"rollout of {rollout.get('version')}: {rollout.get('state')}, step {rollout.get('step')} of {len(steps)}"
    ]
    if (held := number(rollout.get("held_s"))) is not None:
        parts.append(f"held {held:.0f} of {rollout.get('hold_s'):g} s, {rollout.get('num_requests')} requests")
    yield f"  {', '.join(parts)}"
    measured, limits = rollout.get("measured") or {}, rollout.get("limits") or {}
    for name, value in measured.items():
        limit = limits.get(name)
        most = "no limit" if limit is None else f"at most {limit:g}"
        yield f"  {name}: {'-' if value is None else f'{value:.4g}'} ({most})"
    if reason := text(rollout.get("reason")):
        yield f"  {reason}"


def _percent(weight: object) -> str:
    share = number(weight)
    return "-" if share is None else f"{share * 100:g} %"
