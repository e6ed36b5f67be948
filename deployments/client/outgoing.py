"""The message that sends a request to a replica."""

from __future__ import annotations

from deployments.client.protocol import GenerateRequest
from deployments.wire.messages import Generate, KVOrigin, Trial, pack_tokens
from router.addresses import KVAddress

TURN_TOKENS = 131_072
"""Tokens that are sent to engines in one turn of the event loop, which takes some 10 ms."""
_REQUEST_TOKENS = 4096
"""Tokens that take as long to send as the fixed cost of a request."""


def sending_cost(num_tokens: int) -> int:
    """Return the cost of sending a request, in tokens."""
    return _REQUEST_TOKENS + num_tokens


def message_of(
    request: GenerateRequest, number: int, *, trial: Trial | None = None, origin: KVOrigin | None = None
) -> Generate:
    """Return the message that sends a request as the `number`th of this process to a replica.

    Raises OverflowError when a token id does not fit into 32 bits.
    """
    return Generate(
        number,
        request.request_id,
        pack_tokens(request.prompt_ids),
        request.sampling,
        pack_tokens(request.output_ids),
        request.num_prompt_reported,
        request.priority,
        request.salt,
        request.sharer,
        trial,
        origin,
        request.is_deferrable,
        request.stream,
    )


def origin_of(address: KVAddress, num_tokens: int) -> KVOrigin:
    """Return the source of KV for a request's first tokens, in the form sent to a replica."""
    return KVOrigin(address.endpoint, address.secret, address.public_key, num_tokens)
