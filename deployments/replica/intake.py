"""Receives the ingresses' requests from the wire: turns them into requests of the engine, or refuses them.

on_generate ─ no grammar ─▶ make ─▶ submit ─▶ accepted
    │                          └───────┴────▶ refused: never fits, queue full, stopped, draining
    └─ grammar ─▶ compiled in a thread ─▶ make
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deployments.admission.fair_threads import FairThreads
from deployments.replica.load import DrainRate
from deployments.wire.messages import CLEARED_TOKENS, Generate, KVOrigin, RefusalKind, unpack_tokens
from deployments.wire.server import WireServer
from engine.base.errors import EngineStopped, NeverFits, QueueFull
from engine.grammar.compiled import CompiledGrammar
from engine.grammar.spec import Grammar
from engine.model_config.tasks import check_task
from engine.program.engine import Engine
from engine.values.request import KVSource, Request
from router.addresses import KVAddress

logger = logging.getLogger("ray.serve")

GRAMMAR_THREADS = 2
"""Grammars that are compiled at a time. Ingresses check grammars first, so most are known to compile; their number
is not bounded, so tenants take turns."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the engine does not accept a request."""

    kind: RefusalKind
    reason: str
    retry_after_s: float = 1.0
    """Seconds after which a retry is worthwhile when the queue was full."""


class _SentAgain(Exception):
    """The ingress sent the request before, and it was accepted after the wire had looked for it."""


