"""Episodes, the loss, local updates, and that the network learns to use its context.

Axis letters: B episodes, M target questions, K options, N answered questions, Q questions, E embedding.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from appa_flwr.errors import UserError
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.episodes import REAL_SHARE, STRETCH, EpisodeConfig, Episodes, sample_episodes
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.training import (
    CROSS_ENTROPY_SHARE,
    MAX_GRADIENT_NORM,
    js_distance_loss,
    local_update,
    loss,
    soft_cross_entropy,
    step_size_factor,
    train_centrally,
)

Q, K, E = 30, 3, 8


def embedding(seed: int = 0, *, num_options: int = K) -> OptionEmbedding:
    value = np.random.default_rng(seed).normal(size=(Q, num_options, E)).astype(np.float32)
    return OptionEmbedding(tuple(f"q{q}" for q in range(Q)), value, np.ones((Q, num_options), dtype=np.bool_))


def random_group(num_answers: int, seed: int = 0) -> GroupData:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(Q)[:num_answers]).astype(np.int64)
    return GroupData("Here", rows, rng.dirichlet(np.ones(K), size=num_answers).astype(np.float32))


def small_model(seed: int = 0) -> PluralLLM:
    torch.manual_seed(seed)
    return PluralLLM(ModelConfig(embedding_dim=E, hidden_dim=16, num_blocks=1, num_heads=2))


def drawn(data: GroupData, population: np.ndarray | None = None, **sizes: float) -> Episodes:
    config = EpisodeConfig(**sizes)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    return sample_episodes(data, embedding(), config=config, generator=generator, population=population)


def one_hot_group() -> GroupData:
    return replace(random_group(20), answer_NK=np.eye(K, dtype=np.float32)[np.arange(20) % K])


def updated(model: PluralLLM, data: GroupData, *, config: EpisodeConfig, **changes: float) -> float:
    """The loss of `local_update` by plain gradient descent with seed 5."""
    given = {"steps": 1, "learning_rate": 0.1, **changes}
    generator = torch.Generator().manual_seed(5)
    return local_update(model, data, embedding(), optimizer="sgd", episodes=config, generator=generator, **given)


def test_context_and_targets_are_disjoint_distinct_and_the_groups_own() -> None:
    data, table = random_group(20), embedding()
    batch = drawn(data, num_context=6, num_targets=9, num_episodes=50, embedding_noise=0.0)
    assert (batch.context.options.shape, batch.target.options.shape) == ((50, 6, K), (50, 9, K))
    assert all(len(set(question)) == 15 for question in batch.question.tolist())
    assert set(batch.question[:, :6].flatten().tolist()) == set(data.question_N.tolist())  # each takes both parts
    assert set(batch.question[:, 6:].flatten().tolist()) == set(data.question_N.tolist())
    # answers and features belong to the question they are drawn with, and without a prior they stay as they are
    answer_of = dict(zip(data.question_N.tolist(), data.answer_NK, strict=True))
    for part, question_BS in ((batch.context, batch.question[:, :6]), (batch.target, batch.question[:, 6:])):
        assert part.population is None
        np.testing.assert_array_equal(part.embedding, table.value_QKE[question_BS])
        np.testing.assert_array_equal(part.answer, [[answer_of[q] for q in row] for row in question_BS.tolist()])


def test_noise_moves_a_question_but_not_its_options_apart() -> None:
    batch = drawn(random_group(5), num_context=2, num_targets=3, num_episodes=400, embedding_noise=0.5)
    moved = batch.target.embedding - torch.from_numpy(embedding().value_QKE)[batch.question[:, 2:]]
    torch.testing.assert_close(moved, moved[:, :, :1].expand_as(moved), atol=1e-6, rtol=0)
    amount = moved[:, :, 0].std(-1)
    assert float((amount == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    # uniform up to 0.5 for the other half: a mean square of 0.5^2 / 3
    assert float(moved[:, :, 0][amount > 0].square().mean()) == pytest.approx(0.25 / 3, rel=0.1)


def test_a_small_group_keeps_targets() -> None:
    for size, parts in ((5, (2, 3)), (1, (0, 1))):
        batch = drawn(random_group(size), num_context=16, num_targets=32, num_episodes=1)
        assert (batch.context.options.shape[1], batch.target.options.shape[1]) == parts
    with pytest.raises(UserError, match="'Here' has no answered training question"):
        drawn(random_group(0))


@pytest.mark.parametrize(
    ("term", "p", "answer", "sizes", "expected"),
    [
        # -ln 1/2, and -(ln 1/4 + ln 3/4) / 2
        (
            soft_cross_entropy,
            [[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0] * 3],
            [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0] * 3],
            [3, 2, 0],
            pytest.approx((math.log(2) + (math.log(4) + math.log(4 / 3)) / 2) / 2, abs=1e-6),
        ),
        # the first is right, and the root's floor leaves 0.01; the second has a natural divergence of 0.21576
        (
            js_distance_loss,
            [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]],
            [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
            [2, 2, 0],
            pytest.approx((0.01 + math.sqrt(0.21576)) / 2, abs=2e-4),
        ),
    ],
)
def test_terms_of_the_loss_by_hand_where_padding_neither_adds_nor_divides(term, p, answer, sizes, expected) -> None:
    options = torch.arange(len(p[0])) < torch.tensor(sizes)[None, :, None]
    log_p = torch.tensor([p]).log().requires_grad_()
    value = term(log_p, torch.tensor([answer]), options)
    assert value.item() == expected
    (gradient,) = torch.autograd.grad(value, log_p)
    assert gradient.isfinite().all()
    assert (gradient[~options] == 0).all()


def test_loss_with_a_population_prior_by_hand() -> None:
    others = np.zeros((Q, K, 1))  # nobody else answered: all answers stay, and the untrained network answers uniformly
    batch = drawn(one_hot_group(), others, num_context=4, num_targets=16, num_episodes=1)
    # m = (2/3, 1/6, 1/6), JSD = 1/2 [1/3 ln 1/2 + 2/3 ln 2] + 1/2 ln 3/2 = 0.31826, distance 0.5641
    expected = 0.5642 + CROSS_ENTROPY_SHARE * math.log(3)
    assert float(loss(small_model(), batch).detach()) == pytest.approx(expected, abs=2e-4)


def test_steps_rise_and_then_fall_to_nothing() -> None:
    factor = [step_size_factor(step, 60) for step in range(60)]
    assert factor[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor[5:41] == [1.0] * 36
    assert factor[50] == pytest.approx(0.5)
    assert factor[59] == pytest.approx(0.05)
    assert step_size_factor(0, 1) > 0.0


def test_invented_groups_differ_from_the_others_along_the_same_line() -> None:
    data = random_group(20)
    data = replace(data, answer_NK=np.tile(np.array([0.6, 0.2, 0.2], dtype=np.float32), (20, 1)))
    prior = np.zeros((Q, K))
    prior[data.question_N] = 1 / 3
    prior[data.question_N[0]] = 0.0  # nobody else answered it
    batch = drawn(data, prior[..., None], num_context=4, num_targets=16, num_episodes=400, population_dropout=0.25)
    assert batch.target.population is not None
    lone = batch.question[:, 4:] == int(data.question_N[0])
    torch.testing.assert_close(batch.target.answer[lone][:, 0], torch.full((int(lone.sum()),), 0.6))
    assert (batch.target.population[lone] == 0).all()
    # log-odds against a uniform mean: ln 3 for the group itself, a multiple of it for the invented ones
    odds = (batch.target.answer[..., 0] / batch.target.answer[..., 1]).log() / math.log(3)
    stretch = odds.masked_fill(lone, float("nan")).nanmedian(dim=1).values
    assert (odds - stretch[:, None])[~lone].abs().max() < 1e-4
    real = (stretch - 1).abs() < 1e-5
    assert float(real.float().mean()) == pytest.approx(REAL_SHARE, abs=0.08)
    assert float(stretch[~real].min()) < -1.2
    assert float(stretch.abs().min()) > STRETCH[0] - 1e-4
    assert float(stretch.abs().max()) < STRETCH[1] + 1e-4
    dropped = (batch.target.population[..., 0].sum(-1) == 0) & ~lone
    assert float(dropped.float().sum() / (~lone).float().sum()) == pytest.approx(0.25, abs=0.03)


def test_proximal_update_matches_autograd_on_the_full_objective() -> None:
    data, table, steps, rate, mu = random_group(20), embedding(), 4, 0.5, 0.7
    config = EpisodeConfig(num_context=4, num_targets=8, num_episodes=2)
    start = small_model()
    ours, slow = copy.deepcopy(start), copy.deepcopy(start)
    updated(ours, data, config=config, steps=steps, learning_rate=rate, proximal=mu)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        batch = sample_episodes(data, table, config=config, generator=generator)
        distance = sum(
            ((w - w0.detach()) ** 2).sum() for w, w0 in zip(slow.parameters(), start.parameters(), strict=True)
        )
        slow.zero_grad()
        (loss(slow, batch) + mu / 2 * distance).backward()
        torch.nn.utils.clip_grad_norm_(slow.parameters(), MAX_GRADIENT_NORM)
        with torch.no_grad():
            for w in slow.parameters():
                w -= rate * w.grad
    for mine, reference in zip(ours.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-6, rtol=0)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours.parameters(), start.parameters(), strict=True))


def test_the_network_learns_to_read_the_group_from_its_context() -> None:
    """Half the groups say yes to everything with 0.9, the others no: without context the best guess is 1/2.

    The prior's loss is ln 2 = 0.693; knowing the group gives H(0.9) = -0.9 ln 0.9 - 0.1 ln 0.1 = 0.325.
    """
    yes = np.array([0.9, 0.1], dtype=np.float32)
    table = embedding(num_options=2)
    table.value_QKE[:, 0, 0], table.value_QKE[:, 1, 0] = 2.0, -2.0  # says which option is "yes"
    rows = np.arange(Q, dtype=np.int64)
    groups = [GroupData(f"g{g}", rows[:20], np.tile(yes if g % 2 else yes[::-1], (20, 1))) for g in range(4)]
    model = small_model()
    config = EpisodeConfig(num_context=4, num_targets=8, num_episodes=4)
    generator = torch.Generator().manual_seed(0)
    train_centrally(model, groups, table, steps=60, learning_rate=1e-2, episodes=config, generator=generator)
    # questions 20 to 29 were in no episode
    exam = EpisodeConfig(num_context=4, num_targets=6, num_episodes=20, embedding_noise=0.0)
    for answer in (yes, yes[::-1]):
        unseen = GroupData("unseen", rows[20:], np.tile(answer, (10, 1)))
        batch = sample_episodes(unseen, table, config=exam, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            predicted = model(batch.context, batch.target)
            assert 0.32 < float(soft_cross_entropy(predicted, batch.target.answer, batch.target.options)) < 0.40
