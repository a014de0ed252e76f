"""The page of a report: the files give its numbers and pictures, what is missing is said, text cannot break it."""

import json
import re
import shlex

import pytest
from markupsafe import escape
from report_runs import (
    CONFIG,
    COUNTRIES,
    GOOD,
    PNG_START,
    built_page,
    cells,
    fake_run,
    figure_of,
    line,
    page_of,
    predictor_card,
    predictor_scores,
    read,
    read_card,
    row,
    scored_run,
    write_run,
)

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.core.errors import UserError
from appa_flwr.report import build, plots, predictor, style
from appa_flwr.report.page import command, missing, provenance
from appa_flwr.run.records import METHODS


def test_tables_hold_the_numbers_of_the_summary(tmp_path):
    page = page_of(scored_run(tmp_path))
    # Avg, Min, FI by the survey answers (each score 0.1 lower) and by the predictions, format, readable
    ppo = ["0.760", "0.700", "0.9876", "0.860", "0.800", "0.9876", "0.950", "1.000"]
    assert cells(page, "PPO by appa") == ["PPO by appa", *ppo]
    uniform = ["0.690", "0.650", "0.9876", "0.790", "0.750", "0.9876", "–", "1.000"]
    assert cells(page, "Uniform answer")[1:] == uniform
    assert cells(page, "Ceiling (worst group)")[4:6] == ["0.880", "0.840"]
    assert page.index(">SFT<") < page.index(">PPO by appa<") < page.index(">Uniform answer<")
    # The worst served group comes first: GOOD's Avg .860 with Min .800 is a = .800 and b = .920; by the survey .1 less
    # on average alone, so what each group has is the same.
    assert cells(page, "a")[1:5] == ["0.600", "0.770", "0.800", "0.750"]
    assert cells(page, "b")[3] == "0.920"
    groups = page.partition("<h2>Groups")[2]
    assert groups.index(">a<") < groups.index(">b<")


def test_a_method_whose_answers_could_not_be_read_has_their_share_beside_it(tmp_path):
    summary = [row(method, 0.05, 0.04, readable=share) for method, share in (("base", 0.49), ("sft", 0.5))]
    summary[0]["fi_readable"] = float("nan")
    page = page_of(write_run(tmp_path, config=CONFIG, summary=summary))
    assert [cells(page, name)[-1] for name in ("Base", "SFT")] == ["0.490", "0.500"]
    # FI over the readable answers stands among all metrics
    assert [cells(page, "PluralLLM's predictions")[4:6], cells(page, "survey answers")[5]] == [
        ["0.9876", "–"],
        "0.8765",
    ]


def test_a_run_tells_the_command_that_makes_it_again_and_what_made_it(tmp_path):
    keys = {
        "groups": "Côte d'Ivoire;A, B",
        "eval.ceilings": False,
        "ppo.learning-rate": 0.5,
        "appa.alpha": float("inf"),
    }
    config = Config.load({**keys, "survey": "/s.jsonl", "seed": 3, "run-name": "r", "run.output-dir": "/there"})
    words = shlex.split(command(config))
    assert words[:2] == ["appa", "run"]
    again = assemble([*words[2:], "run-name=r", "run.output-dir=/there"], folder=None)
    assert again == config
    folder = scored_run(tmp_path)
    assert "Made by" not in page_of(folder)
    line = {"phase": "machine", "step": 1, "of": 1, "message": "2 cores, no GPU", "seconds_left": None}
    (folder / "progress.jsonl").write_text(json.dumps(line) + "\n")
    page = page_of(folder)
    assert "<dt>Made by</dt><dd>2 cores, no GPU</dd>" in page
    assert "<dt>Command</dt><dd>appa run metric=js seed=7 appa.fairness-threshold=0.99</dd>" in page


