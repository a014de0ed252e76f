"""PPO as pure functions on tensors (appendix "Complete PPO Objective and Reward Integration").

Axis letters: J rollouts, T response tokens. Every mask is True where a token counts: the response's tokens up to and
including its end-of-sequence token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean of `value` over the True cells of `mask` (same shape); 0 where there are none."""
    return (value * mask).sum() / mask.sum().clamp(min=1)


def whiten(value: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scale the masked cells to unit variance (unbiased), and to zero mean if `shift_mean`.

    Args:
        value: any shape.
        mask: bool, same shape, at least one True cell; equal cells have no variance and give their shift only.
        shift_mean: whether the result's mean is 0; else it stays the mean of `value`.

    Returns:
        Whitened values; 0 where `mask` is False.
    """
    count = mask.sum().clamp(min=1)
    mean = masked_mean(value, mask)
    variance = ((value - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    whitened = (value - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)
    return (whitened if shift_mean else whitened + mean) * mask


def whiten_scores(score_J: Tensor, *, clamp: float) -> Tensor:
    """Whiten the aggregated scalars of one rollout batch and clamp them (appendix "Format Scoring").

    Args:
        score_J: aggregated reward of each rollout.
        clamp: results lie in [-clamp, clamp].

    Returns:
        Shape (J,).
    """
    return whiten(score_J, torch.ones_like(score_J, dtype=torch.bool)).clamp(-clamp, clamp)


def shaped_rewards(
    score_J: Tensor, logprob_JT: Tensor, reference_logprob_JT: Tensor, mask_JT: Tensor, *, kl_coefficient: float
) -> Tensor:
    """Per-token rewards: the KL penalty on every token, the score on the last real one (Eq. rlhf-reward).

    Args:
        score_J: reward of each whole answer.
        logprob_JT: log pi of the sampled tokens under the policy that sampled them.
        reference_logprob_JT: log pi_ref of the same tokens.
        mask_JT: True on the response's tokens; each row holds at least one.
        kl_coefficient: beta >= 0.

    Returns:
        Shape (J, T), 0 outside the mask.
    """
    reward_JT = -kl_coefficient * (logprob_JT - reference_logprob_JT) * mask_JT
    last_J = mask_JT.sum(1, keepdim=True) - 1
    return reward_JT.scatter_add(1, last_J, score_J.to(reward_JT.dtype).unsqueeze(1))


def gae(
    reward_JT: Tensor, value_JT: Tensor, mask_JT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Eq. gae); the episode ends with the last real token.

    Args:
        reward_JT: per-token rewards.
        value_JT: V(s_t), the value before token t.
        mask_JT: True where a step counts.
        gamma: discount in [0, 1].
        gae_lambda: lambda_GAE in [0, 1].

    Returns:
        Advantages and returns (advantage + value), both (J, T) and 0 outside the mask.
    """
    reward_JT, value_JT = reward_JT * mask_JT, value_JT * mask_JT
    advantage_JT = torch.zeros_like(reward_JT)
    running_J = torch.zeros_like(reward_JT[:, 0])
    next_value_J = torch.zeros_like(running_J)
    for t in range(reward_JT.shape[1] - 1, -1, -1):
        delta_J = reward_JT[:, t] + gamma * next_value_J - value_JT[:, t]
        running_J = delta_J + gamma * gae_lambda * running_J
        advantage_JT[:, t] = running_J
        next_value_J = value_JT[:, t]
    advantage_JT = advantage_JT * mask_JT
    return advantage_JT, (advantage_JT + value_JT) * mask_JT


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the tokens of a micro-batch; divide by the mini-batch's token count.

    Attributes:
        loss: scalar with gradient.
        clipped: number of tokens whose clipped branch was the larger loss.
        approximate_kl: sum of 0.5 * (log ratio)^2.
    """

    loss: Tensor
    clipped: Tensor
    approximate_kl: Tensor


def policy_loss(
    logprob_JT: Tensor, old_logprob_JT: Tensor, advantage_JT: Tensor, mask_JT: Tensor, *, clip_range: float
) -> PolicyLoss:
    """Clipped surrogate (Eq. ppo-policy) with the sign of a loss, summed over the masked tokens.

    A sum and not a mean, so that micro-batches of any split add up to the same mini-batch loss.

    Args:
        logprob_JT: under the current policy, with gradient.
        old_logprob_JT: under the policy that sampled.
        advantage_JT: advantages, already whitened.
        mask_JT: True where a token counts.
        clip_range: epsilon > 0.

    Returns:
        The sums.
    """
    log_ratio_JT = (logprob_JT - old_logprob_JT) * mask_JT
    ratio_JT = log_ratio_JT.exp()
    plain_JT = -advantage_JT * ratio_JT
    clipped_JT = -advantage_JT * ratio_JT.clamp(1 - clip_range, 1 + clip_range)
    loss = (torch.maximum(plain_JT, clipped_JT) * mask_JT).sum()
    with torch.no_grad():
        clipped = ((clipped_JT > plain_JT) & mask_JT).sum()
        approximate_kl = 0.5 * log_ratio_JT.square().sum()
    return PolicyLoss(loss, clipped, approximate_kl)


def value_loss(
    value_JT: Tensor, old_value_JT: Tensor, return_JT: Tensor, mask_JT: Tensor, *, clip_range: float
) -> Tensor:
    """Clipped half squared error of the value (Eq. ppo-vf), summed over the masked tokens.

    Args:
        value_JT: current values, with gradient.
        old_value_JT: values at rollout time.
        return_JT: targets.
        mask_JT: True where a token counts.
        clip_range: how far the value may move from its old self before it stops being pulled.

    Returns:
        Scalar.
    """
    near_JT = torch.maximum(torch.minimum(value_JT, old_value_JT + clip_range), old_value_JT - clip_range)
    error_JT = torch.maximum((value_JT - return_JT).square(), (near_JT - return_JT).square())
    return 0.5 * (error_JT * mask_JT).sum()
