"""Episodes, the loss, local updates, and that the network learns to use its context.

Axis letters: B episodes, K options, N answered questions, Q questions, E embedding.
"""

import copy
import math

import numpy as np
import pytest
import torch
from fakes import catalogue_of
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.protocol.messages import join_weights
from appa_flwr.protocol.queries import Catalogue
from client_app import predictor
from pluralllm import training
from pluralllm.attention import soft_cross_entropy
from pluralllm.data import GroupData, validation_questions
from pluralllm.network import Episodes, Questions
from pluralllm.training import (
    MAX_GRADIENT_NORM,
    build,
    local_update,
    sample_episodes,
    step_size_factor,
    validation_round,
)


def settings(architecture="attention", num_context=6, **keys):
    keys |= {"architecture": architecture, "num-context-questions": num_context}
    return Config.load({f"pluralllm.{key.replace('_', '-')}": value for key, value in keys.items()}).pluralllm


@pytest.fixture
def drawn(data, table):
    """Draws a step's episodes from a group's first answers."""

    def draw(seed: int = 0, answers: int = 20, **keys: object) -> Episodes:
        generator = torch.Generator().manual_seed(seed)
        return sample_episodes(data.first(answers), table, settings(**keys), generator=generator)

    return draw


def test_answers_to_validation_questions_count_after_the_choice_alone(residual, data, table):
    config, known = Config.load({"pluralllm.rounds": 6, "pluralllm.local-steps": 1}), data.only(table.train_Q)
    weights = join_weights(ArrayRecord(residual.state_dict()))
    counts = [predictor.train(config, weights, known, table, round_number=number)[2] for number in range(1, 7)]
    rest, last = len(known.only(~validation_questions(table))), validation_round(config.pluralllm)
    assert counts == [rest] * last + [len(known)] * (6 - last)
    assert 0 < rest < len(known)
    assert 0 < last < 6


def rows_of(part: Questions, table: Catalogue) -> list[list[int]]:
    """Rows of the table, by their features."""
    first = table.embedding_QKE[:, 0]
    return [[int((first == question).all(axis=1).argmax()) for question in row[:, 0].numpy()] for row in part.embedding]


def test_context_and_targets_are_disjoint_distinct_and_the_groups_own(drawn, data, table):
    answer_of = dict(zip(data.question_N.tolist(), data.answer_NK, strict=True))
    both: tuple[set[int], set[int]] = (set(), set())
    for seed in range(12):
        batch = drawn(seed)
        assert (batch.context.options.shape, batch.target.options.shape) == ((4, 6, 4), (4, 14, 4))
        parts = [(part, rows_of(part, table)) for part in (batch.context, batch.target)]
        assert all(len({*known, *asked}) == 20 for known, asked in zip(parts[0][1], parts[1][1], strict=True))
        # answers and features belong to the question they are drawn with, and stay as they are
        for seen, (part, rows) in zip(both, parts, strict=True):
            seen.update(np.ravel(rows))
            np.testing.assert_array_equal(part.embedding, table.embedding_QKE[np.array(rows)])
            np.testing.assert_array_equal(part.answer, [[answer_of[q] for q in row] for row in rows])
    assert both == (set(data.question_N),) * 2  # each takes both parts


@torch.no_grad()
def test_noise_moves_all_options_of_a_question_alike_and_the_loss_sees_it(attention, drawn):
    """Features moved the other way and then by the noise are where they were."""
    batch = drawn()
    batch = batch._replace(noise=(7 * batch.noise[0], 7 * batch.noise[1]))
    still = (torch.zeros_like(batch.noise[0]), torch.zeros_like(batch.noise[1]))
    plain = float(attention.loss(batch._replace(noise=still)))
    context, target = (
        part._replace(embedding=part.embedding - noise[:, :, None])
        for part, noise in zip((batch.context, batch.target), batch.noise, strict=True)
    )
    assert float(attention.loss(batch._replace(context=context, target=target))) == pytest.approx(plain, abs=1e-5)
    for noise in ((batch.noise[0], still[1]), (still[0], batch.noise[1])):
        assert abs(float(attention.loss(batch._replace(noise=noise))) - plain) > 1e-4


