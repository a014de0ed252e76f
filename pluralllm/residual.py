"""The default architecture: a mean without context, and a group's residual from this mean in closed form.

A network predicts the expected share of every option, the same for all groups. The residual of a group is a Gaussian
process over the square roots of shares, conditioned exactly on all of the group's answers (kernel ridge regression),
with one Cholesky factorisation per group. Network and kernel are trained together on episodes of one group
(`pluralllm.training`), so only weights travel. There are five views, each with its own kernel, and each trained on a
share of the episodes:

- The network memorises its training questions, and the residuals of a group's answers from such a mean are small. On
  other questions the mean is far off, and the same residual would be trusted too much. So in two views the mean reads
  the question, and in two others the mean is blind to the question and reads only the options. The first two predict
  questions that were trained on; other questions are predicted by the average of both kinds.
- With few training questions any network is worse than none. So there is a plain view, whose mean is the uniform
  answer and whose kernel models all of a group's answers. It is used for questions that were not trained on.
- Two of the other kernels compare texts of questions, texts of options, and places of options in the list. The two
  others also use features that the network learns (`RANK`). Features memorise how the training questions divide the
  groups, and are used for these questions. For other questions they help if questions with similar texts divide the
  groups differently, and harm otherwise.

`Shares` sets how much features and the plain view count for questions that were not trained on; the server chooses
from `SHARES` by validation questions (`pluralllm.data.validation_questions`), and keeps the first without clear gain.

Residuals are centred within a question, since shares have a fixed sum.

Axis letters: B episodes, S questions, K options, N option tokens of the context, M those of the targets, P of either,
E embedding, F features of a text, D hidden features, R learned features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from appa_flwr.core.arrays import BoolArray, FloatArray
from pluralllm import data
from pluralllm.network import Episodes, Head, OptionMixing, PluralLLM, Questions, TokenLayout, layout, log_share

# where in the list an option stands, how far from the middle, and one over the length of the list
PLACE_FEATURES = 3
# Factor of the kernel's parameters, which are logarithms: without it they would hardly move at the network's step size.
KERNEL_STEP = 8.0
# question and option, question and place, question and both; option, place and both, for any pair of questions
NUM_PRODUCTS = 6
START_WEIGHT, START_LENGTH, START_NOISE, START_FEATURE = 5e-3, 0.7, 1e-2, 0.02
# weight of the Gaussian likelihood in the loss, beside the cross entropy
LIKELIHOOD_SHARE = 0.5
# smallest predicted root of a share, since roots are not negative
ROOT_FLOOR = 1e-2
# In prediction a kernel of more entries than the first number comes in blocks of so many questions, since it takes some
# eleven matrices of its size.
WHOLE, BLOCK = 2**21, 64
SMALLEST_SHARE, SMALLEST_VARIANCE, JITTER = 1e-6, 1e-6, 1e-6


class View(NamedTuple):
    """One of five models of a group, each with its own kernel."""

    blind: bool  # whether the mean must not read the question
    features: bool  # whether the kernel has learned features
    plain: bool = False  # whether the mean is the uniform answer, not the network's; then blind and without features

    @property
    def kernel(self) -> int:
        """Row of the view in the kernel's parameters."""
        return -1 if self.plain else 2 * self.features + self.blind


class Shares(NamedTuple):
    """Shares of some views, in [0, 1], in predictions of questions that were not trained on."""

    features: float  # of the views with learned features, among the views with a network
    plain: float  # of the view without a network


SHARES_KEY = "view_shares"
# shares without validation, and all that a server can choose from, these first
START_SHARES = Shares(0.5, 0.5)
_BY_NETWORK = (Shares(features, 0.0) for features in (0.0, 0.5, 1.0))
SHARES = (START_SHARES, Shares(0.0, 0.5), Shares(1.0, 0.5), *_BY_NETWORK, Shares(0.0, 1.0))

BLIND, PLAIN = View(blind=True, features=False), View(blind=True, features=False, plain=True)
VIEWS = (*(View(blind, features) for blind in (False, True) for features in (False, True)), PLAIN)