class Intake:
    """Submits requests to one engine. Methods are callable from any thread."""

    def __init__(self, engine: Engine, drain: DrainRate, is_stopping: Callable[[], bool]) -> None:
        """`is_stopping` returns whether Serve is stopping this replica."""
        self._engine, self._drain, self._is_stopping = engine, drain, is_stopping
        self._compilers = FairThreads(GRAMMAR_THREADS, "grammar", reserves_one=False)
        self._compiling: dict[str, str] = {}  # request -> ingress
        self._lock = threading.Lock()
        self._trials: deque[str] = deque()  # requests that are or were on trial here
        self._trials_lock = threading.Lock()
        self.wire: WireServer | None = None
        """The wire from which requests come. Set it before it starts."""

    def make(self, request: Generate, compiled: CompiledGrammar | None = None) -> Request | Refusal:
        """Return a request of the engine, or why there cannot be one. `compiled` is its grammar, if it has one."""
        if self._is_stopping():
            return Refusal("draining", "the replica is being stopped")
        try:
            check_task(request.sampling, self._engine.tasks, is_encoder=self._engine.is_encoder)
            return self._engine.new_request(
                request.request_id,
                unpack_tokens(request.prompt_ids),
                request.sampling,
                salt=request.salt,
                output_ids=unpack_tokens(request.output_ids),
                num_prompt_reported=request.num_prompt_reported,
                priority=request.priority,
                is_deferrable=request.is_deferrable,
                tenant=request.tenant,
                compiled=compiled,
                source=None if request.origin is None else source_of(request.origin),
            )
        except ValueError as error:
            return Refusal("never_fits", str(error))

    def submit(self, request: Request) -> Refusal | None:
        """Pass a request to the engine; return the refusal if the engine does not accept it."""
        try:
            self._engine.loop.submit(request)
        except NeverFits as error:
            return Refusal("never_fits", str(error))
        except QueueFull as error:
            return Refusal("queue_full", str(error), self._drain.retry_after_s(self._engine.loop.load()))
        except EngineStopped as error:
            return Refusal("stopped", str(error))
        return None

    def compile(self, grammar: Grammar) -> CompiledGrammar | Refusal:
        """Compile a grammar, which may take long, or return why that fails."""
        try:
            return self._engine.grammars.compile(grammar)
        except ValueError as error:
            return Refusal("never_fits", f"the grammar cannot be used: {error}")

    def close(self) -> None:
        """Accept no more grammars. Idempotent."""
        self._compilers.close()

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled, or waits for its turn."""
        return len(self._compiling)

    # --- the wire's requests -------------------------------------------------------------------------------

    def on_generate(self, ingress_id: str, request: Generate) -> None:
        """Submit a request and notify its ingress, later if a grammar must be compiled."""
        if request.sampling.grammar is None:
            return self._take(ingress_id, request)
        with self._lock:
            if request.request_id in self._compiling:
                return None
            self._compiling[request.request_id] = ingress_id
        work = partial(self._compile_and_take, ingress_id, request, request.sampling.grammar)
        self._compilers.submit(request.tenant, work)
        return None

    def on_abort(self, request_id: str) -> None:
        """End a request before the engine's next step."""
        self._engine.loop.abort(request_id)

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        """Drop a request whose grammar is still being compiled."""
        with self._lock:
            if self._compiling.get(request_id) == ingress_id:
                del self._compiling[request_id]

    def _compile_and_take(self, ingress_id: str, request: Generate, grammar: Grammar) -> None:
        with self._lock:
            if request.request_id not in self._compiling:  # its client left while it waited
                return
        try:
            compiled = self.compile(grammar)
        except Exception:
            logger.exception("the grammar of %s could not be compiled", request.request_id)
            compiled = None
        with self._lock:
            if self._compiling.pop(request.request_id, None) is None:
                return
        try:
            if compiled is None:
                self._fail(ingress_id, request)
            elif isinstance(compiled, Refusal):
                self._refuse(ingress_id, request, compiled)
            else:
                self._take(ingress_id, request, compiled)
        except Exception:
            logger.exception("%s could not be taken", request.request_id)
            self._fail(ingress_id, request)

    def _take(self, ingress_id: str, request: Generate, compiled: CompiledGrammar | None = None) -> None:
        wire = self._wire()
        made = self.make(request, compiled)
        if isinstance(made, Refusal):
            return self._refuse(ingress_id, request, made)
        try:
            refusal = self._open(ingress_id, request) or self._submit_opened(made)
        except _SentAgain:
            return None
        if refusal is not None:
            return self._refuse(ingress_id, request, refusal)
        return None if request.trial == "alone" else wire.accept(request.request_id)

    def _open(self, ingress_id: str, request: Generate) -> Refusal | None:
        """Open a request in the wire, or return why not: one that must be the only suspect is refused while
        others run.

        Raises _SentAgain.
        """
        wire = self._wire()
        with self._trials_lock:
            while self._trials and not self._is_tried(self._trials[0]):
                self._trials.popleft()
            if request.trial == "alone" and any(map(self._is_tried, self._trials)):
                return Refusal("queue_full", "another request that may have ended an engine is being tried here")
            try:
                if not wire.open(request, ingress_id):
                    raise _SentAgain
            except ValueError as error:
                return Refusal("never_fits", str(error))
            if request.trial is not None:
                self._trials.append(request.request_id)
            if request.trial == "alone":
                wire.accept_now(request.request_id, ingress_id)
        return None

    def _is_tried(self, request_id: str) -> bool:
        return self._wire().is_beginning(request_id, CLEARED_TOKENS)

    def _submit_opened(self, request: Request) -> Refusal | None:
        refusal = self.submit(request)
        if refusal is not None:
            self._wire().forget(request.request_id)
        return refusal

    def _refuse(self, ingress_id: str, request: Generate, refusal: Refusal) -> None:
        self._wire().refuse(ingress_id, request.request_id, refusal.kind, refusal.reason, refusal.retry_after_s)

    def _fail(self, ingress_id: str, request: Generate) -> None:
        reason = "the replica could not take the request"
        self._wire().refuse(ingress_id, request.request_id, "failed", reason)

    def _wire(self) -> WireServer:
        assert self.wire is not None, "`wire` is set before it starts"
        return self.wire


def source_of(origin: KVOrigin) -> KVSource:
    """Return the source that the engine should ask for KV, in `KVFetcher`'s form."""
    return KVSource(KVAddress(origin.endpoint, origin.secret, origin.public_key), origin.num_tokens)