def test_all_metrics_stand_side_by_side_in_the_paper_s_order(tmp_path):
    summary = [
        row(method, avg, low, metric=metric)
        for metric, avg, low in (("cosine", 0.66, 0.55), ("js", 0.86, 0.75), ("wasserstein", 0.76, 0.65))
        for method in ("base", "ppo")
    ]
    page = page_of(write_run(tmp_path, config=CONFIG, summary=summary))
    # Avg AS by js, wasserstein, cosine, and Min AS by the same
    assert cells(page, "survey answers")[1:8] == ["Base", "0.760", "0.660", "0.560", "0.650", "0.550", "0.450"]
    assert cells(page, "PluralLLM's predictions")[1:8] == ["Base", "0.860", "0.760", "0.660", "0.750", "0.650", "0.550"]


def test_all_text_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\"q\""
    run = {"a": 0.5, evil: 0.6, "c": 0.7}
    scores = {"fi": 0.9, "avg_as": 0.6, "min_as": 0.5, "per_group": run, "fi_readable": 0.9}
    write_run(
        tmp_path,
        config=CONFIG | {"model": evil, "policy.tuning": "lora", "survey": evil, "groups": f"a,{evil}"},
        summary=[
            {"method": method, "metric": evil, **scores, "format_score": 0.9, "survey": scores, "readable": 1.0}
            for method in METHODS
        ],
        metrics=[line(1, planned=9, fell_back=None, groups=tuple(run)) | {"missing_groups": [evil]}],
        pluralllm=predictor_card(
            scores=(means := {evil: predictor_scores(0.5), "pluralllm": predictor_scores(0.5)}),
            groups={evil: means},
        ),
    )
    page = page_of(tmp_path)
    assert "<script" not in page
    assert escape(evil) in page
    assert page.count(escape("alert('x')")) >= 12


def test_page_needs_no_other_file_however_many_groups_and_whatever_was_not_measured(tmp_path):
    groups = tuple(f"$group {i} of many with a very long name$" for i in range(14))
    lines = [line(n, planned=6, fell_back=n % 3 == 0, groups=groups) for n in range(1, 7)]
    for entry in lines:
        entry["rewards"][groups[0]] = None
        entry |= {"missing_groups": [groups[0]], "kl": float("nan")}
    page = built_page(write_run(fake_run(tmp_path, groups=groups, iterations=1), metrics=lines))
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    pictures = list((tmp_path / "plots").iterdir())
    assert len(sources) == len(pictures) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    assert all(path.suffix == ".png" and path.read_bytes().startswith(PNG_START) for path in pictures)
    assert page.count('alt="loss of PluralLLM over its rounds" title="pluralllm"') == 1
    assert "incomplete" not in page
    assert not list(tmp_path.rglob(".*"))  # nothing half-written
    assert [cells(page, group)[-1] for group in groups[:2]] == ["6", "0"]  # iterations missed


def test_config_alone_makes_a_report_that_says_what_is_missing(tmp_path):
    page = page_of(write_run(tmp_path, config=CONFIG))
    assert "This report is incomplete" in page
    assert "<dd>Base, SFT, PPO, PPO by average</dd>" in page
    assert "<dd>no pluralllm.json</dd>" in page
    assert cells(page, "appa.fairness-threshold") == ["appa.fairness-threshold", "0.99"]
    few = [row(method, *GOOD[method], survey=False) for method in ("base", "ppo")]
    page = page_of(write_run(tmp_path, summary=few, pluralllm=predictor_card()))
    assert "<dd>SFT, PPO by average</dd>" in page
    assert "no pluralllm" not in page
    assert ">None<" not in page
    assert "survey answers</th>" not in page


def test_questions_that_were_left_out_are_counted_and_intervals_over_few_are_called_narrow(tmp_path):
    for held_out in (29, 30):
        counts = {"training": 80, "held_out": held_out, "unanswerable": 3, "too_long": 1}
        page = page_of(write_run(scored_run(tmp_path), questions=counts))
        assert re.findall("questions</dt><dd>(.*?)</dd>", page) == ["80", str(held_out), "3", "1"]
        assert ("too narrow" in page) == (held_out < 30)


