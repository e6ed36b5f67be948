"""Prefill and decode apart: the roles of replicas, and the prompts worth sending from one to the other."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roles:
    """The first `prefill` replicas compute long prompts, the next `decode` ones the answers and short prompts."""

    prefill: int
    decode: int
    apart_above_tokens: int = 2048
    """A prompt is computed apart if more of its tokens than this are cached on no replica that decodes."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"roles need at least 1 replica for each side, got prefill: {self.prefill}, decode: "
                    f"{self.decode}; leave roles out for replicas that do both"
                )
        if self.apart_above_tokens < 0:
            raise ValueError(f"apart_above_tokens must be at least 0, got {self.apart_above_tokens}")

    def check(self, num_replicas: int, has_links: bool) -> None:
        """Raise ValueError if the roles do not fit the fleet."""
        if self.prefill + self.decode != num_replicas:
            raise ValueError(
                f"roles for {self.prefill} + {self.decode} replicas, but the fleet has {num_replicas}: name all"
            )
        if not has_links:
            raise ValueError("roles send KV from replica to replica: set peer_bandwidth")

    @classmethod
    def parse(cls, text: str, apart_above_tokens: int = 2048) -> Roles:
        """Read "prefill=P,decode=D". Raises ValueError for anything else."""
        found = re.fullmatch(r"prefill=(\d+),decode=(\d+)", text.replace(" ", ""))
        if found is None:
            raise ValueError(f"roles are prefill=P,decode=D, such as prefill=10,decode=6; got {text!r}")
        return cls(int(found[1]), int(found[2]), apart_above_tokens)