@dataclass(frozen=True)
class _Read:
    """The option tokens of one group's questions (one episode), with the inputs of kernel and residual."""

    tokens: TokenLayout
    question_PF: Tensor  # text of the question, norm 1
    option_PF: Tensor  # text of the option, norm 1
    place_P: Tensor  # place of the option in the list, -1 to 1
    root_P: Tensor  # square root of the mean's share
    feature_PR: Tensor | None  # learned features; None in a view without

    def centred(self, value_PX: Tensor) -> Tensor:
        """Subtract the mean over each question's options."""
        return value_PX - self.tokens.question_mean(value_PX)[self.tokens.question_N]

    @property
    def option_SK(self) -> Tensor:
        """True where a token is real."""
        return self.tokens.option_BSK[0]

    def padded(self, value_P: Tensor) -> Tensor:
        """Values of tokens as (S, K), 0 on padding."""
        return value_P.new_zeros(self.option_SK.shape).masked_scatter(self.option_SK, value_P)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Index of each option among the tokens (S, K), and mask of real pairs of a question's options (S, K, K)."""
        pair_SKK = self.option_SK[:, :, None] & self.option_SK[:, None, :]
        return self.padded(torch.arange(len(self.place_P))), pair_SKK

    def blocks_beside(self, other: "_Read") -> Iterator["_Read"]:
        """The tokens of `BLOCK` questions after the others, or all at once if their kernel with the others is small."""
        if len(self.place_P) * len(other.place_P) <= WHOLE:
            yield self
            return
        size_T = [int(option_SK.sum()) for option_SK in self.option_SK.split(BLOCK)]
        values = (self.question_PF, self.option_PF, self.place_P, self.root_P)
        features = [None] * len(size_T) if self.feature_PR is None else self.feature_PR.split(size_T)
        split = zip(*(value.split(size_T) for value in values), features, strict=True)
        for option_SK, parts in zip(self.option_SK.split(BLOCK), split, strict=True):
            yield _Read(layout(option_SK[None]), *parts)

    def shares(self, residual_P: Tensor, variance_P: Tensor) -> Tensor:
        """Expected shares (P,): a root with mean m and variance v has the expected square m^2 + v."""
        square_P = (self.root_P + residual_P).clamp_min(ROOT_FLOOR).square() + variance_P
        mean_P1 = self.tokens.question_mean(square_P[:, None])[self.tokens.question_N]
        return square_P / (mean_P1[:, 0] * self.tokens.size_S[self.tokens.question_N])

    def share_table(self, residual_P: Tensor, variance_P: Tensor) -> FloatArray:
        """Expected shares as a table (S, K), 0 on padding."""
        table_SK: FloatArray = self.padded(self.shares(residual_P, variance_P)).numpy()
        return table_SK


