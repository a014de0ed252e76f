from __future__ import annotations

import json

import pytest

from appa_flwr.launch.progress import Tail, plain_line, read_progress


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
def test_a_record_is_a_plain_line(tmp_path, seconds, expected):
    record = {"phase": "ppo", "step": 3, "of": 100, "message": "FI 0.97", "seconds_left": seconds}
    path = tmp_path / "progress.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert [plain_line(found) for found in read_progress(Tail(path))] == [expected]
