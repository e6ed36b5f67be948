"""The clients that are tried: which file tries each, what it needs, and which version is installed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NODE = Path(__file__).resolve().parents[1] / "node"
"""Directory with the programs for Node.js, and with the packages that they use."""


@dataclass(frozen=True)
class Client:
    """A program or library of others. It needs one of: a Python distribution, a Node package, or a program."""

    name: str
    python: str = ""
    node: str = ""
    program: str = ""

    def problem(self) -> str | None:
        """Return why it cannot be tried here; None if it can."""
        if self.program and shutil.which(self.program) is None:
            return f"there is no {self.program} on this machine"
        if self.node and shutil.which("node") is None:
            return "there is no node on this machine"
        if self.node and not (NODE / "node_modules" / self.node).is_dir():
            return f"{self.node} is not installed in tests/clients/node"
        if self.python:
            try:
                version(self.python)
            except PackageNotFoundError:
                return f"{self.python} is not installed here"
        return None

    def version(self) -> str:
        """Return the installed version; "" for programs that come with the machine."""
        if self.node:
            found = json.loads((NODE / "node_modules" / self.node / "package.json").read_text())
            return str(found["version"])
        return version(self.python) if self.python else ""


CLIENTS = {
    "test_openai.py": Client("openai (Python)", python="openai"),
    "test_anthropic.py": Client("anthropic (Python)", python="anthropic"),
    "test_langchain.py": Client("LangChain, LangGraph", python="langchain-openai"),
    "test_litellm.py": Client("LiteLLM", python="litellm"),
    "test_autogen.py": Client("AutoGen", python="autogen-ext"),
    "test_openai_agents.py": Client("openai-agents", python="openai-agents"),
    "test_semantic_kernel.py": Client("Semantic Kernel", python="semantic-kernel"),
    "test_pydantic_ai.py": Client("pydantic-ai", python="pydantic-ai-slim"),
    "test_instructor.py": Client("instructor", python="instructor"),
    "test_dspy.py": Client("DSPy", python="dspy"),
    "test_llama_index.py": Client("LlamaIndex", python="llama-index-llms-openai-like"),
    "test_haystack.py": Client("Haystack", python="haystack-ai"),
    "test_smolagents.py": Client("smolagents", python="smolagents"),
    "test_guidellm.py": Client("GuideLLM", python="guidellm"),
    "test_vllm_bench.py": Client("`vllm bench serve`, its protocol"),
    "test_lm_eval.py": Client("lm-eval", python="lm_eval"),
    "test_openai_node.py": Client("openai (Node)", node="openai"),
    "test_ai_sdk.py": Client("AI SDK (Node)", node="ai"),
    "test_curl.py": Client("curl", program="curl"),
    "test_jdk.py": Client("JDK HttpClient", program="java"),
    "test_chromium.py": Client("Chromium's fetch", program="chromium"),
}
"""By the file that tries it."""


def left_out() -> dict[str, str]:
    """Return the files whose client cannot be tried here, with the reason."""
    problems = {file: client.problem() for file, client in CLIENTS.items()}
    return {file: problem for file, problem in problems.items() if problem is not None}
