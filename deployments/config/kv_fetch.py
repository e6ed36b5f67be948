"""The setting `engines.kv_fetch`: how engine replicas fetch KV from each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.config.section import Section


class KvFetchSettings(Section):
    """KV that a replica fetches from another; see `deployments/replica/kv_fetch/`. Needs `engine.host_kv_gib`."""

    transport: Literal["zmq", "nixl"] = "zmq"
    """How pages go: "zmq", encrypted over the wire's sockets, or "nixl", read in the other's memory by NIXL, for
    RDMA; needs the extra `nixl` where the replicas run. A replica without it is fetched from as with "zmq"."""
    max_transfers: int = Field(default=8, ge=1)
    """Most concurrent transfers that a replica requests from another, and most that it sends; it declines further
    ones, whose prompts are computed."""
    window_mib: float = Field(default=8.0, gt=0, le=1024)
    """MiB of pages in transit per transfer."""
    silence_s: float = Field(default=2.0, gt=0)
    """Seconds without a page after which either end gives a transfer up."""
    retry_s: float = Field(default=10.0, ge=0)
    """Seconds for which nothing is fetched from a replica that fell silent."""
    expected_mib_per_s: float = Field(default=200.0, gt=0)
    """Rate by which routers judge a fetch until a replica has measured its own."""
    keep_tokens: int = Field(default=65_536, ge=0)
    """Most tokens of shared prefixes that others fetch from a replica that is being stopped, if no other holds
    them; 0: none."""
    linger_s: float = Field(default=1.0, ge=0)
    """Seconds for which a replica that is being stopped stays after its last stream and transfer, so that others
    can fetch these prefixes; 0: it stops immediately."""
