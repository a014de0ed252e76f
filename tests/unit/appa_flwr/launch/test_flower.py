"""What Flower is started with, and how a run that failed or was stopped ends."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
from fakes import raising
from report_runs import progressed
from small import config_in

from appa_flwr.config import THREADS
from appa_flwr.launch import flower
from appa_flwr.launch.flower import flower_environment
from appa_flwr.launch.terminal import RunFailed, Stopped
from appa_flwr.run.schema import ERROR_FILE, SUPERLINK_LOG


def test_flower_environment_is_private_and_keeps_the_users_choices(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("FLWR_HOME", "/somewhere/else")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # of another Ray
    monkeypatch.setattr(flower, "find_spec", lambda name: None)  # the library that httpx needs for such a proxy
    made = flower_environment(tmp_path, 1)
    assert not {"ALL_PROXY", "RAY_ADDRESS"} & made.keys()
    own = {"FLWR_HOME": str(tmp_path), "OMP_NUM_THREADS": "3", THREADS: "3"}
    assert made.items() >= (own | {"NO_PROXY": "intranet,127.0.0.1,localhost"}).items()
    assert os.environ["FLWR_HOME"] == "/somewhere/else"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(flower, "find_spec", lambda name: name)
    made = flower_environment(tmp_path, 1)
    assert (made["OMP_NUM_THREADS"], made[THREADS], made["ALL_PROXY"]) == ("1", "", "socks5://127.0.0.1:1080")


def test_a_run_that_flower_reports_as_failed_has_failed_also_where_its_command_ends_well(tmp_path, monkeypatch, capsys):
    # As `flwr run --stream` does, while the status is known a moment later.
    statuses = iter(["running", "finished:failed"])
    monkeypatch.setattr(flower.Flower, "status", lambda self: next(statuses))
    config = config_in(tmp_path)
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
    assert flower._why(folder, "finished:failed", None) == "only 1 of 2 groups answered"
    (folder / "error.txt").unlink()
    for text, slow in (("The current node timed out during startup.", True), ("A node failed.", False)):
        (folder / "flower.log").write_text(text + "\n" * 3)
        assert ("Ray took too long" in flower._why(folder, "finished:failed", None)) == slow


def test_a_killed_superlink_is_the_reason_that_is_given(tmp_path):
    config_in(tmp_path).run_folder.mkdir()
    (home := tmp_path / "home").mkdir()
    (home / SUPERLINK_LOG).write_text("its last line")
    with subprocess.Popen(["sleep", "60"]) as superlink:
        command = ["sh", "-c", f"kill -9 {superlink.pid}; echo timed out during startup; sleep 0.2; exit 1"]
        with pytest.raises(RunFailed, match=r"(?s)SuperLink has ended, by SIGKILL; the.*\nits last line$"):
            flower.followed(config_in(tmp_path), flower.Flower(home, 1, tmp_path), command, superlink=superlink)


def test_a_stopped_run_ends_with_the_signal_s_exit_code_unless_it_serves(appa, monkeypatch, tmp_path):
    progressed(tmp_path, "ppo")
    assert not flower._stop_serving(tmp_path, None, None)  # it is not asked for more than its end

    def followed(config, *_, **__):
        (config.run_folder / "survey.memory").mkdir()
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(flower, "followed", followed)
    monkeypatch.setattr(flower.Flower, "start_superlink", lambda *_, **__: None)
    keys = {"run.output-dir": tmp_path, "run-name": "r", "data.num-questions": 20, "data.num-groups": 3}
    said = appa("run", *(f"{key}={value}" for key, value in keys.items()), code=128 + signal.SIGTERM)
    assert "stopped by SIGTERM" in said
    assert not (tmp_path / "r" / "survey.memory").exists()
    assert f"appa run --resume {tmp_path / 'r'} continues" in said
    monkeypatch.setattr(flower, "followed", raising(RunFailed("it broke")))
    said = appa("serve", *(f"{key}={value}" for key, value in (keys | {"run-name": "s"}).items()), code=1)
    assert said.splitlines()[-2:] == [
        "appa: it broke",
        f"appa serve --resume {tmp_path / 's'} continues once the cause is gone",
    ]
