"""The failure of an attempt to run a request at a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.client.suspects import Blame
from deployments.wire.messages import RefusalKind
from router.addresses import KVAddress

LossReason = Literal["died", "silent", "failed", "step_failed", "drained", "handed_over"]
"""Why a replica did not finish a request: its process is gone; it does not answer; its engine cannot continue, or
no longer knows the request; the request's step failed; it is being stopped, and another replica resumes the
request with its KV; it was only to compute the prompt."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt did not finish its request: the replica refused the request, or was lost."""

    kind: RefusalKind | Literal["lost", "absent"]
    """"absent": there was no replica to send it to, so none was lost."""
    reason: str
    replica: str | None = None
    retry_after_s: float = 1.0
    """Seconds after which a retry is worthwhile when the queue was full."""
    loss: LossReason | None = None
    blame: Blame | None = None
    """Whether the request has ended the replica; None if the replica lives, or others are suspected."""
    kv: KVAddress | None = None
    """Where the next replica can fetch the KV that this one has computed."""
