"""What Flower is started with, and the launcher around a real Flower simulation of a small stand-in app."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from appa_flwr.config import THREADS, Config
from appa_flwr.config.keys import to_toml_table
from appa_flwr.launch import flower
from appa_flwr.launch.flower import flower_environment
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.run.run_files import ERROR_FILE, SUPERLINK_LOG

SERVER = """
import json, os, time
from pathlib import Path
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = dict(context.run_config)
    folder = Path(config["run.output-dir"]) / config["run-name"]
    while not list(grid.get_node_ids()):
        time.sleep(0.1)
    seen = {"home": os.environ["FLWR_HOME"], "pid": os.getpid(), "cwd": os.getcwd(), "config": config}
    (folder / "seen.json").write_text(json.dumps(seen))
    with (folder / "progress.jsonl").open("a") as file:
        for step in (1, 2):
            record = {"phase": "ppo", "step": step, "of": 2, "message": "hello", "seconds_left": 2.0 - step}
            file.write(json.dumps(record) + "\\n")
    time.sleep(600)
"""
CLIENT = "from flwr.clientapp import ClientApp\napp = ClientApp()\n"
PROJECT = """
[project]
name = "appa-flwr"
version = "0.0.1"
[tool.flwr.app]
publisher = "test"
fab-include = ["standin/**/*.py"]
[tool.flwr.app.components]
serverapp = "standin.server:app"
clientapp = "standin.client:app"
[tool.flwr.app.config]
"""
MAIN = """
from pathlib import Path
from appa_flwr.launch import bundle, cli
bundle.APP_FOLDER = Path.cwd()
cli.main()
"""
APPA = [sys.executable, "-c", MAIN]


@pytest.fixture
def app(tmp_path):
    folder = tmp_path / "clone"
    (folder / "standin").mkdir(parents=True)
    (folder / "standin" / "__init__.py").touch()
    (folder / "standin" / "server.py").write_text(SERVER)
    (folder / "standin" / "client.py").write_text(CLIENT)
    (folder / "pyproject.toml").write_text(PROJECT + to_toml_table(Config.load({}).flat()))
    return folder


def test_flower_environment_is_private_and_keeps_the_users_choices(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("FLWR_HOME", "/somewhere/else")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    made = flower_environment(tmp_path, 4321)
    own = {
        "APPA_CODE": os.getcwd(),
        "FLWR_HOME": str(tmp_path),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "4321",
        "OMP_NUM_THREADS": "3",
        "PYTHONDONTWRITEBYTECODE": "",
        THREADS: "3",
    }
    assert made.items() >= (own | {"NO_PROXY": "intranet,127.0.0.1,localhost"}).items()
    assert made["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "1"
    assert made["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert os.environ["FLWR_HOME"] == "/somewhere/else"
    monkeypatch.delenv("OMP_NUM_THREADS")
    made = flower_environment(tmp_path, 1)
    assert (made["OMP_NUM_THREADS"], made[THREADS]) == ("1", "")


def test_a_socks_proxy_that_httpx_has_no_library_for_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setattr(flower, "find_spec", lambda name: None)
    made = flower_environment(tmp_path, 1)
    assert "ALL_PROXY" not in made
    assert made["HTTPS_PROXY"] == "http://proxy:3128"
    monkeypatch.setattr(flower, "find_spec", lambda name: name)
    assert flower_environment(tmp_path, 1)["ALL_PROXY"] == "socks5://127.0.0.1:1080"


def test_a_run_that_flower_reports_as_failed_has_failed_also_where_its_command_ends_well(tmp_path, monkeypatch, capsys):
    # As `flwr run --stream` does, while the status is known a moment later.
    statuses = iter(["running", "finished:failed"])
    monkeypatch.setattr(flower.Flower, "status", lambda self: next(statuses))
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "r"})
    (home := tmp_path / "home").mkdir()
    (folder := config.run_folder).mkdir()
    (home / SUPERLINK_LOG).write_text("the SuperLink's")
    step = '{"phase": "ppo", "step": %d, "of": 3, "message": "hello", "seconds_left": %s}\n'
    (folder / "progress.jsonl").write_text(step % (1, 70.0))  # before it was resumed
    (tmp_path / "new").write_text(step % (2, 61.0) + step % (3, 0) + '{"phase"')  # the last one is not complete
    command = ["sh", "-c", f"cat {tmp_path}/new >> {folder}/progress.jsonl; echo broke"]
    with pytest.raises(RunFailed, match=r"(?s)finished:failed.*\nbroke$"):
        flower.followed(config, flower.Flower(home, 1, tmp_path), command, superlink=SimpleNamespace(poll=lambda: None))
    assert capsys.readouterr().out.splitlines() == ["[ppo 2/3] hello (1 min 1 s left)", "[ppo 3/3] hello"]
    assert (folder / SUPERLINK_LOG).read_text() == "the SuperLink's"
    (folder / ERROR_FILE).write_text("only 1 of 2 groups answered\n")  # by the server, which knows more
    assert flower._why(folder, "finished:failed") == "only 1 of 2 groups answered"


# --- a stand-in app -------------------------------------------------------------------------------


def command(tmp_path: Path, *overrides: str) -> list[str]:
    given = (f"run.output-dir={tmp_path / 'out'}", "run-name=r", *overrides)
    return [*APPA, "run", *given]


def seen(tmp_path: Path) -> dict[str, Any]:
    """What the ServerApp has seen."""
    return json.loads((tmp_path / "out" / "r" / "seen.json").read_text())


# A killed one, whose run is taken up again: tests/e2e/test_simulation.py.
@pytest.mark.slow
def test_a_stopped_launcher_ends_everything_it_started(app, tmp_path):
    keys = ("appa.alpha=inf", 'groups="Avaria,Belmora"', "ppo.num-iterations=0")  # after the progress it sleeps
    given = command(tmp_path, *keys)
    with subprocess.Popen(given, cwd=app, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        while not started.stdout.readline().startswith("[ppo 2/2]"):
            assert started.poll() is None
        begun = psutil.Process(started.pid).children(recursive=True)
        assert len(begun) > 3  # SuperLink, its executor, the simulation, Ray
        time.sleep(0.5)
        started.terminate()
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in errors
    found = seen(tmp_path)
    keys = {"appa.alpha": float("inf"), "groups": "Avaria,Belmora", "ppo.num-iterations": 0, "run-name": "r"}
    assert found["config"] == Config.load({**keys, "run.output-dir": str(tmp_path / "out")}).flat()
    home = Path(found["home"])
    assert not home.exists()
    assert not any(process.is_running() for process in begun)
    assert not os.path.exists(f"/proc/{found['pid']}")
