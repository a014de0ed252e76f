"""The page of a report: the files give its numbers and pictures, what is missing is said, text cannot break it."""

import json
import math
import re
import shlex

import pytest
import report_runs as made
from markupsafe import escape
from report_runs import CONFIG, GOOD
from test_frames import two_rules

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.core.errors import UserError
from appa_flwr.report import build, examples, plots
from appa_flwr.report.opening import command
from appa_flwr.report.page import missing, provenance
from appa_flwr.run.read import read_run
from appa_flwr.run.records import METHODS


def test_tables_hold_the_numbers_of_the_summary(tmp_path):
    counts = {"training": 80, "unanswered": 7, "held_out": 29, "unanswerable": 3, "too_long": 1}
    page = made.page_of(made.write_run(made.scored_run(tmp_path), questions=counts))
    shown = re.findall("questions</dt><dd>(.*?)</dd>", page.partition("<h2>Survey")[2])
    assert shown[:5] == [str(count) for count in counts.values()]
    assert "too narrow" in page
    assert "may-leave" not in page
    # Avg, Min, FI by the survey answers (each score 0.1 lower) and by the predictions, format, readable
    ppo = ["0.760", "0.700", "0.9876", "0.860", "0.800", "0.9876", "0.950", "1.000"]
    assert made.cells(page, "PPO by appa") == ["PPO by appa", *ppo]
    uniform = ["0.690", "0.650", "0.9876", "0.790", "0.750", "0.9876", "–", "1.000"]
    assert made.cells(page, "Uniform answer")[1:] == uniform
    assert made.cells(page, "Ceiling (worst group)")[4:6] == ["0.880", "0.840"]
    page = page.partition("<h2>Tables")[2]
    assert page.index(">SFT<") < page.index(">PPO by appa<") < page.index(">Uniform answer<")
    # The worst served group comes first: GOOD's Avg .860 with Min .800 is a = .800 and b = .920; by the survey .1 less
    # on average alone, so what each group has is the same.
    assert made.cells(page, "a")[1:5] == ["0.600", "0.770", "0.800", "0.750"]
    assert made.cells(page, "b")[3] == "0.920"
    groups = page.partition("<summary>Groups")[2]
    assert groups.index(">a<") < groups.index(">b<")


def example(number, *, apart, **answers):
    """A question of two options, to which methods and groups a and b give the first this share."""
    said = {
        name: {"shares": None if share is None else [share, 1 - share], "text": f"{share}"}
        for name, share in answers.items()
    }
    survey = {group: [0.5 + part, 0.5 - part] for group, part in (("a", apart), ("b", -apart))}
    return {
        "question_id": f"q{number}",
        "question": f"Question {number}?",
        "options": ["Yes", "No"],
        "answers": said,
        "survey": survey,
        "predictions": {"c": [0.5, 0.5]},
    }


def test_an_example_s_bars_are_the_run_s_own_answers(tmp_path, appa):
    run = two_rules(tmp_path, above=0.05)  # in which group a is worst off, and better off by the even questions
    shares = {q: {"sft": 0.1 + q / 100, "ppo": None if q == 3 else 0.3 + q / 100} for q in range(40)}
    apart = {q: 0.4 if q in (1, 2) else 0.1 for q in shares}
    made.write_run(run, examples=[example(q, apart=apart[q], **own) for q, own in shares.items()])
    theirs = [example(q, apart=apart[q], sft=own["sft"], ppo=0.6 + q / 100) for q, own in shares.items()]
    made.write_run(run / "average", examples=theirs)
    page = made.page_of(run)
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert [int(re.search(r"Question (\d+)", figure)[1]) for figure in figures] == [1, 2, 3, 5, 0, 4]
    said = appa("ask", run)
    for figure, q in zip(figures, (1, 2, 3, 5, 0, 4), strict=True):
        bars = dict(re.findall(r'style="width:([\d.]+)%" title="(.*?)">', figure.partition("No<")[0]))
        drawn = {name: float(width) / 100 for width, name in bars.items()}
        read = {"SFT": shares[q]["sft"], "PPO by mix": shares[q]["ppo"], "PPO by average": 0.6 + q / 100}
        assert drawn == {name: pytest.approx(share) for name, share in read.items() if share is not None}
        assert ("PPO by mix wrote" in figure) == (q == 3)
        dots = re.findall(r'class="(.*?)" style="left:([\d.]+)%" title="(\w) ', figure.partition("No<")[0])
        places = [("worst", "a", 0.5 + apart[q]), ("", "b", 0.5 - apart[q]), (" predicted", "c", 0.5)]
        assert dots == [(css, f"{100 * place:.1f}", name) for css, name, place in places]
        line = re.search(rf"Question {q}\?.*?│ Yes +│(.*?)\n", said, re.DOTALL)[1]
        assert re.findall(r"(\d+)%", line) == [f"{100 * share:.0f}" for share in read.values() if share is not None]


