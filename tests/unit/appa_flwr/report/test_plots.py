"""The pictures of a report: what is drawn, and where."""

from __future__ import annotations

from report_runs import figure_of, line, read

from appa_flwr.report import plots, style


def test_of_many_groups_those_with_most_weight_at_the_end_have_a_name_and_plain_means_are_grey(tmp_path):
    groups = tuple(f"g{number}" for number in range(10))
    metrics = [line(i, planned=2, fell_back=i == 2, groups=groups) for i in (1, 2)]
    metrics[-1]["weights"] = {group: number / 45 for number, group in enumerate(groups)}
    rounds = read(tmp_path, metrics=metrics).iterations
    (axes,) = figure_of(plots.weights, rounds, groups).axes
    named = {drawn.get_label(): drawn for drawn in axes.lines if not drawn.get_label().startswith("_")}
    assert [*named] == [f"g{number}" for number in range(9, 1, -1)]
    assert [*named["g9"].get_ydata()] == [1 / 10, 9 / 45]
    assert named["g9"].get_color() == style.GROUP_COLOURS[0]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_width()) == (1.5, 1.0)
