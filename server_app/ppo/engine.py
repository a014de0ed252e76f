"""One PPO iteration on given rewards: rollout, reference and value passes, and the mini-batched update.

Axis letters: J rollouts, T response tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from appa_flwr.config.sections import PPOSection
from server_app.engine.head import NotFinite, finite_logits
from server_app.engine.memory import TokensAtOnce
from server_app.engine.sequences import Sequences
from server_app.models.policy import PolicyModels
from server_app.ppo import losses as ppo
from server_app.ppo.rollouts import Decoding, Rollout, sample

DISCOUNT, GAE_LAMBDA = 1.0, 0.95  # PPO table
MAX_GRAD_NORM = 1.0  # to which each model's gradient is scaled down; not in the paper
MAX_IMPORTANCE = 2.0  # cap of pi / pi_sampler, as in TRL's and verl's trainers


@dataclass(frozen=True)
class ReferencePass:
    """Results that the server computes while the groups answer; (J, T) each, 0 outside the mask.

    Attributes:
        reference_logprob_JT: log pi_ref of the rollouts' tokens.
        value_JT: V before each token.
        policy_logprob_JT: log pi, by the pass that is differentiated later; None where sampling gave the same.
    """

    reference_logprob_JT: Tensor
    value_JT: Tensor
    policy_logprob_JT: Tensor | None = None


class PPOEngine:
    """Owns the models, the optimizer and the generator; each method is one phase of an iteration.

    Args:
        models: policy, reference and value.
        settings: the numbers of rollouts and update.
        num_iterations: over which the step size falls.
        stop_ids: tokens that end an answer.
        pad_id: what fills the rest of a row.
        seed: of sampling and of the order within an update.
    """

    def __init__(
        self,
        models: PolicyModels,
        settings: PPOSection,
        *,
        num_iterations: int,
        stop_ids: Sequence[int],
        pad_id: int,
        seed: int,
        shared_prefix: bool = True,
    ) -> None:
        self.models = models
        self.settings, self._temperature = settings, settings.temperature
        self._tokens = TokensAtOnce(settings.micro_batch_tokens)
        self._per_question = settings.answers_per_question
        self._by_question = settings.baseline == "question"
        self._decoding = Decoding.fitting(
            models.policy(),
            max_new_tokens=settings.response_length,
            temperature=settings.temperature,
            stop_ids=stop_ids,
            pad_id=pad_id,
            shared_prefix=shared_prefix,
        )
        # In 16 bits a generation's steps round otherwise than a pass over whole rows.
        self._rescore = models.policy().dtype.itemsize < torch.float32.itemsize
        self._generator = torch.Generator(models.policy().device).manual_seed(seed)
        self._shuffle = np.random.default_rng([seed, 1])
        self._optimizer = torch.optim.AdamW(
            [{"params": models.policy_parameters()}, {"params": models.value_parameters()}],
            lr=settings.learning_rate,
            weight_decay=0.0,  # PPO table
            foreach=True,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda i: max(0.0, 1.0 - i / num_iterations)
        )

    def rollout(self, prompts: Sequence[Sequence[int]]) -> Rollout:
        """Sample one answer per prompt at the training temperature."""
        with self.models.sampling() as model:
            return sample(model, prompts, self._decoding, generator=self._generator)

    def reference_pass(self, sequences: Sequences) -> ReferencePass:
        """Reference log-probabilities and values of a rollout batch, and in 16 bits the policy's own once more."""
        reference_JT = torch.zeros(sequences.mask_JT.shape, device=sequences.mask_JT.device)
        value_JT, policy_JT = torch.zeros_like(reference_JT), torch.zeros_like(reference_JT)
        every = torch.arange(len(reference_JT), device=reference_JT.device)

        def score() -> None:
            chunks = self._micro_batches(sequences, every)
            passes = [(reference_JT, self.models.reference_pass(sequences.prefix_C, temperature=self._temperature))]
            if not self._by_question:
                passes.append((value_JT, self.models.value_pass(sequences.prefix_C)))
            if self._rescore:
                passes.append((policy_JT, self.models.policy_pass(sequences.prefix_C, temperature=self._temperature)))
            for into_JT, models_pass in passes:
                with torch.inference_mode(), models_pass as scorer:
                    found = [scorer(sequences.rows(rows)) for rows in chunks]
                for rows, part_JT in zip(chunks, found, strict=True):
                    into_JT[rows, : part_JT.shape[1]] = part_JT.to(into_JT.dtype)

        self._tokens.within(score)
        return ReferencePass(reference_JT, value_JT, policy_JT if self._rescore else None)

    def update(self, rollout: Rollout, reference: ReferencePass, score_J: Tensor) -> dict[str, float]:
        """All PPO epochs on one rollout batch (Eq. ppo-full).

        Args:
            rollout: the batch and its log-probabilities at sampling time.
            reference: its reference log-probabilities and values.
            score_J: the aggregated reward of each rollout.

        Returns:
            Means over the update: policy_loss, value_loss, clip_fraction, approximate_kl; and of the batch: kl (to the
            reference), entropy (of the sampled tokens: mean -log pi), response_length, in tokens. Where the policy
            was scored once more: sampler_spread, the standard deviation of log pi - log pi_sampler over the tokens,
            and sampler_outside_clip, the share of tokens whose ratio lies outside the clip range before any step.

        Raises:
            NotFinite: one of these, or the policy after its last step, is infinite or NaN.
        """
        s = self.settings
        batch, mask_JT = rollout.sequences, rollout.sequences.mask_JT
        old_JT, weight_JT = rollout.logprob_JT, None
        if reference.policy_logprob_JT is not None:
            old_JT = reference.policy_logprob_JT
            weight_JT = (old_JT - rollout.logprob_JT).exp().clamp(max=MAX_IMPORTANCE)
        reward_JT = ppo.shaped_rewards(
            ppo.whiten_scores(score_J),
            old_JT,
            reference.reference_logprob_JT,
            mask_JT,
            kl_coefficient=s.kl_coefficient,
        )
        if self._by_question:
            # Whitened over answers: over tokens, answers that tell nothing would not stay at 0.
            advantage_J = ppo.leave_one_out(reward_JT.sum(1), per_question=self._per_question)
            advantage_JT = ppo.whiten(advantage_J, mask_JT[:, 0])[:, None] * mask_JT
            return_JT = advantage_JT
        else:
            advantage_JT, return_JT = ppo.gae(
                reward_JT, reference.value_JT, mask_JT, gamma=DISCOUNT, gae_lambda=GAE_LAMBDA
            )
            advantage_JT = ppo.whiten(advantage_JT, mask_JT)
        sums = dict.fromkeys(("policy_loss", "value_loss", "clip_fraction", "approximate_kl"), 0.0)
        tokens = 0

        def gradients(rows_of_step: Tensor, count: int) -> dict[str, Tensor]:
            """Of a step's mini-batch, with what it adds to the sums."""
            self._optimizer.zero_grad(set_to_none=True)
            chunks = [(rows, batch.rows(rows)) for rows in self._micro_batches(batch, rows_of_step)]
            found = {name: torch.zeros((), dtype=torch.float64, device=mask_JT.device) for name in sums}
            # Each loss goes backward inside its own pass: gradient checkpointing would recompute it with whatever
            # adapter is in force by then, and only one graph has to be held at a time.
            with self.models.policy_pass(batch.prefix_C, temperature=self._temperature, train=True) as logprobs:
                for rows, part in chunks:
                    width = part.response_JT.shape[1]
                    policy = ppo.policy_loss(
                        logprobs(part),
                        old_JT[rows, :width],
                        advantage_JT[rows, :width],
                        part.mask_JT,
                        clip_range=s.clip_range,
                        weight_JT=None if weight_JT is None else weight_JT[rows, :width],
                    )
                    ppo.full_loss(policy=policy.loss, num_tokens=count).backward()
                    found["policy_loss"] += policy.loss.detach()
                    found["clip_fraction"] += policy.clipped
                    found["approximate_kl"] += policy.approximate_kl
            if self._by_question:
                return found
            with self.models.value_pass(batch.prefix_C, train=True) as values:
                for rows, part in chunks:
                    width = part.response_JT.shape[1]
                    value = ppo.value_loss(
                        values(part),
                        reference.value_JT[rows, :width],
                        return_JT[rows, :width],
                        part.mask_JT,
                        clip_range=s.clip_range,
                    )
                    ppo.full_loss(value=value, num_tokens=count).backward()
                    found["value_loss"] += value.detach()
            return found

        for _ in range(s.epochs):
            order = torch.from_numpy(self._shuffle.permutation(len(mask_JT))).to(mask_JT.device)
            for mini_batch in order.tensor_split(min(s.num_mini_batches, len(order))):
                count = int(mask_JT[mini_batch].sum())
                for name, part in self._tokens.within(partial(gradients, mini_batch, count)).items():
                    sums[name] += float(part)
                tokens += count
                for group in self._optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], MAX_GRAD_NORM)
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        stats = {name: total / max(tokens, 1) for name, total in sums.items()}
        stats["kl"] = float(((old_JT - reference.reference_logprob_JT) * mask_JT).sum(1).mean())
        stats["entropy"] = float(ppo.entropy(old_JT, mask_JT))
        stats["response_length"] = float(mask_JT.sum(1).float().mean())
        if weight_JT is not None:
            gap = (old_JT - rollout.logprob_JT)[mask_JT]
            stats["sampler_spread"] = float(gap.std(correction=0))
            stats["sampler_outside_clip"] = float(((gap.exp() - 1).abs() > s.clip_range).float().mean())
        if not (all(map(math.isfinite, stats.values())) and finite_logits(self.models.policy())):
            raise NotFinite("ppo.learning-rate")
        return stats

    def _micro_batches(self, sequences: Sequences, rows: Tensor) -> list[Tensor]:
        # On a CPU a pass costs what its tokens cost; a GPU gains more by more rows at once.
        by_prompt = self._per_question > 1 and rows.device.type == "cpu"
        return sequences.micro_batches(rows, tokens=self._tokens.now, by_prompt=by_prompt)

    def state(self) -> dict[str, Any]:
        """Everything a later engine on the same models needs to go on as this one would; see `restore`."""
        return {
            "policy": [p.detach() for p in self.models.policy_parameters()],
            "value": [p.detach() for p in self.models.value_parameters()],
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "device": self._generator.device.type,
            "generator": self._generator.get_state(),
            "shuffle": json.dumps(self._shuffle.bit_generator.state),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, from tensors on any device.

        Raises:
            ValueError: the parameters are not those of these models, or lay on another kind of device, whose random
                numbers are others.
        """
        here, there = self._generator.device.type, state["device"]
        if here != there:
            raise ValueError(
                f"it was written on a {there} device, and this machine's is {here}: go on on one of its kind"
            )
        trained = {"policy": self.models.policy_parameters(), "value": self.models.value_parameters()}
        for name, parameters in trained.items():
            if [p.shape for p in parameters] != [saved.shape for saved in state[name]]:
                raise ValueError(f"the {name} model's parameters have other shapes")
            with torch.no_grad():
                for parameter, saved in zip(parameters, state[name], strict=True):
                    parameter.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._generator.set_state(state["generator"].cpu())
        self._shuffle.bit_generator.state = json.loads(state["shuffle"])
