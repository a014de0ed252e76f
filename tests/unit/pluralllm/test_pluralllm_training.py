"""Episodes, the loss, local updates, and that the network learns to use its context.

Axis letters: B episodes, M target questions, K options, N answered questions, Q questions, E embedding.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from appa_flwr.config import Config
from appa_flwr.config.sections import Architecture
from appa_flwr.core.errors import UserError
from pluralllm.attention import FewShotAttention, soft_cross_entropy
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.network import Episodes, PluralLLM, Questions
from pluralllm.residual import ExactResidual
from pluralllm.training import MAX_GRADIENT_NORM, EpisodeConfig, local_update, sample_episodes, step_size_factor

Q, K, E = 30, 3, 8


def embedding(seed: int = 0, *, num_options: int = K) -> OptionEmbedding:
    value = np.random.default_rng(seed).normal(size=(Q, num_options, E)).astype(np.float32)
    return OptionEmbedding(tuple(f"q{q}" for q in range(Q)), value, np.ones((Q, num_options), dtype=np.bool_))


def random_group(num_answers: int, seed: int = 0) -> GroupData:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(Q)[:num_answers]).astype(np.int64)
    return GroupData("Here", rows, rng.dirichlet(np.ones(K), size=num_answers).astype(np.float32))


def small_model(architecture: Architecture = "attention") -> PluralLLM:
    torch.manual_seed(0)
    if architecture == "residual":
        return ExactResidual(E, 16, num_blocks=1, rank=16)
    return FewShotAttention(E, 16, num_blocks=1, num_heads=2)


def shape(num_context: int = 16, **sizes: float) -> EpisodeConfig:
    """Episodes of just so many context questions."""
    return EpisodeConfig(num_context, num_context, **sizes)  # type: ignore[arg-type]


def drawn(data: GroupData, *, seed: int = 0, config: EpisodeConfig | None = None, **sizes: float) -> Episodes:
    generator = torch.Generator().manual_seed(seed)
    return sample_episodes(data, embedding(), config=config or shape(**sizes), generator=generator)


def rows_of(part: Questions) -> list[list[int]]:
    """Rows of the table, by their features."""
    first = embedding().value_QKE[:, 0]
    return [[int((first == question).all(axis=1).argmax()) for question in row[:, 0].numpy()] for row in part.embedding]


def test_context_and_targets_are_disjoint_distinct_and_the_groups_own():
    data, table = random_group(20), embedding()
    batch = drawn(data, num_context=6, num_targets=9, num_episodes=50, embedding_noise=0.0)
    assert (batch.context.options.shape, batch.target.options.shape) == ((50, 6, K), (50, 9, K))
    context, target = rows_of(batch.context), rows_of(batch.target)
    assert all(len({*known, *asked}) == 15 for known, asked in zip(context, target, strict=True))
    assert set(np.ravel(context)) == set(np.ravel(target)) == set(data.question_N)  # each takes both parts
    # answers and features belong to the question they are drawn with, and stay as they are
    answer_of = dict(zip(data.question_N.tolist(), data.answer_NK, strict=True))
    for part, rows in ((batch.context, context), (batch.target, target)):
        np.testing.assert_array_equal(part.embedding, table.value_QKE[np.array(rows)])
        np.testing.assert_array_equal(part.answer, [[answer_of[q] for q in row] for row in rows])


def test_a_batch_says_how_far_noise_moves_each_question():
    batch = drawn(random_group(5), num_context=2, num_targets=3, num_episodes=400, embedding_noise=0.5)
    assert [tuple(part.shape) for part in batch.noise] == [(400, 2, E), (400, 3, E)]
    for moved in batch.noise:
        amount = moved.std(-1)
        assert float((amount == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
        # uniform up to 0.5 for the other half: a mean square of 0.5^2 / 3
        assert float(moved[amount > 0].square().mean()) == pytest.approx(0.25 / 3, rel=0.1)


@torch.no_grad()
def test_noise_moves_all_options_of_a_question_alike_and_the_loss_sees_it():
    """Features moved the other way and then by the noise are where they were."""
    model = small_model()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape))
    batch = drawn(random_group(20), num_context=4, num_targets=8, num_episodes=3, embedding_noise=2.0)
    still = (torch.zeros_like(batch.noise[0]), torch.zeros_like(batch.noise[1]))
    plain = float(model.loss(batch._replace(noise=still)))
    context, target = (
        part._replace(embedding=part.embedding - torch.stack([noise] * K, dim=2))
        for part, noise in zip((batch.context, batch.target), batch.noise, strict=True)
    )
    assert float(model.loss(batch._replace(context=context, target=target))) == pytest.approx(plain, abs=1e-5)
    for noise in ((batch.noise[0], still[1]), (still[0], batch.noise[1])):
        assert abs(float(model.loss(batch._replace(noise=noise))) - plain) > 1e-3


def test_each_batch_draws_its_number_of_context_questions():
    config = EpisodeConfig(num_context=6, least_context=3, num_targets=2, num_episodes=1)
    drawn_sizes = [drawn(random_group(20), seed=seed, config=config).context.options.shape[1] for seed in range(80)]
    assert {size: drawn_sizes.count(size) > 8 for size in sorted(set(drawn_sizes))} == dict.fromkeys((3, 4, 5, 6), True)


def test_a_tenth_of_the_views_is_plain_and_the_others_are_drawn_equally_often():
    view_B3 = drawn(random_group(5), num_context=2, num_targets=3, num_episodes=2000).view_B3.long()
    place_B = torch.where(view_B3[:, 2] == 1, 4, 2 * view_B3[:, 0] + view_B3[:, 1])
    # binomials of 2000, of four times .225 and of .1: standard deviations 18.7 and 13.4
    off = torch.bincount(place_B, minlength=5) - torch.tensor([450, 450, 450, 450, 200])
    assert (off.abs() < torch.tensor([75, 75, 75, 75, 54])).all()


def test_a_small_group_keeps_targets():
    for size, parts in ((5, (2, 3)), (1, (0, 1))):
        batch = drawn(random_group(size), num_context=16, num_targets=32, num_episodes=1)
        assert (batch.context.options.shape[1], batch.target.options.shape[1]) == parts
    with pytest.raises(UserError, match="'Here' has no answered training question"):
        drawn(random_group(0))


def test_the_cross_entropy_by_hand_where_padding_neither_adds_nor_divides():
    options = torch.arange(3) < torch.tensor([3, 2, 0])[None, :, None]
    share = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0] * 3]])
    answer = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0] * 3]])
    log_p = share.log().requires_grad_()
    value = soft_cross_entropy(log_p, answer, options)
    # -ln 1/2, and -(ln 1/4 + ln 3/4) / 2
    assert value.item() == pytest.approx((math.log(2) + (math.log(4) + math.log(4 / 3)) / 2) / 2, abs=1e-6)
    (gradient,) = torch.autograd.grad(value, log_p)
    assert gradient.isfinite().all()
    assert (gradient[~options] == 0).all()


def test_steps_rise_and_then_fall_to_nothing():
    factor = [step_size_factor(step, 60) for step in range(60)]
    assert factor[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor[5:41] == [1.0] * 36
    assert factor[50] == pytest.approx(0.5)
    assert factor[59] == pytest.approx(0.05)
    assert step_size_factor(0, 1) > 0.0


@pytest.mark.parametrize("architecture", ["attention", "residual"])
def test_a_local_update_is_clipped_gradient_descent_on_the_drawn_episodes(architecture):
    data, table, steps, rate = random_group(20), embedding(), 4, 0.5
    keys = {"architecture": architecture, "num-context-questions": 4, "local-steps": steps, "strategy": "fedadam"}
    settings = Config.load({f"pluralllm.{key}": value for key, value in keys.items()}).pluralllm
    start = small_model(architecture)
    ours, slow = copy.deepcopy(start), copy.deepcopy(start)
    local_update(ours, data, table, settings, learning_rate=rate, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        batch = sample_episodes(data, table, config=EpisodeConfig.of(settings), generator=generator)
        weights = [w for w in slow.parameters() if w.requires_grad]
        grads = [0.0 if g is None else g for g in torch.autograd.grad(slow.loss(batch), weights, allow_unused=True)]
        length = math.sqrt(sum(float((torch.as_tensor(g) ** 2).sum()) for g in grads))
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w -= rate * min(1.0, MAX_GRADIENT_NORM / length) * g
    for mine, reference in zip(ours.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=0)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours.parameters(), start.parameters(), strict=True))


def test_the_network_learns_to_read_the_group_from_its_context():
    """Half the groups say yes to everything with 0.9, the others no: without context the best guess is 1/2.

    The prior's loss is ln 2 = 0.693; knowing the group gives H(0.9) = -0.9 ln 0.9 - 0.1 ln 0.1 = 0.325.
    """
    yes = np.array([0.9, 0.1], dtype=np.float32)
    table = embedding(num_options=2)
    table.value_QKE[:, 0, 0], table.value_QKE[:, 1, 0] = 2.0, -2.0  # says which option is "yes"
    rows = np.arange(Q, dtype=np.int64)
    groups = [GroupData(f"g{g}", rows[:20], np.tile(yes if g % 2 else yes[::-1], (20, 1))) for g in range(4)]
    model = small_model()
    config = shape(4, num_targets=8, num_episodes=4)
    generator = torch.Generator().manual_seed(0)
    update = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        update.zero_grad()
        for data in groups:
            (model.loss(sample_episodes(data, table, config=config, generator=generator)) / len(groups)).backward()
        update.step()
    # questions 20 to 29 were in no episode
    exam = shape(4, num_targets=6, num_episodes=20, embedding_noise=0.0)
    for answer in (yes, yes[::-1]):
        unseen = GroupData("unseen", rows[20:], np.tile(answer, (10, 1)))
        batch = sample_episodes(unseen, table, config=exam, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            predicted = model(batch.context, batch.target)
            assert 0.32 < float(soft_cross_entropy(predicted, batch.target.answer, batch.target.options)) < 0.40


@pytest.mark.parametrize(
    ("architecture", "num_context", "most", "least", "num_episodes"),
    [("attention", 16, 16, 16, 4), ("residual", 512, 100, 8, 1), ("residual", 40, 40, 8, 1), ("residual", 4, 4, 4, 1)],
)
def test_episodes_of_a_run_by_its_architecture(architecture, num_context, most, least, num_episodes):
    keys = {"pluralllm.architecture": architecture, "pluralllm.num-context-questions": num_context}
    drawn_by = EpisodeConfig.of(Config.load(keys).pluralllm)
    assert (drawn_by.num_context, drawn_by.least_context, drawn_by.num_episodes) == (most, least, num_episodes)