@pytest.mark.parametrize(
    ("architecture", "num_context", "least", "most", "num_episodes"),
    [("attention", 6, 6, 6, 4), ("residual", 512, 8, 10, 1), ("residual", 9, 8, 9, 1), ("residual", 4, 4, 4, 1)],
)
def test_each_batch_draws_its_number_of_context_questions(drawn, architecture, num_context, least, most, num_episodes):
    """At most half of the 20 answers, 10."""
    shapes = [
        drawn(seed, architecture=architecture, num_context=num_context).context.options.shape for seed in range(60)
    ]
    assert {shape[:2] for shape in shapes} <= {(num_episodes, size) for size in range(least, most + 1)}
    assert {shape[1] for shape in shapes} >= {most}


def test_a_small_group_keeps_targets(drawn):
    for size, parts in ((5, (2, 3)), (1, (0, 1))):
        batch = drawn(answers=size)
        assert (batch.context.options.shape[1], batch.target.options.shape[1]) == parts


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
    assert (factor[50], factor[59], step_size_factor(0, 1)) == pytest.approx((0.5, 0.05, 0.2))


@pytest.mark.parametrize("architecture", ["attention", "residual"])
def test_a_local_update_is_adam_on_the_drawn_episodes_with_clipped_gradients(architecture, data, table):
    """With half the learning rate: of the last four rounds, in which it falls, two are left."""
    keys = settings(architecture, 4, local_steps=4, rounds=12, learning_rate=0.01)
    torch.manual_seed(0)
    ours = build(architecture)
    slow, start = copy.deepcopy(ours), copy.deepcopy(ours)
    mean = local_update(ours, data, table, keys, round_number=11, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    weights, losses = [*slow.parameters()], []
    adam = torch.optim.Adam(weights, lr=0.005)
    for _ in range(keys.local_steps):
        batch = sample_episodes(data, table, keys, generator=generator)
        losses.append(slow.loss(batch))
        gradients = torch.autograd.grad(losses[-1], weights, allow_unused=True)
        length = math.sqrt(sum(float((g**2).sum()) for g in gradients if g is not None))
        for weight, g in zip(weights, gradients, strict=True):
            weight.grad = None if g is None else g * min(1.0, MAX_GRADIENT_NORM / length)
        adam.step()
    assert mean == pytest.approx(sum(loss.item() for loss in losses) / 4, abs=1e-4)
    for (name, mine), reference in zip(ours.named_parameters(), weights, strict=True):
        if not name.endswith("score.bias"):  # no share depends on it: its gradient is rounding, which Adam scales up
            torch.testing.assert_close(mine, reference, atol=1e-4, rtol=0)
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(ours.parameters(), start.parameters(), strict=True))


def test_the_network_learns_to_read_the_group_from_its_context(monkeypatch, table):
    """Half the groups say yes to everything with 0.9, the others no: without context the best guess is 1/2.

    The prior's loss is ln 2 = 0.693; knowing the group gives H(0.9) = -0.9 ln 0.9 - 0.1 ln 0.1 = 0.325.
    """
    yes = np.array([0.9, 0.1], dtype=np.float32)
    table = catalogue_of([2] * 30, embedding_QKE=table.embedding_QKE[:, :2])
    table.embedding_QKE[:, 0, 0], table.embedding_QKE[:, 1, 0] = 2.0, -2.0  # says which option is "yes"
    rows = np.arange(30, dtype=np.int64)
    groups = [GroupData(f"g{g}", rows[:20], np.tile(yes if g % 2 else yes[::-1], (20, 1))) for g in range(4)]
    torch.manual_seed(0)
    model, keys, generator = build("attention"), settings(num_context=4), torch.Generator().manual_seed(0)
    update = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        update.zero_grad()
        for data in groups:
            (model.loss(sample_episodes(data, table, keys, generator=generator)) / len(groups)).backward()
        update.step()
    monkeypatch.setattr(training, "EMBEDDING_NOISE", 0.0)
    for answer in (yes, yes[::-1]):
        unseen = GroupData("unseen", rows[20:], np.tile(answer, (10, 1)))  # questions that were in no episode
        batch = sample_episodes(unseen, table, keys, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert 0.32 < float(model.loss(batch)) < 0.40
