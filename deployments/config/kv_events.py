"""The setting `engines.kv_events`: where engine replicas publish which blocks of KV they hold, for other
programs."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from deployments.config.section import Section

_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.]+\]|[^\s/:\[\]*]+):(?P<port>\d{1,5})")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


def check_event_endpoint(endpoint: str) -> str:
    """Return an address to listen on. Raises ValueError."""
    if endpoint.startswith("ipc:///"):
        if "{replica}" not in endpoint:
            raise ValueError(
                f"{endpoint!r} would be the same file for every replica: put {{replica}} into its name, "
                "as in ipc:///tmp/kv-{replica}"
            )
        return endpoint
    found = _TCP.fullmatch(endpoint)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(
            f"{endpoint!r} is not an address to listen on: give tcp://ADDRESS:PORT, where * is every address of "
            "the machine, or ipc:///PATH with {replica} in it"
        )
    return endpoint


def check_event_topic(topic: str) -> str:
    """Return a topic whose placeholders are known. Raises ValueError."""
    unknown = set(_PLACEHOLDER.findall(topic)) - {"replica", "host", "model"}
    if unknown:
        raise ValueError(f"{topic!r} has the unknown placeholders {sorted(unknown)}: use replica, host or model")
    return topic


EventEndpoint = Annotated[str, AfterValidator(check_event_endpoint)]


class KvEventSettings(Section):
    """Events of the KV cache in vLLM's format, for routers of others; see `deployments/replica/kv_events.py`."""

    endpoint: EventEndpoint = "tcp://127.0.0.1:5557"
    """Where each replica publishes (ZeroMQ, PUB). Any client that reaches it can read prompts: see
    docs/security.md."""
    replay_endpoint: EventEndpoint | None = None
    """Where it sends events again that a subscriber missed (ROUTER). None: nowhere."""
    num_ports: int = Field(default=16, ge=1)
    """Ports from those of the endpoints on: each replica of a machine takes the first that are free, of both
    the same."""
    topic: Annotated[str, AfterValidator(check_event_topic)] = ""
    """First part of each message, with {replica}, {host} and {model} replaced; llm-d wants kv@{host}@{model}."""
    encoding: Literal["array", "map"] = "array"
    """Whether an event is an array, as in vLLM to 0.23, or a map of names, as in later ones. Dynamo and llm-d read
    both."""
    hwm: int = Field(default=1000, ge=1)
    """Messages that wait for a slow subscriber; it misses further ones."""
    include_tenants: bool = False
    """Whether prefixes with a salt are published too, with a digest of it: those of isolated tenants and of
    requests with a cache_salt."""

    @model_validator(mode="after")
    def _ports_are_enough(self) -> Self:
        first, second = (_port(endpoint) for endpoint in (self.endpoint, self.replay_endpoint))
        for name, port in (("endpoint", first), ("replay_endpoint", second)):
            if port is not None and port + self.num_ports - 1 > 65535:
                raise ValueError(
                    f"num_ports is {self.num_ports}, but {name} leaves {65536 - port} ports: choose a lower port"
                )
        if first is not None and second is not None and abs(first - second) < self.num_ports:
            raise ValueError(
                f"endpoint and replay_endpoint are {abs(first - second)} ports apart, but each uses num_ports "
                f"({self.num_ports}) ports: move one, for example to port {max(first, second) + self.num_ports}, "
                "or lower num_ports to the number of replicas on a machine"
            )
        return self


def _port(endpoint: str | None) -> int | None:
    found = _TCP.fullmatch(endpoint or "")
    return int(found["port"]) if found is not None else None
