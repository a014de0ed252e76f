"""PluralLLM's scores on the server: from each group's sums or from their total, and the faults that sums may have.

Axis letters: L sums, Q questions, N answered questions.
"""

import numpy as np
import pytest
from fake_groups import FakeGroups
from fakes import FakeGrid, catalogue_of
from in_process import SimulatedGrid, flower_task, simulated
from small import SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.protocol.asks import SCORES
from client_app.memory import memory_of
from pluralllm.data import GroupData, group_data
from pluralllm.scores import mean_of_groups, measure_sums, summed
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.predictor.pretraining import initial_weights
from server_app.predictor_phase import fault, means, scores
from server_app.questions import build_catalogue, run_survey

CATALOGUE = catalogue_of([2] * 25, train=[True] * 20 + [False] * 5)
SIZE = 5
PLACES = {name: place for place, name in enumerate(summed())}


def sums(answers=0, js=0.0):
    """A group's sums (L,) from its answers and their mean JS: the other measures and predictors follow from that."""
    score_L = np.zeros(len(PLACES))
    for name, less in (("pluralllm", 0.0), ("uniform", 0.2), ("nearest-question", 0.1)):
        mean_of = {"answers": 1.0, "js": js - less, "js_distance": js - less - 0.1, "wasserstein": js - less}
        for measure, mean in mean_of.items():
            score_L[PLACES[name, measure]] = answers * mean
    return score_L


BY_GROUP = {
    "A": sums(4, 0.9),
    "B": sums(1, 0.4),
    "C": sums(),  # has answered no held-out question
}


def scored(by_group, **keys):
    node = FakeGroups([*by_group], lambda ask, name: {"scores": by_group[name]})
    groups = Groups(OverlapGrid(FakeGrid({1: node})), Config.load({"run.min-groups": 1, **keys}))
    groups.grid.simulated = True
    groups.gather((), patience=0.0)
    groups.send_catalogue(CATALOGUE)
    found = scores(groups, CATALOGUE)
    assert [ask.kind for ask in node.asked] == [SCORES]
    return found


@pytest.mark.parametrize("run_sums", ["plain", "secure"])
def test_means_are_over_answers(run_sums):
    found = scored(BY_GROUP, **{"run.sums": run_sums})
    assert found["scores"].keys() == {"pluralllm", "uniform", "nearest-question"}
    expected = {"answers": 5, "js": 0.8, "js_distance": 0.7, "wasserstein": 0.8}
    assert found["scores"]["pluralllm"] == pytest.approx(expected)  # (4 x 0.9 + 0.4) / 5, not (0.9 + 0.4) / 2
    if run_sums == "secure":
        assert found["groups"] == {}
        return
    assert found["groups"]["B"]["pluralllm"]["js"] == pytest.approx(0.4)
    assert found["groups"]["C"] == {}


def test_a_masked_sum_s_count_is_a_whole_number():
    assert means(BY_GROUP["A"] + 1e-9)["pluralllm"]["answers"] == 4
    assert means(np.full(len(PLACES), 1e-9)) == {}


def changed(measure, value, name="uniform"):
    score_L = BY_GROUP["A"].copy()
    score_L[PLACES[name, measure]] = value
    return score_L


@pytest.mark.parametrize(
    "score_L",
    [
        changed("answers", 3.0),  # of pluralllm 4
        changed("answers", 2.0, name="pluralllm-shared"),  # of mean-of-others 0
        changed("js", 4.1),
        changed("wasserstein", 0.1, name="mean-of-others"),  # of no answer
        sums(6, 0.5),
        sums(3.5, 0.5),
    ],
)
def test_a_group_whose_sums_cannot_be_is_left_out_and_named(score_L, caplog):
    assert fault(score_L, SIZE)
    found = scored({**BY_GROUP, "A": score_L})
    assert "A" not in found["groups"]
    assert found["scores"]["pluralllm"]["answers"] == 1
    assert "group A" in caplog.text


def test_sums_that_can_be_are_taken():
    for part in (5, 1.0), (4, 0.9), ():
        assert fault(sums(*part), SIZE) is None


SMALL = {"data.num-questions": 40, "data.num-groups": 6, "run.min-groups": 1, **SMALL_PREDICTOR, **VOTES}


def card_scores(config, num_nodes):
    """The scores of a card, through the groups' real ClientApp."""
    with flower_task():
        catalogue = build_catalogue(config)
        nodes = simulated(config, num_nodes)
        survey = memory_of(next(iter(nodes.values())))["survey"].decode()
        groups = Groups(OverlapGrid(SimulatedGrid(nodes)), config, survey=survey)
        groups.gather((), patience=0.0)
        groups.send_catalogue(catalogue)
        groups.send_targets(initial_weights(config))
        found = scores(groups, catalogue)
    return found, catalogue


def mean_score(data, others, catalogue):
    """The sums of a group's answers against the others' mean, from a place that has all answers."""
    mean_QK = mean_of_groups(others, catalogue, without=data.group, min_groups=1)
    known_N = mean_QK[data.question_N].any(axis=1)
    rows = data.question_N[known_N]
    return measure_sums(mean_QK[rows], data.answer_NK[known_N].astype(np.float64), catalogue.option_QK[rows])


def test_in_a_simulation_each_group_is_scored_by_the_mean_of_the_others():
    config = Config.load(SMALL)
    survey = run_survey(config)
    found, catalogue = card_scores(config, 6)
    held_out = {catalogue.questions[q].question_id for q in np.flatnonzero(catalogue.held_out_Q)}
    everyone = [
        group_data(name, {key: mine[key] for key in mine.keys() & held_out}, public=catalogue)
        for name, mine in survey.answers.items()
    ]
    count_Q = np.bincount(np.concatenate([data.question_N for data in everyone]), minlength=len(catalogue.questions))
    for data in everyone:
        enough_N = count_Q[data.question_N] >= 3  # of a question's groups, its own among them
        assert enough_N.sum() > 0
        mine = GroupData(data.group, data.question_N[enough_N], data.answer_NK[enough_N])
        expected = mean_score(mine, [other for other in everyone if other.group != data.group], catalogue)
        mean_of = {key: value / expected["answers"] for key, value in expected.items()} | {
            "answers": expected["answers"]
        }
        assert found["groups"][data.group]["mean-of-others"] == pytest.approx(mean_of, abs=1e-9)
    assert card_scores(config, 2)[0] == found  # how groups share nodes changes no digit
