"""GuideLLM: a benchmark of chats, whose streams it counts token by token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import PYTHON, ROOT

PROGRAM = ROOT / "tests/clients/support/guidellm_program.py"
NUM_REQUESTS = 40


def test_each_request_of_a_benchmark_is_answered_with_the_tokens_it_asked_for(
    embedded_url: str, tmp_path: Path
) -> None:
    (site_packages,) = PYTHON.parent.parent.glob("lib/python3*/site-packages")
    report = tmp_path / "report.json"
    settings = {
        "backend": f"kind=openai_http,target={embedded_url},model=demo",
        "profile": "kind=concurrent,streams=8",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={ROOT / 'deployments/demo_model'}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(site_packages), "run", *words, "--disable-console"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (NUM_REQUESTS, [])
    assert {request["output_tokens"] for request in requests["successful"]} == {16}
