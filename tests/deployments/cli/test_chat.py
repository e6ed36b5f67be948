"""`raydix chat`, driven through a pipe against a server whose behaviour is known."""

import io
import subprocess

import pytest
from rich.console import Console

from deployments.cli.chat import Chat, ChatTurn
from deployments.cli.openai_stream import Client, ServerError, Usage
from tests.deployments.support.command_line import raydix
from tests.support.fake_openai import Server


def chat(url: str, *lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return raydix("chat", "--url", url, *options, stdin="".join(line + "\n" for line in lines))


def session(fake_server: Server) -> tuple[Chat, Console]:
    console = Console(record=True, width=100, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    return Chat(Client(fake_server.url), "fake", console, {"temperature": 0.0}), console


def test_turns_carry_the_conversation_and_stats_show_the_reused_tokens(fake_server: Server) -> None:
    result = chat(fake_server.url, "one two three", "four five", "/stats", options=("--system", "be brief"))
    assert result.returncode == 0 and result.stderr == ""
    assert "one two three" in result.stdout and "four five" in result.stdout
    roles = [message["role"] for message in fake_server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert fake_server.bodies[1]["model"] == "fake" and fake_server.bodies[1]["temperature"] == 0.0
    # The second prompt: 2 of the system message, 3 asked, 3 answered, 2 asked. The first 5 were sent before.
    [row] = [line.split() for line in result.stdout.splitlines() if "5 (50%)" in line]
    assert row[1] == "2" and row[3] == "10"


def test_reset_forgets(fake_server: Server) -> None:
    result = chat(fake_server.url, "one two", "/reset", "three", "/quit", "never sent")
    assert result.returncode == 0
    assert [len(body["messages"]) for body in fake_server.bodies] == [1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("refuse this", "error: queue full (HTTP 429, try again in 1 s)"),
        ("then break it", "error: the engine failed"),
        ("then cut it", "error: the answer was cut off"),
    ],
)
def test_the_session_survives_errors_and_forgets_the_failed_turn(
    fake_server: Server, line: str, message: str
) -> None:
    result = chat(fake_server.url, "hello", line, "goes on")
    assert result.returncode == 0 and "Traceback" not in result.stderr
    assert message in result.stdout
    assert [m["content"].strip() for m in fake_server.bodies[-1]["messages"]] == ["hello", "hello", "goes on"]


def test_unknown_commands_are_reported_and_not_sent(fake_server: Server) -> None:
    result = chat(fake_server.url, "/rest", "/help", "")
    assert "No such command: /rest" in result.stdout and "/stats" in result.stdout
    assert fake_server.bodies == []


def test_a_server_that_is_not_there_is_one_line_on_stderr() -> None:
    result = chat("http://127.0.0.1:9", "hello")
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "is `raydix serve` running there?" in result.stderr


def test_a_model_the_server_lacks_is_named_with_those_it_has(fake_server: Server) -> None:
    result = chat(fake_server.url, "hello", options=("--model", "big"))
    assert result.returncode == 1
    assert "has no model 'big'; it has: fake" in result.stderr


def test_the_models_output_cannot_drive_the_terminal_or_rich(fake_server: Server) -> None:
    talk, console = session(fake_server)
    talk.handle("\x1b[31mred\x07 [bold]x[/] :smile:")
    shown = console.export_text(clear=False)
    assert "[31mred [bold]x[/] :smile:" in shown
    assert "\x1b" not in shown and "\x07" not in shown


class Interrupting(io.StringIO):
    """A terminal at which Ctrl-C is pressed when it has shown the second word."""

    def write(self, text: str) -> int:
        if text == "b ":
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_the_session(fake_server: Server) -> None:
    talk = Chat(Client(fake_server.url), "fake", Console(file=Interrupting(), width=100), {"temperature": 0.0})
    assert talk.handle("a b c d e f")
    assert talk.history[-1] == {"role": "assistant", "content": "a b "}
    assert talk.turns[-1].usage is None
    assert talk.handle("more") and talk.turns[-1].usage is not None


def test_rate_counts_the_tokens_after_the_first() -> None:
    assert ChatTurn(Usage(5, 0, 11), first_token=0.5, duration=1.5).tokens_per_second == pytest.approx(10)
    assert ChatTurn(Usage(5, 0, 1), first_token=0.5, duration=0.5).tokens_per_second is None
    assert ChatTurn(None, first_token=0.5, duration=0.5).tokens_per_second is None


def test_an_invalid_url_is_not_reported_as_an_unreachable_server() -> None:
    """`raydix serve` does not run at an address without a protocol, however long one waits."""
    with Client("localhost:8000") as client, pytest.raises(ServerError) as refused:
        client.models()
    assert str(refused.value) == (
        "localhost:8000 is not the URL of a server: expected one such as http://127.0.0.1:8000"
    )
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServerError) as refused:
        client.models()
    assert str(refused.value) == (
        "cannot reach http://127.0.0.1:9 (Connection refused): is `raydix serve` running there?"
    )
