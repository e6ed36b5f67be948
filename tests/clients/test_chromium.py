"""Chromium's fetch, from a page of another site: with a preflight, a stream, and headers that it may read."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.clients.support.weather import I_AM, WHO

PAGE = """<!doctype html><meta charset="utf-8"><script>
const api = API;
const body = {model: "plain", stream: true, messages: [{role: "user", content: WHO}]};
const headers = {"content-type": "application/json", "authorization": "Bearer none"};
async function ask() {
  const answer = await fetch(api + "/chat/completions", {method: "POST", headers, body: JSON.stringify(body)});
  const decoder = new TextDecoder(), reader = answer.body.getReader();
  let sent = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    sent += decoder.decode(value, {stream: true});
  }
  const events = sent.split("\\n").filter(line => line).map(line => line.slice("data: ".length));
  const last = events.pop();
  const texts = events.map(event => JSON.parse(event).choices[0].delta.content ?? "");
  return {status: answer.status, text: texts.join(""), last, id: answer.headers.get("x-request-id")};
}
ask().catch(error => ({error: String(error)})).then(seen => {
  fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
});
</script>"""


class Site(ThreadingHTTPServer):
    """Another site: it has one page, and is told what the page has seen."""

    def __init__(self, page: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = page.encode()
        self.seen: queue.Queue[dict[str, Any]] = queue.Queue()


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self._answer(self.server.page)

    def do_POST(self) -> None:
        self.server.seen.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for each request."""


@pytest.fixture
def site(api: str) -> Iterator[Site]:
    page = PAGE.replace("API", json.dumps(api), 1).replace("WHO", json.dumps(WHO), 1)
    with Site(page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_page_of_another_site_reads_a_stream(site: Site, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, f"http://127.0.0.1:{site.server_port}/"]
    with (tmp_path / "output").open("wb") as output:
        browser = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            seen = site.seen.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait(timeout=60)
    assert seen.pop("id", None), seen
    assert seen == {"status": 200, "text": I_AM, "last": "[DONE]"}