def test_times_and_iterations_that_took_the_plain_mean_are_counted(tmp_path):
    # One iteration takes 1 + .5 + .25 + 2.25 = 4 s, .5 of it waiting.
    lines = [line(i, planned=4, fell_back=fell_back) for i, fell_back in enumerate((True, True, False, True), 1)]
    facts = dict(provenance(read(tmp_path, metrics=lines)))
    assert re.findall(r"[\d.]+", facts["Plain mean taken"]) == ["3", "4"]
    assert facts["Waiting for groups"].startswith("12.5%")
    assert facts["Time of PPO"] == "16.0 s"
    without = [line(1, planned=1, fell_back=None)]
    assert "Plain mean taken" not in dict(provenance(read(tmp_path, metrics=without)))


def test_a_run_until_pluralllm_lacks_nothing(tmp_path):
    whole = fake_run(tmp_path / "whole", groups=COUNTRIES, iterations=3)
    card = json.loads((whole / "pluralllm.json").read_text())
    assert [*missing(read(tmp_path / "part", config={**CONFIG, "run.phases": "pluralllm"}, pluralllm=card))] == []
    assert ">Own nearest question<" in page_of(tmp_path / "part")
    assert [*missing(read(tmp_path / "part", config={**CONFIG, "run.phases": "all"}))]


def test_groups_stand_worst_predicted_first(tmp_path):
    scores = predictor.by_group(read_card(tmp_path, ("a", "b", "c"))).set_index("Group")["PluralLLM"]
    assert [*scores.items()] == [("c", 0.88), ("b", 0.89), ("a", 0.9)]


def test_predictors_stand_in_the_order_of_tables(tmp_path):
    scores = predictor.scores(read_card(tmp_path))
    assert scores[["Predictor", "JS", "Answers"]].to_numpy().tolist() == [
        ["PluralLLM", 0.93, "240"],
        ["Own nearest question", 0.88, "240"],
        ["Uniform answer", 0.79, "240"],
    ]


def test_a_run_that_stopped_midway_says_where_and_a_repeated_iteration_counts_once(tmp_path):
    lines = [line(i, planned=10, fell_back=branch) for i, branch in ((1, True), (2, True), (2, False))]
    run = read(tmp_path, metrics=lines)
    assert dict(missing(run))["Iterations"].startswith("2 of 10")
    assert run.iterations["fell_back"].tolist() == [True, False]


def test_pictures_are_not_written_through_a_link(tmp_path):
    folder = write_run(tmp_path / "run", config=CONFIG, pluralllm=predictor_card())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (folder / "plots").symlink_to(theirs)
    with pytest.raises(UserError, match=f"^{folder / 'plots'}: is a link"):
        build(folder)
    assert list(theirs.iterdir()) == []
    (folder / "plots").unlink()
    build(folder)
    assert [path.name for path in (folder / "plots").iterdir()] == ["pluralllm.png"]


def test_a_broken_file_leaves_the_old_report_alone(tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.json"):
        build(tmp_path)
    write_run(tmp_path, config=CONFIG, summary=[row("ppo", 0.8, 0.7) | {"fi": "0.9"}])
    with pytest.raises(UserError, match=r"summary\.json: 0\.fi: "):
        build(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_of_many_groups_those_with_most_weight_at_the_end_have_a_name_and_plain_means_are_grey(tmp_path):
    groups = tuple(f"g{number}" for number in range(10))
    metrics = [line(i, planned=2, fell_back=i == 2, groups=groups) for i in (1, 2)]
    metrics[-1]["weights"] = {group: number / 45 for number, group in enumerate(groups)}
    rounds = read(tmp_path, metrics=metrics).iterations
    panels = {axes.get_title(loc="left"): axes for axes in figure_of(plots.training, rounds, groups).axes}
    axes = panels["Weight per group"]
    named = {drawn.get_label(): drawn for drawn in axes.lines if not drawn.get_label().startswith("_")}
    assert [*named] == [f"g{number}" for number in range(9, 1, -1)]
    assert [*named["g9"].get_ydata()] == [1 / 10, 9 / 45]
    assert named["g9"].get_color() == style.GROUP_COLOURS[0]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_width()) == (1.5, 1.0)
