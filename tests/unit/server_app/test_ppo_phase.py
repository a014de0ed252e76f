from __future__ import annotations

from appa_flwr.config import Config
from server_app.ppo_phase import num_iterations


def test_iterations_are_as_many_as_asked_for_or_five_passes_over_the_questions():
    assert num_iterations(Config.load({"ppo.num-iterations": 7}), 1000) == 7
    passes = {"ppo.num-iterations": 0, "ppo.batch-size": 96, "ppo.answers-per-question": 1, "ppo.baseline": "value"}
    # 5 passes over 192 questions in batches of 96: 960 / 96 = 10.
    assert num_iterations(Config.load(passes), 192) == 10
    assert num_iterations(Config.load({**passes, "ppo.num-mini-batches": 1}), 3) == 1