def test_a_ranking_is_shown_in_its_order_and_many_groups_by_quantiles():
    """PPO puts y first, then z."""
    rows = examples.rows("xyz", {"SFT": [3, 2, 1], "PPO by min": [1, 3, 2]}, {"a": [0.2, 0.5, 0.3]}, ranks=True)
    assert [(row.option, *(bar.text for bar in row.bars), row.dots[0].text) for row in rows] == [
        ("y", "2.", "1.", "1."),
        ("z", "3.", "2.", "2."),
        ("x", "1.", "3.", "3."),
    ]
    assert [row.bars[1].percent for row in rows] == pytest.approx([100, 200 / 3, 100 / 3])
    many = {f"g{number}": [number / 100, 1 - number / 100] for number in range(101)}
    first, _ = examples.rows("xy", {"SFT": [0.25, 0.75]}, many, ranks=False)
    assert [dot.percent for dot in first.dots] == pytest.approx([0, 5, 50, 95, 100])


def test_of_many_groups_the_page_has_quantiles_and_the_worst_ten(tmp_path):
    groups = tuple(f"g{number:03}" for number in range(101))
    folder = made.fake_run(tmp_path / "r", groups=groups, iterations=2)
    scored = json.loads((folder / "summary.json").read_text())
    for row in scored:
        row["per_group"] = {group: 0.4 + 0.005 * g for g, group in enumerate(groups)}
        if row["method"] == "sft":
            row["per_group"] |= dict.fromkeys(groups[20:60], math.nan)
    card = made.predictor_card(groups, distances=[{group: 1.0 for group in groups}] * 2)
    made.write_run(folder, summary=scored, pluralllm=card)
    page = made.page_of(folder)
    of_ppo = {name: made.cells(page, f"{name} of 101 groups")[3] for name in ("Least", "5 %", "Median", "95 %", "Most")}
    assert of_ppo == {"Least": "0.400", "5 %": "0.425", "Median": "0.650", "95 %": "0.875", "Most": "0.900"}
    table = page.partition("<summary>Groups")[2].partition("<h2>")[0]
    assert [group in table for group in groups] == [True] * 10 + [False] * 91  # the lowest scores of PPO
    assert sum(page.count(group) for group in groups) == 3 * 10 + 2 * 10 + 2  # tables, SFT's missing, worst and best
    assert "and 30 more" in page


def test_a_run_tells_the_command_that_makes_it_again_and_what_made_it(tmp_path):
    keys = {"groups": "Côte d'Ivoire;A, B", "eval.ceilings": False, "ppo.learning-rate": 0.5, "seed": 3}
    config = Config.load({**keys, "survey": "/s.jsonl", "run-name": "r", "run.output-dir": "/there"})
    words = shlex.split(command(config))
    assert words[:2] == ["appa", "run"]
    again = assemble([*words[2:], "run-name=r", "run.output-dir=/there"], folder=None)
    assert again == config
    serving = Config.load({"run.phases": "serve", "seed": 3})
    assert shlex.split(command(serving)) == ["appa", "serve", "seed=3", "run.phases=serve"]
    folder = made.scored_run(tmp_path)
    assert "Made by" not in made.page_of(folder)
    made.progressed(folder, "machine", "2 cores, no GPU")
    page = made.page_of(folder)
    assert "<dt>Made by</dt><dd>2 cores, no GPU</dd>" in page
    assert "<dt>Command</dt><dd>appa run metric=js seed=7 appa.fairness-threshold=0.99</dd>" in page


