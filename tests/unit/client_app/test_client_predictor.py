"""A node's round of PluralLLM: the mean over the groups it hosts, which FedAvg over nodes makes the mean over all.

Axis letters: G groups, N answered questions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from client_node import config_of
from client_node import weights as named_weights
from flwr.app import Array, ArrayRecord

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import js_distance
from client_app import predictor
from client_app.predictor import Predictor
from pluralllm.architectures import build
from pluralllm.data import GroupData, OptionEmbedding, group_data, option_embedding
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig
from pluralllm.residual import SHARES, SHARES_KEY, START_SHARES
from pluralllm.training import local_update
from server_app.federation.catalogue import build_catalogue, run_survey
from server_app.predictor.pretraining import initial_weights

CONFIG = config_of(
    data__num_groups=3,
    pluralllm__local_steps=Config.load({}).pluralllm.local_steps,
    pluralllm__strategy="fedavg",
    pluralllm__rounds=100,  # from round 5 on steps no longer rise, and they do not fall yet
    pluralllm__learning_rate=0.01,
)
ATTENTION = {"pluralllm.architecture": "attention"}
SIZES = ModelConfig.of(CONFIG.pluralllm.architecture)


@pytest.fixture(scope="module")
def start() -> ArrayRecord:
    torch.manual_seed(1)
    return wire.join_weights(ArrayRecord(build(SIZES).state_dict()))


@pytest.fixture(scope="module")
def embedding() -> OptionEmbedding:
    return option_embedding(build_catalogue(CONFIG))


@pytest.fixture(scope="module")
def groups(embedding) -> list[GroupData]:
    """Three groups, of which the first keeps 5 answers, so that equal weights would be wrong."""
    found = []
    for g, (name, mine) in enumerate(run_survey(CONFIG).answers.items()):
        answers = dict(list(mine.items())[: 5 if g == 0 else None])
        found.append(group_data(name, answers, embedding=embedding))
    return found


def weights(config: Config) -> ArrayRecord:
    return wire.join_weights(named_weights(config))


def flat(weights: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().astype(np.float64).ravel() for array in weights.values()])


def test_groups_on_one_node_are_averaged_as_if_each_had_a_node_of_its_own(start, embedding, groups):
    together = predictor.train_round(CONFIG, start, groups, embedding, round_number=6)
    alone = [predictor.train_round(CONFIG, start, [group], embedding, round_number=6) for group in groups]
    sizes = np.array([len(group) for group in groups])
    assert [trained.num_examples for trained in alone] == sizes.tolist()
    assert sizes[0] == 5
    assert sizes[1:].min() > 10
    assert together.num_examples == sizes.sum()
    weight_G = np.stack([flat(trained.weights) for trained in alone])
    fedavg = sum(size * weights for size, weights in zip(sizes, weight_G, strict=True)) / sizes.sum()
    np.testing.assert_allclose(flat(together.weights), fedavg, atol=1e-6)
    # the groups moved, in different directions, so that another weighting would show
    assert np.abs(weight_G - flat(start)).max(1).min() > 1e-3
    assert np.abs(weight_G.mean(0) - fedavg).max() > 1e-4
    losses = np.array([trained.loss for trained in alone])
    assert together.loss == pytest.approx(float(losses @ sizes / sizes.sum()))
    assert together.weights.keys() == start.keys()


def test_a_group_alone_sends_its_locally_trained_weights_as_they_are(start, embedding, groups):
    torch.manual_seed(99)  # the process's own generator must not matter
    model, ours, settings = build(SIZES), groups[0], CONFIG.pluralllm
    named = wire.split_weights(start, {name: value.shape for name, value in model.state_dict().items()})
    model.load_state_dict(named.to_torch_state_dict())
    generator = torch.Generator().manual_seed(child_seed(CONFIG.seed, "pluralllm", ours.group, 7))
    given = {"steps": settings.local_steps, "learning_rate": 0.01, "optimizer": "adam", "generator": generator}
    episodes = EpisodeConfig(num_context=4, least_context=4, num_episodes=1)
    loss = local_update(model, ours, embedding, episodes=episodes, **given)
    trained = predictor.train_round(CONFIG, start, groups[:1], embedding, round_number=7)
    # multiplied by 5 answers and divided by them again: the last bit may differ
    np.testing.assert_allclose(
        flat(trained.weights), flat(wire.join_weights(ArrayRecord(model.state_dict()))), rtol=1e-6, atol=1e-9
    )
    assert (trained.num_examples, trained.loss) == (5, pytest.approx(loss))


def test_a_group_without_answers_weighs_nothing(start, embedding, groups):
    nobody = group_data("Nobody", {}, embedding=embedding)
    with_nobody, without = (
        predictor.train_round(CONFIG, start, members, embedding, round_number=5)
        for members in ([nobody, groups[1]], [groups[1]])
    )
    np.testing.assert_array_equal(flat(with_nobody.weights), flat(without.weights))
    assert (with_nobody.num_examples, with_nobody.loss) == (without.num_examples, without.loss)
    with pytest.raises(UserError, match="no group"):
        predictor.train_round(CONFIG, start, [nobody], embedding, round_number=5)


def test_fedprox_holds_a_groups_weights_back(embedding, groups):
    # attention: the gradients of the kernel's numbers are so large that all is clipped, and so is what mu adds
    config = Config.load({**CONFIG.flat(), **ATTENTION, "pluralllm.strategy": "fedadam", "pluralllm.local-steps": 8})
    start = wire.join_weights(initial_weights(config))

    def moved(proximal):
        found = predictor.train_round(config, start, groups[1:2], embedding, round_number=1, proximal=proximal)
        return np.linalg.norm(flat(found.weights) - flat(start))

    free = moved(0.0)
    assert 0 < moved(20.0) < 0.8 * free
    assert moved(1e-6) == pytest.approx(free, rel=1e-3)


@pytest.mark.parametrize(("strategy", "share"), [("fedavg", 3 / 50), ("fedprox", 3 / 50), ("fedadam", 1.0)])
def test_where_the_server_only_averages_the_groups_own_steps_fall_at_the_end(strategy, share, start, embedding, groups):
    def moved(rounds):
        keys = {"strategy": strategy, "local-steps": 1, "rounds": rounds}
        config = Config.load({**CONFIG.flat(), **{f"pluralllm.{key}": value for key, value in keys.items()}})
        found = predictor.train_round(config, start, groups[1:2], embedding, round_number=50)
        return flat(found.weights) - flat(start)

    # round 50 of 100 is before the last third, round 50 of 50 the end of it: 1 of 50 / 3 rounds is left
    halfway, at_the_end = moved(100), moved(50)
    assert np.abs(halfway).max() > 1e-4
    np.testing.assert_allclose(at_the_end, share * halfway, atol=1e-6)


def loaded(embedding, given, *, train_Q=None, **changes) -> Predictor:
    """A predictor with these weights; every question is for training unless `train_Q` says otherwise."""
    every_Q = np.ones(len(embedding.option_QK), dtype=bool)
    return predictor.load(
        Config.load({**CONFIG.flat(), **changes}), given, embedding, every_Q if train_Q is None else train_Q
    )


def scored(start, embedding, answers: GroupData, *, count: int, least=1, mean_of_others=None, **changes):
    """What a group tells whose first answers are training answers, with all other questions held out; their number."""
    train_Q = np.zeros(len(embedding.option_QK), dtype=bool)
    train_Q[answers.question_N] = True
    mine = answers.first(count)
    truth_QK = np.full(embedding.option_QK.shape, np.nan)
    truth_QK[answers.question_N] = answers.answer_NK
    truth_QK[~train_Q] = answers.answer_NK[0]
    ours = loaded(embedding, start, train_Q=train_Q, **changes)
    held_out = predictor.held_out_answers("A", truth_QK, train_Q)
    found = ours.scores(mine, ours.table(mine, draw=0), held_out, least=least, mean_of_others=mean_of_others)
    return found, (~train_Q).sum()


def test_few_training_answers_are_not_scored_for_the_server(start, embedding, groups):
    for count, least in ((9, 1), (10, 11)):
        few, _ = scored(start, embedding, groups[1], count=count, least=least)
        assert few.keys() == {"held-out"}
    enough, held_out = scored(start, embedding, groups[1], count=10)
    assert enough["training"]["pluralllm"]["answers"] == 10
    assert enough["held-out"]["pluralllm"]["answers"] == held_out


def test_no_two_sums_differ_by_a_few_training_answers(start, embedding, groups):
    """The sum over 16 answers less that over 15 of them would be one answer's score."""
    answers = groups[1]
    mean_QK = embedding.option_QK / embedding.option_QK.sum(1, keepdims=True)
    for unknown, sent in ((0, True), (1, False), (9, False), (len(answers) - 9, False)):
        known_QK = mean_QK.copy()
        known_QK[answers.question_N[:unknown]] = 0.0
        found, _ = scored(start, embedding, answers, count=len(answers), mean_of_others=known_QK)
        assert ("mean-of-others" in found["training"], "pluralllm-shared" in found["training"]) == (sent, sent), unknown
        assert "mean-of-others" in found["held-out"]


