"""The pure functions of PPO against hand-worked numbers and slow loops, beside TRL's tensors in `reference/`.

Axis letters: J rollouts, T response tokens.
"""

import numpy as np
import pytest
import torch

from server_app.policy import losses as ppo


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


def test_whiten_without_variance_gives_no_nan():
    value, mask = torch.full((1, 3), 0.7, dtype=torch.float64), torch.tensor([[True, True, False]])
    assert ppo.whiten(value, mask).abs().max() < 1e-9
    one = torch.tensor([[True, False, False]])
    assert torch.isfinite(ppo.whiten(value, one)).all()


def test_whiten_scores_have_unit_variance_and_are_clamped():
    score_J = torch.tensor([0.0] * 99 + [1.0], dtype=torch.float64)
    # mean .01; squares 99 x .0001 + .9801 = .99; variance .99 / 99 = .01; so (1 - .01) / .1 = 9.9 and -.01 / .1 = -.1
    for sign in (1, -1):
        whitened_J = ppo.whiten_scores(sign * score_J)
        assert whitened_J[-1] == sign * 5.0
        assert whitened_J[0] == pytest.approx(sign * -0.1, rel=1e-5)


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
    given = (new_JT, old_JT, tensor([advantage]), tensor([0.5]), torch.tensor([[True]]))  # which counts half
    found, found_clipped, kl = ppo.policy_loss(*given, clip_range=0.2)
    assert found.item() == pytest.approx(0.5 * loss)
    assert bool(found_clipped) is clipped
    # .5 (log ratio)^2
    assert kl.item() == pytest.approx(0.5 * np.log(ratio) ** 2)
    found.backward()
    # d(-A ratio) / d log pi = -A ratio where it is not clipped, else nothing
    assert new_JT.grad.item() == pytest.approx(0.0 if clipped else -0.5 * advantage * ratio)


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
    def losses(rows, columns=slice(None)):
        cut = [x[rows][:, columns] for x in batch]
        policy, clipped, kl = ppo.policy_loss(*cut[:4], cut[-1], clip_range=0.2)
        value = ppo.value_loss(cut[0], cut[1], cut[3], cut[-1], clip_range=0.2)
        return torch.stack([policy, clipped.double(), kl, value])

    whole = losses([0, 1, 2, 3, 4])
    torch.testing.assert_close(losses([0, 3]) + losses([1]) + losses([2, 4]), whole)
    torch.testing.assert_close(sum(losses([j]) for j in range(5)), whole)
    # columns that no row needs can go
    torch.testing.assert_close(losses([1, 2], slice(0, 4)), losses([1, 2]))
    # token by token, each of which is worked by hand above
    entries = batch[-1].nonzero().tolist()
    torch.testing.assert_close(sum(losses([j], slice(t, t + 1)) for j, t in entries), whole)


def test_full_loss_and_entropy_by_hand():
    policy, value = (torch.tensor(x, requires_grad=True) for x in (6.0, 10.0))
    # (6 + .2 x 10) / 4 = 2
    together = ppo.full_loss(policy=policy, value=value, num_tokens=4)
    assert together.item() == pytest.approx(2.0)
    together.backward()
    whole = policy.grad.item(), value.grad.item()
    policy.grad = value.grad = None
    # either part alone pulls as it does in the sum: 1 / 4 and .2 / 4
    ppo.full_loss(policy=policy, num_tokens=4).backward()
    ppo.full_loss(value=value, num_tokens=4).backward()
    assert (policy.grad.item(), value.grad.item()) == whole == pytest.approx((0.25, 0.05))
    # tokens drawn as often as they are likely, a half and two quarters: (2 x log 2 + 2 x log 4) / 4 = 1.5 log 2
    logprob_JT = tensor([0.5, 0.5, 0.25, 0.25, 7.0]).log()
    assert ppo.entropy(logprob_JT, lengths_mask([4], 5)).item() == pytest.approx(1.5 * np.log(2))


def test_an_answer_is_compared_with_the_others_to_its_question():
    reward_J = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 2.0])
    # 1 - 4, 2 - 3.5, 6 - 1.5; 5 - 3.5, 5 - 3.5, 2 - 5
    expected = torch.tensor([-3.0, -1.5, 4.5, 1.5, 1.5, -3.0])
    torch.testing.assert_close(ppo.leave_one_out(reward_J, per_question=3), expected)
    # of two, each is compared with the other: 1 - 2 and 2 - 1, 6 - 5 and 5 - 6, 5 - 2 and 2 - 5
    expected = torch.tensor([-1.0, 1.0, 1.0, -1.0, 3.0, -3.0])
    torch.testing.assert_close(ppo.leave_one_out(reward_J, per_question=2), expected)