def test_the_values_of_every_rule_s_parameters_are_shown(tmp_path):
    values = {"appa": {"temperature": "0.02"}, "average": {}, "own:wide": {"margin": "0.2", "ema_decay": "0.8"}}
    rules = {name: {"parameters": parameters} for name, parameters in values.items()}
    config = CONFIG | {"rule": "own:wide", "baseline-rules": "appa"}
    facts = dict(provenance(made.read(tmp_path, config=config, rules=rules)))
    shown = {name: text for name, text in facts.items() if name.startswith("Parameters of ")}
    assert shown == {
        "Parameters of appa": "temperature = 0.02",
        "Parameters of own:wide": "margin = 0.2, ema_decay = 0.8",
    }


def test_all_metrics_stand_side_by_side_in_the_paper_s_order(tmp_path):
    summary = [
        row
        for metric, avg, low in (("cosine", 0.66, 0.55), ("js", 0.86, 0.75), ("wasserstein", 0.76, 0.65))
        for method in ("base", "ppo")
        for row in made.rows(method, avg, low, metric=metric)
    ]
    page = made.page_of(made.write_run(tmp_path, config=CONFIG, summary=summary))
    # Avg AS by js, wasserstein, cosine, and Min AS by the same
    assert made.cells(page, "survey")[1:8] == ["Base", "0.760", "0.660", "0.560", "0.650", "0.550", "0.450"]
    assert "0.8765" in made.cells(page, "survey")  # FI over the readable answers


def test_all_text_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\"q\""
    groups = (evil, "a")  # of whom the first is missing in iteration 17
    folder = made.fake_run(tmp_path, groups=groups, iterations=17)
    config = CONFIG | {"model": evil, "policy.tuning": "lora", "survey": evil, "groups": f"a,{evil}"}
    summary = [row for method in METHODS for row in made.rows(method, 0.8, 0.7, metric=evil, groups=groups)]
    page = made.page_of(made.write_run(folder, config=config, summary=summary))
    assert "<script" not in page
    assert escape(evil) in page
    assert page.count(escape("alert('x')")) >= 12


def test_page_needs_no_other_file_however_many_groups_and_whatever_was_not_measured(tmp_path):
    groups = tuple(f"$group {i} of many with a very long name$" for i in range(14))
    lines = [made.line(n, planned=6, fell_back=n % 3 == 0, groups=groups) for n in range(1, 7)]
    for entry in lines:
        entry["rewards"][groups[0]] = None
        entry |= {"missing_groups": [groups[0]], "kl": float("nan")}
    page = build(made.write_run(made.fake_run(tmp_path, groups=groups, iterations=1), metrics=lines)).read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    pictures = list((tmp_path / "plots").iterdir())
    assert len(sources) == len(pictures) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in pictures)
    assert "incomplete" not in page
    assert not list(tmp_path.rglob(".*"))  # nothing half-written
    assert [made.cells(page, group)[-1] for group in groups[:2]] == ["6", "0"]  # iterations missed


def test_config_alone_makes_a_report_that_says_what_is_missing(tmp_path):
    page = made.page_of(made.write_run(tmp_path, config=CONFIG))
    assert "This report is incomplete" in page
    assert "<dd>Base, SFT, PPO, PPO by average</dd>" in page
    assert "<dd>no pluralllm.json</dd>" in page
    assert made.cells(page, "appa.fairness-threshold") == ["appa.fairness-threshold", "0.99"]
    few = [made.row(method, *GOOD[method]) for method in ("base", "ppo")]
    page = made.page_of(made.write_run(tmp_path, summary=few, pluralllm=made.predictor_card()))
    assert "<dd>SFT, PPO by average</dd>" in page
    assert "truth in may-leave" in page
    assert "no pluralllm" not in page
    assert ">None<" not in page
    assert ">survey</th>" not in page


