"""One PPO iteration on given rewards: rollout, reference and value passes, and the mini-batched update.

It differs from the paper so:

1. By default an answer's advantage is its reward less the mean of the question's other answers (`ppo.baseline`); by
   "value", as in the presets `paper`, it is that of Equation 11.
2. Dropout is off, or the ratio of new to old probabilities would not be 1 before an update; each model's gradient is
   clipped to norm 1.
3. Where sampling and training passes round differently (16 bits), tokens are weighted by π / π_sampler, capped at 2.
4. The entropy is reported and has no weight, as in the PPO table.

Axis letters: J rollouts, T response tokens.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from appa_flwr.config.sections import PPOSection
from server_app.policy import losses
from server_app.policy.limits import ANSWERS, TOKENS, Budget, NotFinite, finite_logits
from server_app.policy.logprobs import response_logprobs, response_values, shared_prefix
from server_app.policy.models import PolicyModels
from server_app.policy.sample import Decoding, Rollout, sample
from server_app.policy.sequences import Sequences

DISCOUNT, GAE_LAMBDA = 1.0, 0.95  # PPO table
MAX_GRAD_NORM = 1.0  # each model's gradient is clipped to this norm; not in the paper
MAX_IMPORTANCE = 2.0  # cap of pi / pi_sampler, as in TRL's and verl's trainers


class ReferencePass(NamedTuple):
    """Results that the server computes while the groups answer; (J, T) each, 0 outside the mask."""

    reference_logprob_JT: Tensor  # log pi_ref of the rollouts' tokens
    value_JT: Tensor  # V before each token; 0 without a value model
    policy_logprob_JT: Tensor | None = None  # log pi by a pass over whole rows; None if sampling gave the same


class _Targets(NamedTuple):
    """Fixed values in the losses of an update, (J, T) each; returns are unused without a value model."""

    old_JT: Tensor  # log pi before the update
    importance_JT: Tensor  # pi / pi_sampler before the update, capped
    advantage_JT: Tensor  # whitened
    value_JT: Tensor  # V before the update
    return_JT: Tensor


def _share_of_rate(step: int, settings: PPOSection, num_iterations: int) -> float:
    """Share of the learning rate at an optimizer step, counted from 0: a warm-up, then one share an iteration."""
    # Adam begins without moments, so its first steps move every weight by the whole rate, wherever the loss is flat.
    iteration = step // (settings.epochs * settings.num_mini_batches)
    return min(1.0, (step + 1) / (settings.warmup_steps + 1)) * max(0.0, 1.0 - iteration / num_iterations)


class PPOEngine:
    """Models, optimizer and random generators; `rollout`, `reference_pass` and `update` make an iteration.

    The learning rate falls linearly to 0 over `num_iterations`, after a warm-up. `stop_ids` are the tokens that end an
    answer; `seed` is of sampling and of the order within an update.
    """

    def __init__(
        self, models: PolicyModels, settings: PPOSection, *, num_iterations: int, stop_ids: Sequence[int], seed: int
    ) -> None:
        self.models, self.settings = models, settings
        self.budget = Budget(TOKENS, settings.micro_batch_tokens)
        self.sampled = Budget(ANSWERS, settings.batch_size, fewest=1)
        self._decoding = Decoding(settings.response_length, settings.temperature, tuple(stop_ids))
        self.generator = torch.Generator(models.policy.device).manual_seed(seed)
        self.shuffle = np.random.default_rng([seed, 1])
        trained = [parameters for parameters in (models.policy_parameters, models.value_parameters) if parameters]
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in trained],
            lr=settings.learning_rate,
            weight_decay=0.0,  # PPO table
            foreach=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _share_of_rate(step, settings, num_iterations)
        )

    def rollout(self, prompts: Sequence[Sequence[int]]) -> Rollout:
        """Sample one answer per prompt at the training temperature."""
        return sample(self.models.policy, prompts, self._decoding, generator=self.generator, budget=self.sampled)

    @torch.no_grad()
    def reference_pass(self, sequences: Sequences) -> ReferencePass:
        """Reference log-probabilities and values of a rollout batch; for a 16-bit model also the policy's own."""
        models, policy_JT = self.models, None
        logprobs = partial(response_logprobs, temperature=self.settings.temperature)
        with models.reference() as reference:
            reference_JT = self._in_micro_batches(sequences, reference.base_model, partial(logprobs, reference))
        value_JT = torch.zeros_like(reference_JT)
        if models.head is not None:
            with models.value() as trunk:
                value_JT = self._in_micro_batches(sequences, trunk, partial(response_values, trunk, models.head))
        # In 16 bits, sampling token by token rounds differently from a pass over whole rows.
        if models.policy.dtype.itemsize < torch.float32.itemsize:
            policy_JT = self._in_micro_batches(sequences, models.policy.base_model, partial(logprobs, models.policy))
        return ReferencePass(reference_JT, value_JT, policy_JT)

    def _in_micro_batches(self, sequences: Sequences, trunk: torch.nn.Module, score: Callable[..., Tensor]) -> Tensor:
        """Compute `score` of all rows in micro-batches, (J, T)."""

        def passes(tokens: int) -> Tensor:
            score_JT = torch.zeros(sequences.mask_JT.shape, device=sequences.mask_JT.device)
            with shared_prefix(trunk, sequences.prefix_C) as prefix:
                every = torch.arange(len(score_JT), device=score_JT.device)
                for rows in sequences.micro_batches(every, tokens=tokens):
                    part_JT = score(sequences.rows(rows), prefix=prefix)
                    score_JT[rows, : part_JT.shape[1]] = part_JT.to(score_JT.dtype)
            return score_JT

        return self.budget.run(passes)

    def update(self, rollout: Rollout, reference: ReferencePass, score_J: Tensor) -> dict[str, float]:
        """Run all PPO epochs on one rollout batch (Equation 7); `score_J` has the aggregated reward of each rollout.

        Returns:
            Means per token over all steps of the update: policy_loss, value_loss, clip_fraction and approximate_kl.
            Of the batch before the update: kl, the mean over answers of the summed log pi - log pi_ref; entropy, the
            mean -log pi of the sampled tokens; response_length, the mean in tokens.

        Raises:
            ValueError: not one score per rollout.
            NotFinite: a returned value, or a logit of the updated policy on a few tokens, is infinite or NaN.
        """
        batch, mask_JT = rollout.sequences, rollout.sequences.mask_JT
        if score_J.shape != mask_JT.shape[:1]:
            raise ValueError(f"expected one score per rollout, {len(mask_JT)}, got shape {tuple(score_J.shape)}")
        targets = self._targets(rollout, reference, score_J)
        sums = torch.zeros(4, dtype=torch.float64, device=mask_JT.device)
        for _ in range(self.settings.epochs):
            # Answers to a question are scattered: steps on whole questions share more of their prompts, but each sees a
            # quarter of the questions, and the worst-off group gained less (docs/results.md).
            order = torch.from_numpy(self.shuffle.permutation(len(mask_JT))).to(mask_JT.device)
            for mini_batch in order.tensor_split(min(self.settings.num_mini_batches, len(order))):
                sums += self.budget.run(partial(self._gradients, batch, targets, mini_batch))
                for group in self.optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], MAX_GRAD_NORM)
                self.optimizer.step()
                self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        means = (sums / (self.settings.epochs * mask_JT.sum())).tolist()
        names = ("policy_loss", "value_loss", "clip_fraction", "approximate_kl")
        stats = dict(zip(names, means, strict=True)) | {
            "kl": float(((targets.old_JT - reference.reference_logprob_JT) * mask_JT).sum(1).mean()),
            "entropy": float(losses.entropy(targets.old_JT, mask_JT)),
            "response_length": float(mask_JT.sum(1).float().mean()),
        }
        if not (all(map(math.isfinite, stats.values())) and finite_logits(self.models.policy)):
            raise NotFinite("ppo.learning-rate")
        return stats

    def _targets(self, rollout: Rollout, reference: ReferencePass, score_J: Tensor) -> _Targets:
        """Whiten the scores, then compute rewards (Equation 13) and advantages (Equation 11, or by leave-one-out)."""
        mask_JT, old_JT = rollout.sequences.mask_JT, rollout.logprob_JT
        if reference.policy_logprob_JT is not None:
            old_JT = reference.policy_logprob_JT
        white_J, beta = losses.whiten_scores(score_J), self.settings.kl_coefficient
        reward_JT = losses.shaped_rewards(white_J, old_JT, reference.reference_logprob_JT, mask_JT, kl_coefficient=beta)
        if self.models.head is None:
            # ppo.baseline = question. These rewards have mean 0 over answers, so whitening over answers keeps a 0 where
            # all answers to a question earn the same; a mean over tokens would not.
            reward_J = losses.leave_one_out(reward_JT.sum(1), per_question=self.settings.answers_per_question)
            white_J = losses.whiten(reward_J, torch.ones_like(reward_J, dtype=torch.bool))
            advantage_JT = return_JT = white_J[:, None] * mask_JT
        else:
            advantage_JT, return_JT = losses.gae(
                reward_JT, reference.value_JT, mask_JT, gamma=DISCOUNT, gae_lambda=GAE_LAMBDA
            )
            advantage_JT = losses.whiten(advantage_JT, mask_JT)
        importance_JT = (old_JT - rollout.logprob_JT).exp().clamp(max=MAX_IMPORTANCE)
        return _Targets(old_JT, importance_JT, advantage_JT, reference.value_JT, return_JT)

    def _gradients(self, batch: Sequences, targets: _Targets, mini_batch: Tensor, tokens: int) -> Tensor:
        """Compute the gradients of Equation 7 on a mini-batch, in passes of at most `tokens` tokens.

        Returns the sums over the mini-batch of policy loss, value loss, clipped tokens and 0.5 (log ratio)^2.
        """
        models, s = self.models, self.settings
        self.optimizer.zero_grad(set_to_none=True)
        count = int(batch.mask_JT[mini_batch].sum())
        parts = []
        for rows in batch.micro_batches(mini_batch, tokens=tokens):
            part = batch.rows(rows)
            width = part.mask_JT.shape[1]
            parts.append((part, _Targets(*(value_JT[rows, :width] for value_JT in targets))))
        sums = torch.zeros(4, dtype=torch.float64, device=mini_batch.device)
        # Models share one base, so the backward passes of each run while its adapter is active.
        with shared_prefix(models.policy.base_model, batch.prefix_C) as prefix:
            for part, target in parts:
                logprob_JT = response_logprobs(models.policy, part, temperature=s.temperature, prefix=prefix)
                fixed = target.old_JT, target.advantage_JT, target.importance_JT
                policy, clipped, kl = losses.policy_loss(logprob_JT, *fixed, part.mask_JT, clip_range=s.clip_range)
                losses.full_loss(policy=policy, num_tokens=count).backward()
                sums += torch.stack([policy.detach(), sums.new_zeros(()), clipped, kl])
        if models.head is None:
            return sums
        with models.value() as trunk, shared_prefix(trunk, batch.prefix_C) as prefix:
            for part, target in parts:
                value_JT = response_values(trunk, models.head, part, prefix=prefix)
                before = target.value_JT, target.return_JT
                value = losses.value_loss(value_JT, *before, part.mask_JT, clip_range=s.clip_range)
                losses.full_loss(value=value, num_tokens=count).backward()
                sums[1] += value.detach()
        return sums
