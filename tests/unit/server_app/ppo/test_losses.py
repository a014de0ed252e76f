"""The pure functions of PPO against hand-worked numbers and slow loops.

Axis letters: J rollouts, T response tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server_app.ppo import losses as ppo


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def lengths_mask(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


@pytest.fixture
def batch():
    """Random rewards, values and log-probabilities of 5 rollouts of 1 to 9 tokens, garbage on the padding."""
    rng = np.random.default_rng(3)
    mask_JT = lengths_mask([9, 1, 4, 7, 9], 9)
    draw = [torch.from_numpy(rng.normal(size=(5, 9))) for _ in range(4)]
    return (*draw, mask_JT)


def test_masked_mean_by_hand():
    value = tensor([1.0, 2.0, 100.0])
    # (1 + 2) / 2
    assert ppo.masked_mean(value, torch.tensor([[True, True, False]])) == 1.5
    assert ppo.masked_mean(value, torch.zeros(1, 3, dtype=torch.bool)) == 0.0


def test_whiten_by_hand():
    # mean 3; variance with ddof 1: (4 + 0 + 4) / 2 = 4, so (1 - 3) / 2 = -1 and (5 - 3) / 2 = 1
    value, mask = tensor([1.0, 3.0, 5.0, 99.0]), torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(ppo.whiten(value, mask), tensor([-1.0, 0.0, 1.0, 0.0]))
    # the mean stays: 3 - 1, 3, 3 + 1
    torch.testing.assert_close(ppo.whiten(value, mask, shift_mean=False), tensor([2.0, 3.0, 4.0, 0.0]))


def test_whiten_against_numpy(batch):
    value_JT, mask_JT = batch[0], batch[-1]
    cells = value_JT.numpy()[mask_JT.numpy()]
    for shift_mean in (True, False):
        whitened_JT = ppo.whiten(value_JT, mask_JT, shift_mean=shift_mean).numpy()
        found = whitened_JT[mask_JT.numpy()]
        assert found.std(ddof=1) == pytest.approx(1.0, abs=1e-7)
        assert found.mean() == pytest.approx(0.0 if shift_mean else cells.mean(), abs=1e-9)
        # an affine map with positive slope: the distances keep their proportions
        np.testing.assert_allclose(np.diff(found), np.diff(cells) / cells.std(ddof=1), rtol=1e-7)
        assert (whitened_JT[~mask_JT.numpy()] == 0).all()


def test_whiten_without_variance_gives_no_nan():
    value, mask = torch.full((1, 3), 0.7, dtype=torch.float64), torch.tensor([[True, True, False]])
    assert ppo.whiten(value, mask).abs().max() < 1e-9
    torch.testing.assert_close(ppo.whiten(value, mask, shift_mean=False), tensor([0.7, 0.7, 0.0]))
    one = torch.tensor([[True, False, False]])
    assert torch.isfinite(ppo.whiten(value, one)).all()


def test_whiten_scores_have_unit_variance_and_are_clamped():
    score_J = torch.tensor([0.0] * 99 + [1.0], dtype=torch.float64)
    # mean .01; squares 99 x .0001 + .9801 = .99; variance .99 / 99 = .01; so (1 - .01) / .1 = 9.9 and -.01 / .1 = -.1
    loose_J = ppo.whiten_scores(score_J, clamp=100.0)
    assert loose_J[-1] == pytest.approx(9.9, rel=1e-5)
    assert loose_J[0] == pytest.approx(-0.1, rel=1e-5)
    tight_J = ppo.whiten_scores(score_J, clamp=5.0)
    assert tight_J[-1] == 5.0
    torch.testing.assert_close(tight_J[:-1], loose_J[:-1])
    assert ppo.whiten_scores(-score_J, clamp=5.0)[-1] == -5.0


def test_shaped_rewards_by_hand():
    mask_JT = lengths_mask([2, 3], 3)
    logprob_JT, reference_JT = (
        tensor([-1.0, -2.0, 9.0], [-3.0, -1.0, -1.5]),
        tensor([-1.5, -1.0, 7.0], [-1.0, -1.0, -2.0]),
    )
    found_JT = ppo.shaped_rewards(torch.tensor([10.0, 20.0]), logprob_JT, reference_JT, mask_JT, kl_coefficient=0.1)
    # row 0: -.1 (-1 + 1.5) = -.05; -.1 (-2 + 1) + 10 = 10.1; padding
    # row 1: -.1 (-3 + 1) = .2; -.1 (-1 + 1) = 0; -.1 (-1.5 + 2) + 20 = 19.95
    torch.testing.assert_close(found_JT, tensor([-0.05, 10.1, 0.0], [0.2, 0.0, 19.95]))


def test_gae_by_hand_with_a_masked_tail():
    reward_JT, value_JT = tensor([1.0, 2.0, 55.0]), tensor([0.5, 1.0, 77.0])
    advantage_JT, return_JT = ppo.gae(reward_JT, value_JT, lengths_mask([2], 3), gamma=0.5, gae_lambda=0.8)
    # t = 1 is the last real token, nothing follows: delta = 2 - 1 = 1, A = 1
    # t = 0: delta = 1 + .5 x 1 - .5 = 1, A = 1 + .5 x .8 x 1 = 1.4
    torch.testing.assert_close(advantage_JT, tensor([1.4, 1.0, 0.0]))
    # advantage + value: 1.4 + .5 and 1 + 1
    torch.testing.assert_close(return_JT, tensor([1.9, 2.0, 0.0]))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.7, 1.0)])
def test_gae_against_the_sum_over_future_errors(batch, gamma, gae_lambda):
    # A_t = sum_l (gamma lambda)^l delta_(t+l), summed forward token by token instead of the backward recursion
    reward_JT, value_JT, mask_JT = batch[0], batch[1], batch[-1]
    advantage_JT, return_JT = ppo.gae(reward_JT, value_JT, mask_JT, gamma=gamma, gae_lambda=gae_lambda)
    for j, length in enumerate(mask_JT.sum(1).tolist()):
        for t in range(length):
            expected = 0.0
            for later in range(t, length):
                following = float(value_JT[j, later + 1]) if later + 1 < length else 0.0
                delta = float(reward_JT[j, later]) + gamma * following - float(value_JT[j, later])
                expected += (gamma * gae_lambda) ** (later - t) * delta
            assert float(advantage_JT[j, t]) == pytest.approx(expected, abs=1e-12)
            assert float(return_JT[j, t]) == pytest.approx(expected + float(value_JT[j, t]), abs=1e-12)
        assert not advantage_JT[j, length:].any()
        assert not return_JT[j, length:].any()


def test_gae_with_lambda_one_returns_the_discounted_rewards(batch):
    # at lambda = 1 the values telescope away: the return is the plain discounted sum of rewards
    reward_JT, value_JT, mask_JT = batch[0], batch[1], batch[-1]
    _, return_JT = ppo.gae(reward_JT, value_JT, mask_JT, gamma=0.8, gae_lambda=1.0)
    for j, length in enumerate(mask_JT.sum(1).tolist()):
        rewards = reward_JT[j, :length].tolist()
        assert float(return_JT[j, 0]) == pytest.approx(sum(0.8**t * r for t, r in enumerate(rewards)), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        # within [.8, 1.2] nothing is clipped: -A x ratio
        (1.1, 2.0, -2.2, False),
        (0.9, -2.0, 1.8, False),
        # A > 0 and the ratio too high: the gain stops at -2 x 1.2
        (1.5, 2.0, -2.4, True),
        # A > 0 and the ratio too low: the plain loss -2 x .5 is the larger one, its gradient pulls back
        (0.5, 2.0, -1.0, False),
        # A < 0 and the ratio too low: the gain stops at 2 x .8
        (0.5, -2.0, 1.6, True),
        # A < 0 and the ratio too high: the plain loss 2 x 1.5 is the larger one
        (1.5, -2.0, 3.0, False),
    ],
)
def test_policy_loss_of_one_token_by_hand(ratio, advantage, loss, clipped):
    old_JT = tensor([-1.3])
    new_JT = (old_JT + np.log(ratio)).requires_grad_()
    found = ppo.policy_loss(new_JT, old_JT, tensor([advantage]), torch.tensor([[True]]), clip_range=0.2)
    assert found.loss.item() == pytest.approx(loss)
    assert bool(found.clipped) is clipped
    # .5 (log ratio)^2
    assert found.approximate_kl.item() == pytest.approx(0.5 * np.log(ratio) ** 2)
    found.loss.backward()
    # d(-A ratio) / d log pi = -A ratio where it is not clipped, else nothing
    assert new_JT.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio)


@pytest.mark.parametrize(
    ("value", "target", "loss", "pulled"),
    [
        # old value 1, clip .2, so the near value lies in [.8, 1.2]
        # inside: .5 (1.1 - 2)^2 = .405
        (1.1, 2.0, 0.405, True),
        # gone beyond towards the target: the near error (1.2 - 2)^2 = .64 is the larger one; no gradient
        (1.5, 2.0, 0.32, False),
        # gone away from the target: the plain error (.5 - 2)^2 = 2.25 is the larger one
        (0.5, 2.0, 1.125, True),
        # the same downwards: (.8 - 0)^2 = .64, and (1.4 - 0)^2 = 1.96
        (0.5, 0.0, 0.32, False),
        (1.4, 0.0, 0.98, True),
    ],
)
def test_value_loss_of_one_token_by_hand(value, target, loss, pulled):
    value_JT = tensor([value]).requires_grad_()
    found = ppo.value_loss(value_JT, tensor([1.0]), tensor([target]), torch.tensor([[True]]), clip_range=0.2)
    assert found.item() == pytest.approx(loss)
    found.backward()
    assert value_JT.grad.item() == pytest.approx(value - target if pulled else 0.0)


def test_losses_add_up_over_any_split_and_ignore_padding(batch):
    new_JT, old_JT, advantage_JT, other_JT, mask_JT = batch
    mask_JT = mask_JT.clone()

    def losses(rows, columns=slice(None)):
        cut = [x[rows][:, columns] for x in batch]
        policy = ppo.policy_loss(*cut[:3], cut[-1], clip_range=0.2)
        value = ppo.value_loss(cut[0], cut[1], cut[3], cut[-1], clip_range=0.2)
        return torch.stack([policy.loss, policy.clipped.double(), policy.approximate_kl, value])

    whole = losses([0, 1, 2, 3, 4])
    torch.testing.assert_close(losses([0, 3]) + losses([1]) + losses([2, 4]), whole)
    torch.testing.assert_close(sum(losses([j]) for j in range(5)), whole)
    # columns that no row needs can go
    torch.testing.assert_close(losses([1, 2], slice(0, 4)), losses([1, 2]))
    # one token at a time, with loops and numbers
    policy_sum = value_sum = 0.0
    for j in range(5):
        for t in range(int(mask_JT[j].sum())):
            ratio, advantage = np.exp(float(new_JT[j, t] - old_JT[j, t])), float(advantage_JT[j, t])
            policy_sum -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            value, old, target = float(new_JT[j, t]), float(old_JT[j, t]), float(other_JT[j, t])
            near = old + min(max(value - old, -0.2), 0.2)
            value_sum += 0.5 * max((value - target) ** 2, (near - target) ** 2)
    assert whole[0].item() == pytest.approx(policy_sum)
    assert whole[3].item() == pytest.approx(value_sum)
