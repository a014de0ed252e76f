"""What the server does with a run's keys before the first phase, and what it says where Flower ends the run."""

import ast
import io
import signal
import sys
from pathlib import Path

import httpx
import pytest
from fakes import raising
from flwr.app import RecordDict
from flwr.supercore.run import RunNotRunningException
from nodes import FakeGrid
from runs import run_server
from small import config_in

from appa_flwr.protocol import messages
from server_app import main, run


def test_letters_that_stdout_lacks_end_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(run, "run_phases", lambda grid, config, folder: print("México", flush=True))
    run_server(FakeGrid({}), config_in(tmp_path))
    assert rb"M\xe9xico" in sys.stdout.buffer.getvalue()


ASKED = httpx.Request("POST", "https://127.0.0.1:9100/v1/runtime/pull-messages")
LOST = {
    "frozen": httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"),
    "gone": httpx.ConnectError("[Errno 111] Connection refused"),
    "no token": httpx.HTTPStatusError("Client error '401'", request=ASKED, response=httpx.Response(401)),
    "not running": RunNotRunningException(),
}


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """What a run whose phases are `phases` leaves in error.txt, as at the end of its run.log."""

    def end(grid, phases, raised):
        config = config_in(tmp_path)
        monkeypatch.setattr(run, "run_phases", lambda grid, config, folder: phases(grid))
        with pytest.raises(raised):
            run_server(grid, config)
        (said,) = (config.run_folder / "error.txt").read_text().splitlines()
        assert (config.run_folder / "run.log").read_text().splitlines()[-1] == f"failed: {said}"
        return said

    return end


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("call", ["get_node_ids", "get_nodes", "push_messages", "pull_messages"])
def test_a_superlink_that_is_frozen_or_gone_is_named_and_what_to_do(how, call, ended, monkeypatch):
    def phases(grid):
        grid.get_node_ids()
        grid.get_nodes()
        list(grid.send_and_receive([grid.create_message(RecordDict(), messages.ASK, 1)], timeout=1.0))

    monkeypatch.setattr(lost := FakeGrid({1: lambda message: None}), call, raising(LOST[how]))
    said = ended(lost, phases, main.SuperLinkLost)
    assert said.startswith("Flower's SuperLink does not answer, or has given this run up (")
    assert f"({type(LOST[how]).__name__}" in said
    assert "run.resume=true" in said


def test_a_model_that_cannot_be_fetched_is_no_lost_superlink(ended):
    assert (
        ended(FakeGrid({}), raising(LOST["gone"]), httpx.ConnectError) == "ConnectError: [Errno 111] Connection refused"
    )


@pytest.fixture
def flower_s_handler():
    """Ends the process as Flower's handler of SIGINT does."""
    before = signal.signal(signal.SIGINT, lambda number, frame: sys.exit(0))
    yield signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_a_run_that_flower_s_process_ends_by_a_signal_says_so(ended, flower_s_handler):
    assert ended(FakeGrid({}), lambda grid: signal.raise_signal(signal.SIGINT), SystemExit) == main.ENDED
    assert signal.getsignal(signal.SIGINT) is flower_s_handler


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def test_who_imports_the_server_s_code_keeps_its_own_log():
    """No module of the server's silences anything on import."""
    loud = {"setLevel", "set_verbosity_error", "disable_progress_bar", "simplefilter", "filterwarnings", "quiet"}
    for path in sorted(Path(main.__file__).parent.rglob("*.py")):
        on_import = [node for node in ast.parse(path.read_text()).body if not isinstance(node, DEFINITIONS)]
        calls = [node.func for part in on_import for node in ast.walk(part) if isinstance(node, ast.Call)]
        assert not loud & {getattr(call, "attr", getattr(call, "id", "")) for call in calls}, path
