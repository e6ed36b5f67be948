"""Ray Serve LLM as its documentation starts it: `python -m benchmarks.peers.rayllm SETTINGS PORT`, until a signal.

Its engine is vLLM's CPU build. Runs in an environment of its own (`benchmarks/peers/install.sh`), without Raydix.
"""

from __future__ import annotations

import json
import signal
import sys

from benchmarks.peers.protocol import Settings
from benchmarks.peers.vllm import kv_bytes


def serve(settings: Settings, port: int) -> None:
    """Serve one replica of the model behind Serve's HTTP proxy."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init(include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = LLMConfig(
        model_loading_config={"model_id": "model", "model_source": settings.model},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 0.5}]},
        engine_kwargs={
            "dtype": settings.precision,
            "max_model_len": settings.max_len,
            "kv_cache_memory_bytes": kv_bytes(settings),
        },
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    serve(Settings(**json.loads(sys.argv[1])), int(sys.argv[2]))
