"""A Serve application with one replica that does nothing, beside which `benchmarks.startup` measures."""

from __future__ import annotations

from ray import serve


class Empty:
    """Answers every request with the same word."""

    async def __call__(self) -> str:
        return "here"


app = serve.deployment(Empty, ray_actor_options={"num_cpus": 0.25}).bind()