class ExactResidual(PluralLLM):
    """PluralLLM as mean and exact residual; untrained, the mean is uniform. The state dict holds floats only."""

    def __init__(self) -> None:
        super().__init__()
        self.option = nn.Linear(data.EMBEDDING_DIM + PLACE_FEATURES, data.HIDDEN_DIM)
        self.unread = nn.Parameter(torch.zeros(data.HIDDEN_DIM))
        self.mixing = nn.ModuleList(OptionMixing() for _ in range(data.NUM_BLOCKS))
        self.head = Head()
        self.log_weight = nn.Parameter(torch.full((len(VIEWS), NUM_PRODUCTS), math.log(START_WEIGHT) / KERNEL_STEP))
        self.log_length = nn.Parameter(torch.full((len(VIEWS), 3), math.log(START_LENGTH) / KERNEL_STEP))
        self.log_noise = nn.Parameter(torch.full((len(VIEWS),), math.log(START_NOISE) / KERNEL_STEP))
        self.feature_option = nn.Linear(data.EMBEDDING_DIM + PLACE_FEATURES, data.HIDDEN_DIM)
        self.feature_mixing = OptionMixing()
        self.feature_norm = nn.LayerNorm(data.HIDDEN_DIM)
        self.feature = nn.Linear(data.HIDDEN_DIM, data.RANK, bias=False)
        self.log_feature = nn.Parameter(torch.full((2,), math.log(START_FEATURE) / KERNEL_STEP))
        self.register_buffer(SHARES_KEY, torch.tensor(START_SHARES))

    def loss(self, episodes: Episodes) -> Tensor:
        """Per target question, the cross entropy and half the negative log-likelihood under the Gaussian process."""
        losses = []
        for b, (blind, features, plain) in enumerate(episodes.view_B3.tolist()):
            context, target = episodes.context.episode(b), episodes.target.episode(b)
            noise_C, noise_M = (noise[b] for noise in episodes.noise)
            view = PLAIN if plain else View(blind, features)
            conditioned = self.condition(context, view, noise=noise_C)
            read = self._read(target, view, noise=noise_M)
            residual_M, variance_M = conditioned.residual(read)
            assert target.answer is not None
            answer_M = target.answer[target.options]
            share_M = read.shares(residual_M, variance_M)
            error_M = read.centred((answer_M.sqrt() - read.root_P)[:, None])[:, 0] - residual_M
            total_M = variance_M + self._noise(view)
            entropy = -(answer_M * share_M.clamp_min(SMALLEST_SHARE).log()).sum()
            surprise = 0.5 * (error_M.square() / total_M + total_M.log()).sum()
            losses.append((entropy + LIKELIHOOD_SHARE * surprise) / len(read.tokens.size_S))
        return torch.stack(losses).mean()

    def view_weights(self, trained_Q: BoolArray, shares: Shares | None = None) -> FloatArray:
        """Weight of each of `VIEWS` in the prediction of each question, (W, Q).

        `trained_Q` is True for questions that were trained on; `shares` apply to other questions, None = `self.shares`.
        """
        shares = shares or self.shares
        plain_Q, blind_Q = np.where(trained_Q, 0.0, shares.plain), np.where(trained_Q, 0.0, 0.5)
        features_Q = np.where(trained_Q, 1.0, shares.features)
        by_network = [
            (1.0 - plain_Q) * blind * features
            for blind in (1.0 - blind_Q, blind_Q)
            for features in (1.0 - features_Q, features_Q)
        ]
        return np.stack([*by_network, plain_Q])

    @property
    def shares(self) -> Shares:
        """Shares for questions that were not trained on, cut to [0, 1] in case a server sends other values."""
        return Shares(*self.get_buffer(SHARES_KEY).clamp(0.0, 1.0).tolist())

    def condition(self, context: Questions, view: View, *, noise: Tensor | None = None) -> "Conditioned":
        """Condition on a group's answers to C >= 0 questions, (1, C, ...); `noise` (C, E) is for the network's input.

        If the linear system cannot be solved, the result is conditioned on no answers. Without answers `BLIND` replaces
        the plain view, which would know nothing.
        """
        if view.plain and not context.options.shape[1]:
            view = BLIND
        read = self._read(context, view, noise=noise)
        assert context.answer is not None
        answer_N = context.answer[context.options].to(read.root_P.dtype)
        difference_N = read.centred((answer_N.sqrt() - read.root_P)[:, None])[:, 0]
        own_noise = self._noise(view).to(difference_N.dtype) + JITTER
        parts = [read] if self.training else read.blocks_beside(read)
        kernel_NN = torch.cat([self._kernel(part, read, view) for part in parts])
        lower_NN, failed = torch.linalg.cholesky_ex(kernel_NN + own_noise * torch.diag(torch.ones_like(difference_N)))
        if failed:  # then the prediction is the mean of all groups
            return self.condition(context.map(lambda value: value[:, :0]), view)
        return Conditioned(self, view, read, difference_N, lower_NN)

    def _read(self, questions: Questions, view: View, *, noise: Tensor | None = None) -> _Read:
        tokens = layout(questions.options)
        embedding_PE = questions.embedding[questions.options]
        _, _, place_P = questions.options.nonzero(as_tuple=True)
        size_P = tokens.size_S[tokens.question_N]
        place_P = torch.where(size_P > 1, 2.0 * place_P / (size_P - 1).clamp_min(1) - 1.0, 0.0)
        place_P3 = torch.stack([place_P, place_P.abs(), 1.0 / size_P], dim=1)
        noisy_PE = embedding_PE if noise is None else embedding_PE + noise[tokens.question_N]
        input_PE = torch.cat([noisy_PE, place_P3], dim=1)
        root_P = size_P.to(input_PE.dtype).rsqrt() if view.plain else self._mean(questions, tokens, input_PE, view)
        feature_PR = None
        if view.features:
            mixed_PD = self.feature_mixing(self.feature_option(input_PE), tokens)
            scale = (KERNEL_STEP * self.log_feature[int(view.blind)]).exp()
            feature_PR = scale * self.feature(self.feature_norm(mixed_PD))
        exact = torch.float32 if self.training else torch.float64  # factorising many answers needs the precision
        return _Read(
            tokens,
            F.normalize(embedding_PE[:, data.QUESTION_PART].to(exact), dim=1),
            F.normalize(embedding_PE[:, data.OPTION_PART].to(exact), dim=1),
            place_P.to(exact),
            root_P.to(exact),
            None if feature_PR is None else feature_PR.to(exact),
        )

    def _mean(self, questions: Questions, tokens: TokenLayout, input_PE: Tensor, view: View) -> Tensor:
        """Roots (P,) of the shares that the network predicts."""
        if view.blind:
            input_PE = input_PE.clone()
            input_PE[:, data.QUESTION_PART] = 0.0
        token_PD = self.option(input_PE) + (self.unread if view.blind else 0.0)
        for mixing in self.mixing:
            token_PD = mixing(token_PD, tokens)
        log_SK = log_share(self.head(token_PD), questions.options)[0]
        return log_SK[questions.options[0]].exp().clamp_min(SMALLEST_SHARE).sqrt()

    def _noise(self, view: View) -> Tensor:
        return (KERNEL_STEP * self.log_noise[view.kernel]).exp()

    def _products(self, view: View, question: Tensor, option: Tensor, place: Tensor) -> Tensor:
        """The kernel, from inner products of texts and differences of places."""
        weight = (KERNEL_STEP * self.log_weight[view.kernel]).exp()
        square = (2.0 * KERNEL_STEP * self.log_length[view.kernel]).exp()
        near = ((question - 1.0) / square[0]).exp()  # texts have norm 1, so 1 - cosine is half their squared distance
        like = ((option - 1.0) / square[1]).exp()
        beside = (-0.5 * place.square() / square[2]).exp()
        by_question = weight[0] * like + weight[1] * beside + weight[2] * like * beside
        always = weight[3] * like + weight[4] * beside + weight[5] * like * beside
        return near * by_question + always

    def _kernel(self, a: _Read, b: _Read, view: View) -> Tensor:
        """Covariance (Pa, Pb) of the centred residuals of two lists of tokens."""
        place = a.place_P[:, None] - b.place_P
        kernel = self._products(view, a.question_PF @ b.question_PF.T, a.option_PF @ b.option_PF.T, place)
        if a.feature_PR is not None and b.feature_PR is not None:
            kernel = kernel + a.feature_PR @ b.feature_PR.T
        return b.centred(a.centred(kernel).T).T

    def _variance(self, read: _Read, view: View) -> Tensor:
        """Prior variance (P,) of the centred residuals: the diagonal of `_kernel`, question by question."""
        slot_SK, pair_SKK = read.blocks()
        option_SKF, place_SK = read.option_PF[slot_SK], read.place_P[slot_SK]
        like_SKK = option_SKF @ option_SKF.transpose(1, 2)
        place_SKK = place_SK[:, :, None] - place_SK[:, None, :]
        kernel_SKK = self._products(view, torch.ones_like(like_SKK), like_SKK, place_SKK)
        if read.feature_PR is not None:
            feature_SKR = read.feature_PR[slot_SK]
            kernel_SKK = kernel_SKK + feature_SKR @ feature_SKR.transpose(1, 2)
        kernel_SKK = kernel_SKK * pair_SKK
        size_S1 = read.tokens.size_S[:, None]
        row_SK = kernel_SKK.sum(2) / size_S1
        centred_SK = kernel_SKK.diagonal(dim1=1, dim2=2) - 2.0 * row_SK + row_SK.sum(1, keepdim=True) / size_S1
        return centred_SK[read.option_SK]


