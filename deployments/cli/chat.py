"""`raydix chat`: a conversation in the terminal that shows how many tokens of each turn were reused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.cli.errors import UserError, one_line
from deployments.cli.openai_stream import Client, ServerError, Usage
from deployments.cli.printable import printable

HELP = """\
[bold]/reset[/]  forget the conversation
[bold]/stats[/]  tokens of each turn, and how many of them were reused
[bold]/help[/]   this list
[bold]/quit[/]   leave (also Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Tokens and times of one answer. Times are in seconds."""

    usage: Usage | None
    """None when the answer was stopped before the server reported it."""
    first_token: float
    duration: float

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first, per second; None when there was only one."""
        count = self.usage.completion_tokens - 1 if self.usage else 0
        decoding = self.duration - self.first_token
        return count / decoding if count > 0 and decoding > 0 else None


@dataclass
class Chat:
    """One conversation with one model."""

    client: Client
    model: str
    console: Console
    options: dict[str, Any]
    """Sampling parameters, sent with every turn."""
    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    turns: list[ChatTurn] = field(default_factory=list)
    notices: Console = field(default_factory=lambda: Console(stderr=True))
    """Where the user is told of broken connections."""

    def handle(self, line: str) -> bool:
        """Act on one line of input. Return False when it asks to leave."""
        command = line.strip()
        if not command:
            return True
        match command:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.history.clear()
                self.turns.clear()
                self.console.print("[dim]The conversation is empty again.[/]")
            case "/stats":
                self.console.print(self.stats())
            case "/help":
                self.console.print(HELP)
            case _ if command.startswith("/") and " " not in command:
                self.console.print(f"[red]No such command: {escape(command)}.[/] [dim]/help lists them.[/]")
            case _:
                self.ask(line.rstrip("\n"))
        return True

    def ask(self, text: str) -> None:
        """Send a turn and print the answer as it arrives. An error removes the turn from the conversation."""
        self.history.append({"role": "user", "content": text})
        pieces: list[str] = []
        started, first, usage = time.perf_counter(), None, None
        try:
            with closing(self._stream(lambda: self._reconnecting(is_in_line=bool(pieces)))) as stream:
                for part in stream:
                    if isinstance(part, Usage):
                        usage = part
                        continue
                    first = first or time.perf_counter()
                    pieces.append(part)
                    self._write(part)
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except ServerError as error:
            self.history.pop()
            self._write("\n" if pieces else "")
            self.console.print(f"[red]error:[/] {escape(printable(one_line(error)))}", soft_wrap=True)
            return
        ended = time.perf_counter()
        self._write("\n")
        self.history.append({"role": "assistant", "content": "".join(pieces)})
        self.turns.append(ChatTurn(usage, (first or ended) - started, ended - started))

    def stats(self) -> Table:
        """Return a table of each turn's tokens."""
        table = Table("turn", "prompt", "reused", "generated", "TTFT", "tokens/s", title="Tokens of each turn")
        for column in table.columns:
            column.justify = "right"
        for number, turn in enumerate(self.turns, start=1):
            rate, usage = turn.tokens_per_second, turn.usage
            counts = ("-", "-", "-")
            if usage is not None:
                share = usage.cached_tokens / max(usage.prompt_tokens, 1)
                reused = f"{usage.cached_tokens} ({share:.0%})"
                counts = (str(usage.prompt_tokens), reused, str(usage.completion_tokens))
            rate_text = "-" if rate is None else f"{rate:.0f}"
            table.add_row(str(number), *counts, f"{turn.first_token * 1000:.0f} ms", rate_text)
        return table

    def _stream(self, on_break: Callable[[], None]) -> Generator[str | Usage]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.client.chat(self.model, [*system, *self.history], on_break, **self.options)

    def _reconnecting(self, *, is_in_line: bool) -> None:
        """Say on stderr that the answer broke off; in a terminal, not within a line of the answer."""
        if is_in_line and self.console.is_terminal:
            self._write("\n")
        self.notices.print("[dim]The answer broke off; reconnecting.[/]")

    def _write(self, text: str) -> None:
        self.console.print(printable(text), end="", markup=False, highlight=False, emoji=False, soft_wrap=True)


def run(url: str, model: str | None, system: str | None, options: dict[str, Any]) -> None:
    """Talk until the input ends. Raises UserError when the server or the model cannot be used."""
    console = Console()
    with Client(url) as client:
        try:
            models = client.models()
        except ServerError as error:
            raise UserError(str(error)) from None
        if model is not None and model not in models:
            raise UserError(f"{client.url} has no model {model!r}; it has: {', '.join(models) or 'none'}")
        if not models:
            raise UserError(f"{client.url} has no models yet")
        chat = Chat(client, model or models[0], console, options, system)
        if sys.stdin.isatty():
            console.print(f"[dim]{escape(chat.model)} at {client.url}. /help lists the commands.[/]")
        for line in _lines(console):
            if not chat.handle(line):
                break


def _lines(console: Console) -> Iterator[str]:
    """Yield lines from a terminal, prompted and with line editing, or from a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  (gives input() its line editing)

    while True:
        try:
            yield console.input("[bold cyan]>[/] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
