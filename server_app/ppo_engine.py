"""One PPO iteration on given rewards: rollout, reference and value passes, and the mini-batched update.

Axis letters: J rollouts, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from appa_flwr.config import Config
from server_app import ppo
from server_app.policy import PolicyModels
from server_app.rollouts import Sample, Sequences, sample


@dataclass(frozen=True)
class PPOSettings:
    """The numbers of the paper's PPO table that an update needs; see `appa config` for their meaning."""

    learning_rate: float
    value_learning_rate: float
    weight_decay: float
    scheduler: str
    num_iterations: int
    ppo_epochs: int
    num_mini_batches: int
    micro_batch_size: int
    eval_batch_size: int
    response_length: int
    temperature: float
    kl_coefficient: float
    clip_range: float
    clip_range_value: float
    value_coefficient: float
    gamma: float
    gae_lambda: float
    whiten_rewards: bool
    reward_clamp: float
    max_grad_norm: float

    @classmethod
    def of(cls, config: Config, *, num_iterations: int) -> PPOSettings:
        """The settings a run config has under the same names."""
        names = [field.name for field in fields(cls) if field.name != "num_iterations"]
        return cls(num_iterations=num_iterations, **{name: getattr(config, name) for name in names})


@dataclass(frozen=True)
class Judged:
    """What the server can compute before the groups have answered; (J, T) each, 0 outside the mask."""

    reference_logprob_JT: Tensor
    value_JT: Tensor


class PPOEngine:
    """Owns the models, the optimizer and the generator; each method is one phase of an iteration."""

    def __init__(
        self, models: PolicyModels, settings: PPOSettings, *, stop_ids: Sequence[int], pad_id: int, seed: int
    ) -> None:
        self.models = models
        self.settings = settings
        self._stop_ids, self._pad_id = list(stop_ids), pad_id
        self._generator = torch.Generator(models.policy().device).manual_seed(seed)
        self._shuffle = np.random.default_rng([seed, 1])
        self._optimizer = torch.optim.AdamW(
            [
                {"params": models.policy_parameters(), "lr": settings.learning_rate},
                {"params": models.value_parameters(), "lr": settings.value_learning_rate},
            ],
            weight_decay=settings.weight_decay,
            foreach=True,
        )
        decay = settings.scheduler == "linear"
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda i: max(0.0, 1.0 - i / settings.num_iterations) if decay else 1.0
        )

    def rollout(self, prompts: Sequence[Sequence[int]]) -> Sample:
        """Sample one answer per prompt at the training temperature."""
        return sample(
            self.models.policy(),
            prompts,
            max_new_tokens=self.settings.response_length,
            temperature=self.settings.temperature,
            stop_ids=self._stop_ids,
            pad_id=self._pad_id,
            generator=self._generator,
        )

    @torch.no_grad()
    def judge(self, sequences: Sequences) -> Judged:
        """Reference log-probabilities and values of a rollout batch."""
        reference_JT = torch.zeros_like(sequences.mask_JT, dtype=torch.float32)
        value_JT = torch.zeros_like(reference_JT)
        for rows in self._by_length(sequences, self.settings.eval_batch_size):
            part = sequences.rows(rows)
            width = part.response_JT.shape[1]
            reference_JT[rows, :width] = self.models.reference_logprobs(part, temperature=self.settings.temperature)
            value_JT[rows, :width] = self.models.values(part)
        return Judged(reference_JT, value_JT)

    def update(self, rollout: Sample, judged: Judged, score_J: Tensor) -> dict[str, float]:
        """All PPO epochs on one rollout batch (Eq. ppo-full).

        Args:
            rollout: the batch and its log-probabilities at sampling time.
            judged: its reference log-probabilities and values.
            score_J: the aggregated reward of each rollout.

        Returns:
            Means over the update: policy_loss, value_loss, clip_fraction, approximate_kl; and of the batch: kl (to the
            reference), entropy (of the sampled tokens: mean -log pi), response_length, in tokens.
        """
        s = self.settings
        batch, mask_JT = rollout.sequences, rollout.sequences.mask_JT
        score_J = ppo.whiten_scores(score_J, clamp=s.reward_clamp) if s.whiten_rewards else score_J
        reward_JT = ppo.shaped_rewards(
            score_J, rollout.logprob_JT, judged.reference_logprob_JT, mask_JT, kl_coefficient=s.kl_coefficient
        )
        advantage_JT, return_JT = ppo.gae(reward_JT, judged.value_JT, mask_JT, gamma=s.gamma, gae_lambda=s.gae_lambda)
        advantage_JT = ppo.whiten(advantage_JT, mask_JT)
        sums = dict.fromkeys(("policy_loss", "value_loss", "clip_fraction", "approximate_kl"), 0.0)
        tokens = 0
        for _ in range(s.ppo_epochs):
            order = torch.from_numpy(self._shuffle.permutation(len(mask_JT))).to(mask_JT.device)
            for mini_batch in order.tensor_split(min(s.num_mini_batches, len(order))):
                count = int(mask_JT[mini_batch].sum())
                for rows in self._by_length(batch, s.micro_batch_size, mini_batch):
                    part = batch.rows(rows)
                    width = part.response_JT.shape[1]
                    new_JT = self.models.policy_logprobs(part, temperature=s.temperature)
                    policy = ppo.policy_loss(
                        new_JT,
                        rollout.logprob_JT[rows, :width],
                        advantage_JT[rows, :width],
                        part.mask_JT,
                        clip_range=s.clip_range,
                    )
                    value = ppo.value_loss(
                        self.models.values(part),
                        judged.value_JT[rows, :width],
                        return_JT[rows, :width],
                        part.mask_JT,
                        clip_range=s.clip_range_value,
                    )
                    ((policy.loss + s.value_coefficient * value) / count).backward()
                    sums["policy_loss"] += float(policy.loss.detach())
                    sums["value_loss"] += float(value.detach())
                    sums["clip_fraction"] += float(policy.clipped)
                    sums["approximate_kl"] += float(policy.approximate_kl)
                tokens += count
                for group in self._optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], s.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        stats = {name: total / max(tokens, 1) for name, total in sums.items()}
        stats["kl"] = float(((rollout.logprob_JT - judged.reference_logprob_JT) * mask_JT).sum(1).mean())
        stats["entropy"] = float(-ppo.masked_mean(rollout.logprob_JT, mask_JT))
        stats["response_length"] = float(mask_JT.sum(1).float().mean())
        return stats

    @staticmethod
    def _by_length(sequences: Sequences, size: int, rows: Tensor | None = None) -> list[Tensor]:
        """Rows (all, or those given) in chunks of similar length, so that little of a chunk is padding."""
        rows = torch.arange(len(sequences.mask_JT), device=sequences.mask_JT.device) if rows is None else rows
        length = sequences.prompt_mask_JP[rows].sum(1) + sequences.mask_JT[rows].sum(1)
        return list(rows[length.argsort(stable=True)].split(size))