def test_a_run_that_stopped_midway_says_where_and_a_repeated_iteration_counts_once(tmp_path):
    # One iteration takes 1 + .5 + .25 + 2.25 = 4 s, .5 of it waiting.
    took = ((1, True), (2, True), (2, False), (3, True), (4, True))
    run = made.read(tmp_path, metrics=[made.line(i, planned=10, fell_back=mean) for i, mean in took])
    facts = dict(provenance(run))
    assert re.findall(r"[\d.]+", facts["Plain mean taken"]) == ["3", "4"]
    assert facts["Waiting for groups"].startswith("12.5%")
    assert facts["Time of PPO"] == "16.0 s"
    assert dict(missing(run))["Iterations"].startswith("4 of 10")
    without = [made.line(1, planned=1, fell_back=None)]
    assert "Plain mean taken" not in dict(provenance(made.read(tmp_path, metrics=without)))


def test_a_run_until_pluralllm_lacks_nothing(tmp_path):
    alone = {"config": {**CONFIG, "run.phases": "pluralllm"}, "pluralllm": made.predictor_card()}
    assert [*missing(made.read(tmp_path, **alone))] == []
    table = made.page_of(tmp_path).partition("JS by group")[2]
    named = re.findall(r"<td>(\w[^<]*)</td>", table)
    assert [name for name in named if name in made.COUNTRIES] == [*made.COUNTRIES[::-1]]  # the worst predicted first
    assert [*missing(made.read(tmp_path, config=CONFIG))]


def test_a_group_stands_out_in_rounds_whose_steps_are_half_again_as_far_as_the_median_s(tmp_path):
    far = [{"a": 1.9, "b": 2.0, "c": 2.1}, {"a": 1.0, "b": 1.1, "c": 18.0}, {"a": 1.0, "c": 2.5}]
    card = made.predictor_card("abc", distances=far)
    steps = made.page_of(made.write_run(tmp_path, config=CONFIG, pluralllm=card)).partition("Steps by group")[2]
    # medians of the rounds are 2.0, 1.1 and 1.75
    assert made.cells(steps, "c") == ["c", "2.500", "18.000", "2", "2"]
    assert made.cells(steps, "b") == ["b", "1.550", "2.000", "1", ""]
    assert steps.index("<td>c</td>") < steps.index("<td>b</td>")
    panel = plots.pretraining.__wrapped__(read_run(tmp_path).pluralllm).axes[1]
    assert [line.get_xydata().tolist() for line in panel.lines][1] == [[1, 2.0], [2, 1.1]]


def test_pictures_are_not_written_through_a_link(tmp_path):
    folder = made.write_run(tmp_path / "run", config=CONFIG, pluralllm=made.predictor_card())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (folder / "plots").symlink_to(theirs)
    with pytest.raises(UserError, match=f"^{folder / 'plots'}: is a link"):
        build(folder)
    assert list(theirs.iterdir()) == []


def test_a_broken_file_leaves_the_old_report_alone(tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.json"):
        build(tmp_path)
    made.write_run(tmp_path, config=CONFIG, summary=[made.row("ppo", 0.8, 0.7) | {"fi": "0.9"}])
    with pytest.raises(UserError, match=r"summary\.json: 0\.fi: "):
        build(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_group_that_did_not_score_a_method_is_named(tmp_path):
    rows = [*made.rows("sft", 0.8, 0.7), *made.rows("ppo", 0.9, 0.8)]
    assert not any("scored" in what for what, _ in missing(made.read(tmp_path, summary=rows)))
    for row in rows:
        if row["against"] == "survey" or row["method"] == "ppo":
            row["per_group"]["a"] = float("nan")
    facts = dict(missing(made.read(tmp_path, summary=rows)))
    assert facts["Not scored against survey by a"] == "SFT, PPO"
    assert facts["Not scored against predictions by a"] == "PPO"
