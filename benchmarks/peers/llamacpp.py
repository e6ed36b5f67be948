"""llama.cpp's own server, in a process of its own, driven over HTTP with as many connections as requests."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Engine, Job, Precision, Settings, serve

_HOME = Path(sys.prefix)
_CONVERTER = """
import sys
sys.path[:0] = [sys.argv.pop(1)]
import convert_hf_to_gguf as converter
from conversion.base import TextModel
# It knows published tokenizers by what they make of a text; ours splits text as GPT-2's does.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
converter.main()
"""


def converted(model: str, precision: Precision) -> Path:
    """The checkpoint as a GGUF file, beside it; made on the first call by llama.cpp's own converter.

    A GGUF file is taken as it is.
    """
    if model.endswith(".gguf"):
        return Path(model)
    made = Path(f"{model}.{precision}.gguf")
    if not made.exists():
        kind = {"bfloat16": "bf16", "float32": "f32"}[precision]
        unfinished = made.with_suffix(".unfinished")
        arguments = [str(_HOME / "source"), model, "--outfile", str(unfinished), "--outtype", kind]
        subprocess.run([sys.executable, "-c", _CONVERTER, *arguments], check=True)
        unfinished.rename(made)
    return made


class LlamaCpp:
    """As it ships, with a slot for each request; KV in 16 bits, as is its default, or in 32."""

    def __init__(self, settings: Settings) -> None:
        binary, file = _HOME / "build" / "bin" / "llama-server", converted(settings.model, settings.precision)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        kv = "f16" if settings.precision == "bfloat16" else "f32"
        context, threads = settings.max_requests * settings.max_len, str(settings.threads)
        options = [
            "--host",
            "127.0.0.1",
            "--port",
            self._port,
            "--parallel",
            settings.max_requests,
            "--ctx-size",
            context,
        ]
        options += ["--threads", threads, "--threads-batch", threads, "--cache-type-k", kv, "--cache-type-v", kv]
        self._server = subprocess.Popen([binary, "--model", file, *map(str, options)])
        self.version = _version(binary)
        self._clients = ThreadPoolExecutor(settings.max_requests)
        self._wait()

    def generate(self, job: Job) -> list[list[int]]:
        bodies = [
            {
                "prompt": prompt,
                "n_predict": count,
                "ignore_eos": True,
                "temperature": 0,
                "cache_prompt": True,
                "return_tokens": True,
            }
            for prompt, count in zip(job.prompts, job.max_tokens, strict=True)
        ]
        return [answer["tokens"] for answer in self._clients.map(self._complete, bodies)]

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=3600)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"llama-server answered {answer.status}: {text[:300]!r}")
        found: dict[str, Any] = json.loads(text)
        return found

    def _wait(self) -> None:
        while self._server.poll() is None:
            try:
                connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"llama-server ended with {self._server.returncode} while it loaded the model")

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


def _version(binary: Path) -> str:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.+)", told.stderr + told.stdout)
    return found[1] if found else "unknown"


def load(settings: Settings) -> Engine:
    return LlamaCpp(settings)


if __name__ == "__main__":
    serve(load)
