from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from appa_flwr.launch.progress import Tail, read_progress, shown
from appa_flwr.run.records import Progress


def test_tail_gives_complete_lines_once(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.text() == ""
    path.write_text("a\nb")
    assert tail.text() == "a\n"
    assert tail.text() == ""
    with path.open("a") as file:
        file.write("c\nd\n")
    assert tail.text() == "bc\nd\n"
    assert Tail(path, skip=True).text() == ""


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "[ppo 3/100] FI 0.97"),
        (0.2, "[ppo 3/100] FI 0.97 (0 s left)"),
        (59.6, "[ppo 3/100] FI 0.97 (1 min 00 s left)"),
        (185.0, "[ppo 3/100] FI 0.97 (3 min 05 s left)"),
        (-4.0, "[ppo 3/100] FI 0.97 (0 s left)"),
        (0.0, "[ppo 3/100] FI 0.97"),
    ],
)
def test_without_a_terminal_a_record_is_a_plain_line(tmp_path, capsys, seconds, expected):
    record = {"phase": "ppo", "step": 3, "of": 100, "message": "FI 0.97", "seconds_left": seconds}
    path = tmp_path / "progress.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with shown(Console(file=io.StringIO())) as show:
        for found in read_progress(Tail(path)):
            show(found)
    assert capsys.readouterr().out == expected + "\n"


def test_a_terminal_has_one_bar_a_phase_and_the_time_left_next_to_the_one_that_runs():
    screen = io.StringIO()
    with shown(Console(file=screen, force_terminal=True, width=120)) as show:
        show(Progress(phase="sft", step=300, of=300, message="loss [1.25]", seconds_left=90.0))
        show(Progress(phase="ppo", step=7, of=100, message="FI 0.97", seconds_left=61.0))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).rstrip().splitlines()[-2:]
    assert last[0].split() == ["sft", "━" * 40, "300/300", "loss", "[1.25]"]
    assert last[1].startswith("ppo ")
    assert last[1].endswith("7/100 1 min 01 s left FI 0.97")