@dataclass(frozen=True)
class Conditioned:
    """The Gaussian process conditioned on a group's answers, which predicts any number of targets."""

    model: ExactResidual
    view: View
    context: _Read  # the answered questions
    difference_N: Tensor  # centred difference of the roots of answers and mean
    lower_NN: Tensor  # Cholesky factor of their covariance, noise included

    @property
    def known(self) -> bool:
        """True if the process is conditioned on any answer."""
        return len(self.difference_N) > 0

    def residual(self, target: _Read) -> tuple[Tensor, Tensor]:
        """Mean and variance (M,) of the targets' centred residuals, without noise."""
        kernel_MN = self.model._kernel(target, self.context, self.view)
        weight_N = torch.cholesky_solve(self.difference_N[:, None], self.lower_NN)[:, 0]
        known_NM = torch.linalg.solve_triangular(self.lower_NN, kernel_MN.T, upper=False)
        variance_M = self.model._variance(target, self.view) - known_NM.square().sum(0)
        return kernel_MN @ weight_N, variance_M.clamp_min(SMALLEST_VARIANCE)

    def predict(self, target: Questions) -> FloatArray:
        """The group's answers to M questions, (1, M, ...): expected shares (M, K), which sum to 1; padding is 0.

        A question that is in the context too is predicted from all answers, including its own.
        """
        parts = self.model._read(target, self.view).blocks_beside(self.context)
        return np.concatenate([part.share_table(*self.residual(part)) for part in parts])

    def left_out(self) -> FloatArray:
        """Each question of the context predicted from the others, (C, K): block leave-one-out in closed form.

        With A the inverse of the covariance, the residual of block b is `y_b - inv(A_bb) (A y)_b`, of variance
        `inv(A_bb)` (Rasmussen and Williams, Gaussian Processes for Machine Learning, section 5.4.2, for blocks).
        """
        inverse_NN = torch.cholesky_inverse(self.lower_NN)
        weight_SK = self.context.padded(inverse_NN @ self.difference_N)
        option_SK, (slot_SK, pair_SKK) = self.context.option_SK, self.context.blocks()
        block_SKK = inverse_NN[slot_SK[:, :, None], slot_SK[:, None, :]] * pair_SKK
        block_SKK = torch.linalg.inv(block_SKK + torch.diag_embed((~option_SK).to(block_SKK.dtype)))
        residual_N = self.difference_N - (block_SKK @ weight_SK[..., None])[..., 0][option_SK]
        variance_N = block_SKK.diagonal(dim1=1, dim2=2)[option_SK] - self.model._noise(self.view)
        return self.context.share_table(residual_N, variance_N.clamp_min(SMALLEST_VARIANCE))
