"""The pictures of a report: what is drawn, and where."""

from __future__ import annotations

import numpy as np
from report_runs import figure_of, line, read

from appa_flwr.report import plots


def test_the_reward_by_the_rule_and_the_plain_mean_have_a_line_each(tmp_path):
    given = zip((1, 2, 3), (False, True, False), (0.1, 0.8, 0.2), strict=True)
    metrics = [{**line(i, planned=3, fell_back=fell_back), "reward": reward} for i, fell_back, reward in given]
    lines = read(tmp_path, metrics=metrics).iterations
    (panel,) = [axes for axes in figure_of(plots.health, lines).axes if axes.get_title("left") == "Aggregated reward"]
    by_rule, plain = panel.lines
    np.testing.assert_array_equal(by_rule.get_ydata(), [0.1, np.nan, 0.2])
    np.testing.assert_array_equal(plain.get_ydata(), [np.nan, 0.8, np.nan])
