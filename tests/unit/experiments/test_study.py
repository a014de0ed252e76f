"""A study: every setting with every seed, numbers by hand, and files that hold what was measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments.study import StudyColumn, difference, mean, spread, study


def test_a_difference_has_the_interval_of_its_pairs():
    # .03 and .05: mean .04, standard error .01, Student's t with one degree of freedom 12.706
    assert difference(pd.Series([0.03, 0.05])) == "+0.040 (-0.087 to +0.167)"
    # .04, .05, .06: standard error .00577, t with two degrees of freedom 4.303
    assert difference(pd.Series([0.04, 0.05, 0.06])) == "**+0.050 (+0.025 to +0.075)**"
    assert difference(pd.Series([0.04])) == difference(pd.Series([0.04, np.nan])) == ""


def test_a_spread_is_the_sample_s_and_takes_two_seeds():
    # .80 and .82 have the standard deviation .0141 of a sample, .01 of all there are
    two = pd.Series([0.80, 0.82])
    assert spread(two) == "0.810 ± 0.014"
    assert spread(two, form="+.2f", ddof=0) == "+0.81 ± 0.010"
    assert spread(two[:1]) == "0.800"
    assert mean(two) == "0.810"
    assert mean(pd.Series([0.8, np.nan])) == ""


def test_a_study_pairs_settings_by_seed_and_writes_what_it_found(tmp_path, capsys):
    asked = []
    scores = {("a", "plain"): 1.0, ("a", "other"): 3.0, ("b", "plain"): 5.0}

    def measure(setting, seed):
        asked.append((setting, seed))
        return {"score": scores[setting] + 10 * seed}

    columns = (
        StudyColumn("score", "score", case="plain"),
        StudyColumn("other", "score", case="other"),
        StudyColumn("gain", "score", case="other", less="plain"),
    )
    # seeds differ by far more than settings: only pairs of one seed have the difference 2 with no spread
    gain = StudyColumn("spread", "score", spread, case="other", less="plain")
    names = ("what", "case")
    found = study("few", names, scores, (0, 1), measure, (*columns, gain), output=tmp_path / "new")
    assert asked == [(setting, seed) for setting in scores for seed in (0, 1)]
    text = (tmp_path / "new" / "few.md").read_text()
    assert text.splitlines()[2:] == ["| a | 6.000 | 8.000 | 2.000 | 2.000 ± 0.000 |", "| b | 10.000 |  |  |  |"]
    assert text in capsys.readouterr().out
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "new" / "few.csv"), found)


def test_without_cases_a_row_is_a_setting_and_the_one_subtracted_is_left_out(tmp_path):
    columns = [StudyColumn("less b", "score", difference, less="b")]

    def measure(setting, seed):
        return {"score": setting[0] + (setting[1] == "a") * (1.0 + seed)}

    settings = [(0.15, "a"), (0.15, "b"), (2.0, "a"), (2.0, "b")]
    rows = lambda found: str(len(found)).encode()  # noqa: E731
    study("s", ("x", "name"), settings, (0, 1), measure, columns, output=tmp_path, picture=rows)
    assert (tmp_path / "s.md").read_text().splitlines() == [
        "| x | name | less b |",
        "| --- | --- | --- |",
        "| 0.15 | a | +1.500 (-4.853 to +7.853) |",
        "| 2 | a | +1.500 (-4.853 to +7.853) |",
    ]
    assert (tmp_path / "s.png").read_text() == "8"  # a number a setting and seed
