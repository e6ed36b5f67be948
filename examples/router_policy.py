"""A router policy of your own: the replica that would have computed the prompt first.

Compare it with the default on recorded traffic, from the folder that holds `examples`:

    raydix simulate TRACE --replicas 4 --policy cost,examples.router_policy:MyPolicy

Then serve with it: `policy: examples.router_policy:MyPolicy` below `router` in the YAML. docs/routing.md says what
a policy knows of the prompt and the replicas, and what is expected of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.cost import Candidate, RouteQuery
from router.policies import Decision, Split


class MyPolicy:
    """Orders the replicas by the seconds until they would have computed the prompt."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Ties are broken by chance: ingresses that decide at the same moment should not all choose the first."""

        def seconds(replica: Candidate) -> float:
            uncached = query.num_tokens - query.overlap.get(replica.replica, 0)
            return (replica.queued_prefill_tokens + uncached) / replica.prefill_rate

        split = Split(replicas)  # With any policy, replicas that cannot serve now come last.
        order = [
            replica.replica for replica in sorted(split.serving, key=lambda each: (seconds(each), rng.random()))
        ]
        return split.decision(order, "rule", "my_policy", query)