def test_a_group_without_held_out_answers_has_a_table_and_scores(start, embedding, groups):
    ours = loaded(embedding, start)
    for known in (groups[1], groups[1].first(0)):
        sums = ours.scores(known, ours.table(known, draw=0), known.first(0), least=1, mean_of_others=None)
        assert sums["held-out"]["pluralllm"]["answers"] == 0.0


def split(whole: GroupData, num_training: int) -> tuple[GroupData, GroupData]:
    """Its first answers as those it trains with, the others as held out."""
    rest = slice(num_training, None)
    return whole.first(num_training), GroupData(whole.group, whole.question_N[rest], whole.answer_NK[rest])


def distances(prediction_QK, truth: GroupData, embedding) -> list[float]:
    """Natural Jensen-Shannon distances."""
    rows = truth.question_N
    return (1 - js_distance(prediction_QK[rows], truth.answer_NK, embedding.option_QK[rows], base=np.e)).tolist()


@pytest.mark.parametrize(("changes", "num_choices"), [(ATTENTION, 1), ({}, 7)])
def test_a_round_is_validated_by_its_distance_to_held_out_answers(changes, num_choices, embedding, groups):
    # by hand: a fresh network answers uniformly, and a kernel of nothing says that all groups are alike
    mine, truth = split(groups[1], 8)
    fresh = initial_weights(Config.load({**CONFIG.flat(), **changes}))
    nothing = {key: Array(array.numpy() - 9) for key, array in fresh.items() if key in ("log_weight", "log_feature")}
    uniform_QK = embedding.option_QK / embedding.option_QK.sum(1, keepdims=True)
    expected = distances(uniform_QK, truth, embedding)
    train_Q = np.zeros(len(uniform_QK), dtype=bool)
    ours = loaded(embedding, wire.join_weights(ArrayRecord({**fresh, **nothing})), train_Q=train_Q, **changes)

    def is_mean(error):
        return [pytest.approx(error, abs=1e-6)] * num_choices

    assert ours.validate([(mine, truth)]) == (len(truth), is_mean(np.mean(expected)))
    nobody, one = truth.first(0), truth.first(1)
    mean = (sum(expected) + expected[0]) / (len(truth) + 1)
    assert ours.validate([(mine, nobody), (mine, truth), (mine, one)]) == (len(truth) + 1, is_mean(mean))
    assert ours.validate([(mine, nobody)]) == (0, [0.0] * num_choices)


def test_validation_tells_what_each_share_of_the_views_would_be_worth(embedding, groups):
    mine, truth = split(groups[1], 8)
    train_Q = np.zeros(len(embedding.option_QK), dtype=bool)
    train_Q[mine.question_N] = True
    given = named_weights(CONFIG)

    def predicted(shares):
        chosen = ArrayRecord({**given, SHARES_KEY: Array(np.array(shares, dtype=np.float32))})
        return loaded(embedding, wire.join_weights(chosen), train_Q=train_Q).table(mine, draw=0)

    expected = [np.mean(distances(predicted(shares), truth, embedding)) for shares in SHARES]
    assert np.ptp(expected) > 1e-3
    ours = loaded(embedding, wire.join_weights(given), train_Q=train_Q)
    num_answers, errors = ours.validate([(mine, truth)])
    assert (num_answers, errors) == (len(truth), pytest.approx(expected, abs=1e-6))
    assert ours.model.shares == START_SHARES  # as it came
