"""The page of a report: the files give its numbers, what is missing is said, text cannot break it."""

from __future__ import annotations

import json
import re
import shlex

from markupsafe import escape
from report_runs import (
    CONFIG,
    GOOD,
    PNG_START,
    built_page,
    cells,
    fake_run,
    line,
    page_of,
    predictor_card,
    predictor_scores,
    row,
    scored_run,
    write_run,
)

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.report.page import command
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
    scores = {"fi": 0.9, "avg_as": 0.6, "min_as": 0.5, "per_group": run}
    write_run(
        tmp_path,
        config=CONFIG | {"model": evil, "policy.tuning": "lora", "survey": evil, "groups": f"a,{evil}"},
        summary=[
            {"method": method, "metric": evil, **scores, "format_score": 0.9, "survey": scores} for method in METHODS
        ],
        metrics=[line(1, planned=9, fell_back=None, groups=tuple(run)) | {"missing_groups": [evil]}],
        phases=[{"phase": evil, "seconds": 1.0}],
        pluralllm=predictor_card(
            scores={f"{evil}/held-out": {evil: predictor_scores(0.5), "pluralllm": predictor_scores(0.5)}},
            groups={evil: {f"seen{evil}/held-out": {evil: predictor_scores(0.5)}}},
        ),
        examples=[{"question": evil, "options": [evil], "sft": evil, "ppo": evil, "mean_reward": 0.5}],
    )
    page = page_of(tmp_path)
    assert "<script" not in page
    assert escape(evil) in page
    assert page.count(escape("alert('x')")) >= 12


def test_page_needs_no_other_file_however_many_groups_and_whatever_was_not_measured(tmp_path):
    groups = tuple(f"$group {i} of many with a very long name$" for i in range(14))
    lines = [line(n, planned=32, fell_back=n % 3 == 0, groups=groups) for n in range(1, 33)]
    for entry in lines:
        entry["rewards"][groups[0]] = None
        entry |= {"missing_groups": [groups[0]], "kl": float("nan")}
    page = built_page(write_run(fake_run(tmp_path, groups=groups, iterations=1), metrics=lines))
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    pictures = list((tmp_path / "plots").iterdir())
    assert len(sources) == len(pictures) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    assert all(path.suffix == ".png" and path.read_bytes().startswith(PNG_START) for path in pictures)
    assert page.count('alt="loss of PluralLLM over its rounds" title="pluralllm"') == 1
    assert "incomplete" not in page
    assert not list(tmp_path.rglob(".*"))  # nothing half-written
    assert [cells(page, group)[-1] for group in groups[:2]] == ["32", "0"]  # iterations missed


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


def test_unseen_groups_are_marked(tmp_path):
    fake_run(tmp_path, groups=("a", "b", "c"), iterations=1)
    marked = page_of(write_run(tmp_path, config={**CONFIG, "pluralllm.unseen-groups": "b"}))
    assert (marked.count("<td>b (unseen)</td>"), marked.count("<td>c (unseen)</td>")) == (1, 0)
