"""Tasks in threads: what they do at the same time, what never, and what ends one or all of them."""

import os
import signal
import threading
import time
from concurrent.futures import CancelledError

import pytest

from appa_flwr.config import Config
from server_app import ppo_phase
from server_app.side_by_side import SideBySide

SECONDS = 10.0  # longest wait for another thread


def test_tasks_compute_at_once_and_hold_the_run_one_at_a_time():
    side_by_side, meeting = SideBySide(), threading.Barrier(3, timeout=SECONDS)
    holding, most, rounds = 0, 0, []

    def task(name):
        nonlocal holding, most
        for number in range(4):
            holding += 1
            most = max(most, holding)
            rounds.append((name, number))
            time.sleep(0.002)
            holding -= 1
            with side_by_side.computing():
                meeting.wait()  # passes only if all three are here

    side_by_side.do([lambda name=name: task(name) for name in "ABC"])
    assert most == 1
    assert sorted(rounds) == [(name, number) for name in "ABC" for number in range(4)]


@pytest.mark.parametrize("place", [0, 1], ids=["of another thread", "of this thread"])
def test_an_error_ends_its_own_task_alone(place, caplog):
    side_by_side, both, ended = SideBySide(), threading.Barrier(2, timeout=SECONDS), []

    def fails():
        with side_by_side.computing():
            both.wait()
        raise ValueError("mine")

    def goes_on():
        with side_by_side.computing():
            both.wait()
        for _ in range(3):
            with side_by_side.computing():
                time.sleep(0.01)
        ended.append(True)

    tasks = [goes_on, goes_on]
    tasks[place] = fails
    with pytest.raises(ValueError, match="mine"):
        side_by_side.do(tasks)
    assert ended == [True]
    assert "the others go on: mine" in caplog.text


@pytest.mark.parametrize("holding", [False, True], ids=["while it computes", "while another holds the run"])
def test_a_signal_ends_all(holding):
    side_by_side, both, ended = SideBySide(), threading.Barrier(2, timeout=SECONDS), []

    def other():
        try:
            with side_by_side.computing():
                both.wait()
            if holding:
                time.sleep(0.2)  # in which the main thread comes to wait for the run
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            for _ in range(1000):
                with side_by_side.computing():
                    time.sleep(SECONDS / 1000)
        except CancelledError:
            ended.append(True)
            raise

    def own():
        with side_by_side.computing():
            both.wait()
            if holding:
                time.sleep(0.1)  # until the other holds it
            else:
                raise KeyboardInterrupt
        raise AssertionError("the run was not held by the other")

    with pytest.raises(KeyboardInterrupt):
        side_by_side.do([other, own])
    assert ended == [True]


def test_a_signal_ends_the_others_after_the_main_thread_s_own_task():
    side_by_side, own_ended, ended = SideBySide(), threading.Event(), []

    def other():
        with side_by_side.computing():
            assert own_ended.wait(SECONDS)
            time.sleep(0.1)  # until the main thread waits for this one
        os.kill(os.getpid(), signal.SIGINT)
        try:
            for _ in range(1000):
                with side_by_side.computing():
                    time.sleep(SECONDS / 1000)
        except CancelledError:
            ended.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        side_by_side.do([other, own_ended.set])
    assert ended == [True]


@pytest.mark.parametrize(
    ("keys", "number"), [({}, 3), ({"model": "smollm2", "policy.tuning": "lora"}, 1), ({"run.rules-at-once": 2}, 2)]
)
def test_only_tiny_policies_train_at_once_unless_a_key_says_so(monkeypatch, keys, number):
    monkeypatch.setattr(ppo_phase, "cores", lambda: 3)
    assert ppo_phase.rules_at_once(Config.load(keys)) == number
