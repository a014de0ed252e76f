"""The best that one shared answer per question can reach: what no policy that answers all groups alike can exceed.

Legend: G groups, Q questions, K answer options (padded, `options` True for a real option), C candidate answers, N
answers collected so far.

Two objectives, both over the groups' alignment scores (Equations group-as and avg-min-as): the mean over groups, which
falls apart into one weighted problem per question, and the worst group's score, a concern of all questions jointly. By
duality the latter is the least, over group weights, of the best weighted score, so both rest on `best_weighted_answer`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment, linprog

from appa_flwr.analysis.fairness import BoolArray, FloatArray
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.protocol.rewards import METRICS, borda, js, ranking

OBJECTIVES = ("average", "min")
"""`average`: the mean of the groups' scores; `min`: the worst group's score."""

GAP_TOLERANCE = 1e-5
"""The search for the best minimum ends once value and upper bound are this close; scores are read to 1e-3."""

_INNER_GAP = 1e-10  # what one weighted problem may fall short of its optimum

# Cutting planes. 20 to 110 cuts were enough for 8 to 22 groups.
_MAX_CUTS = 200
_TOWARDS_BEST_WEIGHTS = 0.5

# Newton for `js`. 33 steps were the most that 3000 batches with weights and targets down to 1e-100 took.
_MAX_NEWTON_STEPS = 100
_LARGEST_LOG_STEP = 3.0
_SMALLEST_SHARE = 1e-14
_SMALLEST_RISE = 1e-3
_ROUNDING = 1e-14  # two losses that are closer are equal; else a last Newton step could be refused for ever

# Exchange of rankings for `borda`: memory for candidates, sharpness of the soft minimum, sweeps at each.
_MAX_ENUMERATED = 200_000
_SHARPNESS = (1e-2, 1e-3, 1e-4)
_MAX_SWEEPS = 20


@dataclass(frozen=True, eq=False)
class Ceiling:
    """The best shared answer that was found, and how far from the truth it can be.

    Attributes:
        answer_QK: (Q, K) in the form the metric takes as prediction, 0 at padding.
        value: the objective's value at that answer: reached, so a lower bound of the ceiling.
        upper_bound: no shared answer exceeds it.
    """

    answer_QK: FloatArray
    value: float
    upper_bound: float


def shared_answer(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike, *, metric: str, objective: str) -> FloatArray:
    """The answers of `ceiling`, (Q, K), without its value and bound; arguments and errors are the same."""
    return ceiling(targets_GQK, options_QK, metric=metric, objective=objective).answer_QK


def ceiling(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike, *, metric: str, objective: str) -> Ceiling:
    """The best shared answer to every question for one objective.

    `average` is solved to optimality by `best_weighted_answer`. `min` collects answers that are best for some group
    weights, mixes them by the linear program whose dual gives the next weights (cutting planes), and ends once value
    and bound meet. Answers of `js`, `wasserstein` and `cosine` can be mixed, so the gap closes. Rankings cannot: for
    `borda` the mixed program is a bound only, and the answer comes from the collected rankings improved one question
    at a time; at one question that tries every ranking while there are few enough.

    Targets (G, Q, K) are as the metric takes them, NaN where a group has none. A question without any target gets the
    uniform answer (for `borda` any ranking). Groups without any target take no part.

    Raises:
        UserError: a metric that is none of `SOLVED_METRICS`, or an unknown objective.
        ValueError: shapes that do not fit, no target at all, or targets that the metric rejects.
    """
    if metric not in _SOLVERS:
        raise unknown_name("metric", metric, valid=_SOLVERS)
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, valid=OBJECTIVES)
    targets_GQK, options_QK, present_GQ = _checked_targets(targets_GQK, options_QK)
    METRICS[metric](targets_GQK, targets_GQK, options_QK)  # says what is wrong with targets it cannot score
    # A group's score is the mean over its own questions, so each of its pairs weighs one over their number.
    pair_GQ = present_GQ / present_GQ.sum(axis=1, keepdims=True)
    if objective == "min":
        return _fairest_answer(targets_GQK, options_QK, pair_GQ, metric=metric)
    weights_G = np.full(len(pair_GQ), 1.0 / len(pair_GQ))
    answer_QK = best_weighted_answer(targets_GQK, options_QK, weights_G[:, None] * pair_GQ, metric=metric)
    value = float(weights_G @ _group_scores(answer_QK, targets_GQK, options_QK, pair_GQ, metric=metric))
    return Ceiling(answer_QK, value, value + _INNER_GAP)


def best_weighted_answer(
    targets_GQK: FloatArray, options_QK: BoolArray, weights_GQ: FloatArray, *, metric: str
) -> FloatArray:
    """For every question the answer (Q, K) with the highest weighted sum of the groups' rewards, 0 at padding.

    `js`: convex, Newton's method on the optimality conditions, to a certified 1e-10. `wasserstein`: the cumulative
    answer is the weighted median of the cumulative targets. `cosine`: the direction of the weighted sum of unit
    targets. `borda`: an assignment of options to positions. These are exact.

    Targets (G, Q, K) are as `ceiling` checks them; a question whose weights (G, Q) are all 0 is answered as if they
    were equal.
    """
    weights_GQ = np.where(weights_GQ.sum(axis=0) > 0.0, weights_GQ, 1.0)
    share_GQ: FloatArray = weights_GQ / weights_GQ.sum(axis=0)
    return _SOLVERS[metric](targets_GQK, options_QK, share_GQ)


def _best_js(targets_GQK: FloatArray, options_QK: BoolArray, weights_GQ: FloatArray) -> FloatArray:
    """Minimise sum_g w_g JSD(y, t_g) for every question.

    At the optimum the slopes R_k = sum_g w_g log(2 y_k / (y_k + t_gk)) are equal wherever y_k > 0. In u = log y a slope
    rises by a_k = sum_g w_g t_gk / (y_k + t_gk) in (0, 1], so Newton's step is (nu - R_k) / a_k with the nu that keeps
    the sum. With a_k = 1 it is the step of the convex-concave procedure, which never makes things worse; a question
    whose Newton step would takes that one.
    """
    targets_GQK = _shares(targets_GQK)
    answer_QK = _shares(np.einsum("gq,gqk->qk", weights_GQ, targets_GQK))
    open_Q = np.arange(options_QK.shape[0])  # from here on Q counts the questions still open
    for _ in range(_MAX_NEWTON_STEPS):
        now_QK, target_GQK, weight_GQ = answer_QK[open_Q], targets_GQK[:, open_Q], weights_GQ[:, open_Q]
        support_QK = now_QK > 0.0
        safe_QK = np.where(support_QK, now_QK, 1.0)  # log 2 is the slope of an option without any target
        slope_QK = np.einsum("gq,gqk->qk", weight_GQ, np.log(2.0 * safe_QK / (safe_QK + target_GQK)))
        # What could still be gained at most, by concavity: the steepest vertex against where we stand.
        lowest_Q = np.where(support_QK, slope_QK, np.inf).min(axis=-1)
        gain_Q = ((now_QK * slope_QK).sum(axis=-1) - lowest_Q) / (2.0 * math.log(2.0))
        is_open_Q = gain_Q > _INNER_GAP
        if not is_open_Q.any():
            return answer_QK
        open_Q, now_QK, slope_QK = open_Q[is_open_Q], now_QK[is_open_Q], slope_QK[is_open_Q]
        target_GQK, weight_GQ = target_GQK[:, is_open_Q], weight_GQ[:, is_open_Q]
        rise_QK = np.einsum("gq,gqk->qk", weight_GQ, target_GQK / np.where(now_QK > 0.0, now_QK + target_GQK, 1.0))
        newton_QK = _log_step(now_QK, slope_QK, rise_QK)
        loss_Q, newton_loss_Q = (
            -(weight_GQ * js(tried_QK, target_GQK, options_QK[open_Q])).sum(axis=0) for tried_QK in (now_QK, newton_QK)
        )
        sure_QK = _log_step(now_QK, slope_QK, np.ones_like(rise_QK))
        answer_QK[open_Q] = np.where((newton_loss_Q > loss_Q + _ROUNDING)[:, None], sure_QK, newton_QK)
    raise RuntimeError(f"no convergence in {_MAX_NEWTON_STEPS} steps for question(s) {open_Q.tolist()}")


def _log_step(answer_QK: FloatArray, slope_QK: FloatArray, rise_QK: FloatArray) -> FloatArray:
    """Move log y by (nu - slope) / rise, no option by more than `_LARGEST_LOG_STEP`, and back onto the simplex.

    Options at 0 stay there. No other share falls under `_SMALLEST_SHARE`: it costs nothing that counts, and from there
    it is few steps up.
    """
    rise_QK = np.maximum(rise_QK, _SMALLEST_RISE)
    mass_QK = answer_QK / rise_QK
    level_Q = (mass_QK * slope_QK).sum(axis=-1) / mass_QK.sum(axis=-1)
    step_QK = np.clip((level_Q[:, None] - slope_QK) / rise_QK, -_LARGEST_LOG_STEP, _LARGEST_LOG_STEP)
    return _shares(np.where(answer_QK > 0.0, np.maximum(answer_QK * np.exp(step_QK), _SMALLEST_SHARE), 0.0))


def _best_wasserstein(targets_GQK: FloatArray, options_QK: BoolArray, weights_GQ: FloatArray) -> FloatArray:
    """Minimise sum_g w_g sum_k |Y_k - T_gk| of the cumulative distributions: a weighted median for every k.

    The lower median of numbers that all grow with k grows with k, so the medians are a cumulative distribution.
    """
    cumulative_GQK = np.cumsum(_shares(targets_GQK), axis=-1)
    order_GQK = np.argsort(cumulative_GQK, axis=0, kind="stable")
    sorted_GQK = np.take_along_axis(cumulative_GQK, order_GQK, axis=0)
    weight_GQK = np.take_along_axis(np.broadcast_to(weights_GQ[..., None], order_GQK.shape), order_GQK, axis=0)
    # The slack keeps ties on one side for all k although the weights are summed in different orders.
    is_past_GQK = np.cumsum(weight_GQK, axis=0) >= 0.5 - _INNER_GAP
    median_QK = np.take_along_axis(sorted_GQK, is_past_GQK.argmax(axis=0)[None], axis=0)[0]
    return _shares(np.maximum(np.diff(median_QK, axis=-1, prepend=0.0), 0.0))


def _best_cosine(targets_GQK: FloatArray, options_QK: BoolArray, weights_GQ: FloatArray) -> FloatArray:
    """Maximise y . s / |y| with s = sum_g w_g t_g / |t_g|: y along s, which has no negative entries."""
    return _shares(np.einsum("gq,gqk->qk", weights_GQ, _directions(targets_GQK)))


def _best_borda(targets_GQK: FloatArray, options_QK: BoolArray, weights_GQ: FloatArray) -> FloatArray:
    """Maximise the weighted Borda reward: which option in which position is an assignment problem."""
    order_GQK = ranking(targets_GQK, options_QK)
    is_placed_GQKK = order_GQK[..., None] == np.arange(options_QK.shape[-1])
    votes_QKK = np.einsum("gq,gqkl->qkl", weights_GQ, is_placed_GQKK)
    answer_QK = np.zeros(options_QK.shape)
    for question, num_options in enumerate(options_QK.sum(axis=-1)):
        worth_K = np.arange(num_options, 0, -1)
        real_K = np.flatnonzero(options_QK[question])
        profit_KK = worth_K[:, None] * votes_QKK[question, :num_options][:, real_K]
        position_K, option_K = linear_sum_assignment(profit_KK, maximize=True)
        answer_QK[question, real_K[option_K]] = worth_K[position_K]
    return answer_QK


_SOLVERS: dict[str, Callable[[FloatArray, BoolArray, FloatArray], FloatArray]] = {
    "js": _best_js,
    "wasserstein": _best_wasserstein,
    "cosine": _best_cosine,
    "borda": _best_borda,
}

SOLVED_METRICS = tuple(_SOLVERS)
"""Metrics that have ceilings. `js-distance` has none: its weighted problem can have several local optima."""


def unsolved(metric: str) -> UserError:
    """The error about a metric that has no ceilings."""
    return UserError(
        f'metric = "{metric}" has no best shared answers to compare with; take {", ".join(SOLVED_METRICS)}'
    )


def _fairest_answer(targets_GQK: FloatArray, options_QK: BoolArray, pair_GQ: FloatArray, *, metric: str) -> Ceiling:
    """Maximise the worst group's score over the answers of all questions.

    Every weighted optimum gives an upper bound (its weighted score) and a vector of group scores. The best mixture of
    the vectors collected is a matrix game, a small linear program; its value bounds the minimum from below where
    answers can be mixed, its dual is the next weights to try, drawn half-way to the best ones so far, without which
    cutting planes jump about.
    """
    weights_G = best_weights_G = np.full(len(pair_GQ), 1.0 / len(pair_GQ))
    answers_NQK: list[FloatArray] = []
    scores_NG: list[FloatArray] = []
    upper = np.inf

    def collect(answer_QK: FloatArray) -> None:
        answers_NQK.append(answer_QK)
        scores_NG.append(_group_scores(answer_QK, targets_GQK, options_QK, pair_GQ, metric=metric))

    for _ in range(_MAX_CUTS):
        collect(best_weighted_answer(targets_GQK, options_QK, weights_G[:, None] * pair_GQ, metric=metric))
        weighted = float(weights_G @ scores_NG[-1])
        if weighted < upper:
            upper, best_weights_G = weighted, weights_G
        game_value, share_N, game_weights_G = _matrix_game(np.array(scores_NG))
        if metric != "borda":
            collect(_mix(np.array(answers_NQK), share_N, metric=metric))
        if upper - max(np.min(scores_NG, axis=1).max(), game_value) <= GAP_TOLERANCE:
            break
        weights_G = best_weights_G + _TOWARDS_BEST_WEIGHTS * (game_weights_G - best_weights_G)
    best_QK = answers_NQK[int(np.min(scores_NG, axis=1).argmax())]
    if metric == "borda":
        best_QK = _improved_rankings(best_QK, np.array(answers_NQK), targets_GQK, options_QK, pair_GQ)
    value = float(_group_scores(best_QK, targets_GQK, options_QK, pair_GQ, metric=metric).min())
    return Ceiling(best_QK, value, upper + _INNER_GAP)


def _matrix_game(scores_NG: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """The mixture of answers with the best worst group: its value, shares (N,) and the worst weights (G,)."""
    num_answers, num_groups = scores_NG.shape
    solution = linprog(
        c=np.append(np.zeros(num_answers), -1.0),
        A_ub=np.column_stack([-scores_NG.T, np.ones(num_groups)]),
        b_ub=np.zeros(num_groups),
        A_eq=np.append(np.ones(num_answers), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0.0, None)] * num_answers + [(None, None)],
        method="highs",
    )
    if solution.x is None:
        raise RuntimeError(f"the linear program of the group weights was not solved: {solution.message}")
    share_N = _shares(np.maximum(solution.x[:-1], 0.0))
    weights_G = _shares(np.maximum(-solution.ineqlin.marginals, 0.0))
    return float(solution.x[-1]), share_N, weights_G


def _mix(answers_NQK: FloatArray, share_N: FloatArray, *, metric: str) -> FloatArray:
    """The average answer: by concavity every group scores at least the average of its scores.

    For `cosine` the average direction: cosines are linear in it and stretching it to length one only raises them.
    """
    if metric == "cosine":
        return _shares(np.tensordot(share_N, _directions(answers_NQK), axes=1))
    mixed_QK: FloatArray = np.tensordot(share_N, answers_NQK, axes=1)
    return mixed_QK


def _improved_rankings(
    answer_QK: FloatArray, answers_NQK: FloatArray, targets_GQK: FloatArray, options_QK: BoolArray, pair_GQ: FloatArray
) -> FloatArray:
    """Exchange the ranking of one question after the other while the worst group gains.

    Gain is judged by a soft minimum that is sharpened step by step: the plain minimum of many groups rarely moves by
    one question's ranking. Candidates are all rankings of a question where those are few, else the ones collected and
    the groups' own.
    """
    candidates = [_candidate_rankings(q, answers_NQK, targets_GQK, options_QK) for q in range(len(options_QK))]
    gains = [
        borda(candidate_CK[:, None], targets_GQK[:, q], options_QK[q]) * pair_GQ[:, q]
        for q, candidate_CK in enumerate(candidates)
    ]
    chosen = [int((tried_CK == answer_QK[q]).all(axis=-1).argmax()) for q, tried_CK in enumerate(candidates)]
    score_G = np.sum([gain_CG[choice] for gain_CG, choice in zip(gains, chosen, strict=True)], axis=0)
    best, best_value = list(chosen), score_G.min()
    for sharpness in _SHARPNESS:
        for _ in range(_MAX_SWEEPS):
            has_changed = False
            for question, gain_CG in enumerate(gains):
                score_CG = score_G - gain_CG[chosen[question]] + gain_CG
                soft_C = _soft_minimum(score_CG, sharpness=sharpness)
                choice = int(soft_C.argmax())
                if soft_C[choice] > soft_C[chosen[question]] + _INNER_GAP:
                    chosen[question], score_G, has_changed = choice, score_CG[choice], True
                    if score_G.min() > best_value:
                        best, best_value = list(chosen), score_G.min()
            if not has_changed:
                break
    return np.array([candidate_CK[choice] for candidate_CK, choice in zip(candidates, best, strict=True)])


def _candidate_rankings(
    question: int, answers_NQK: FloatArray, targets_GQK: FloatArray, options_QK: BoolArray
) -> FloatArray:
    """Rankings (C, K) to try for one question, as scores K..1 at its options and 0 at padding."""
    real_K = np.flatnonzero(options_QK[question])
    if math.factorial(real_K.size) * len(options_QK) <= _MAX_ENUMERATED:
        orders_CK = np.array(list(itertools.permutations(real_K)))
    else:
        collected_NK = ranking(answers_NQK[:, question], options_QK[question])
        own_GK = ranking(targets_GQK[:, question], options_QK[question])
        orders_CK = np.unique(np.concatenate([collected_NK, own_GK]), axis=0)[:, : real_K.size]
    scores_CK = np.zeros((len(orders_CK), options_QK.shape[1]))
    np.put_along_axis(scores_CK, orders_CK, np.arange(real_K.size, 0.0, -1.0)[None], axis=1)
    return scores_CK


def _soft_minimum(score_CG: FloatArray, *, sharpness: float) -> FloatArray:
    lowest_C = score_CG.min(axis=1)
    excess_CG = (score_CG - lowest_C[:, None]) / sharpness
    soft_C: FloatArray = lowest_C - sharpness * np.log(np.exp(-excess_CG).sum(axis=1))
    return soft_C


def _group_scores(
    answer_QK: FloatArray, targets_GQK: FloatArray, options_QK: BoolArray, pair_GQ: FloatArray, *, metric: str
) -> FloatArray:
    """Alignment score of every group (G,) if all are given the same answers."""
    score_G: FloatArray = (METRICS[metric](answer_QK, targets_GQK, options_QK) * pair_GQ).sum(axis=1)
    return score_G


def _shares(values: FloatArray) -> FloatArray:
    shares: FloatArray = values / values.sum(axis=-1, keepdims=True)
    return shares


def _directions(values: FloatArray) -> FloatArray:
    """Vectors of length one; a zero vector, at a cosine of 0 with every answer, stays zero."""
    length = np.linalg.norm(values, axis=-1, keepdims=True)
    directions: FloatArray = values / np.where(length == 0.0, 1.0, length)
    return directions


def _checked_targets(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Targets of the groups that have any, uniform where absent (such pairs get no weight), and where they are."""
    targets_GQK = np.asarray(targets_GQK, dtype=np.float64)
    options_QK = np.asarray(options_QK, dtype=bool)
    if targets_GQK.ndim != 3 or targets_GQK.shape[1:] != options_QK.shape or not options_QK.any(axis=-1).all():
        shapes = f"{targets_GQK.shape} and {options_QK.shape}"
        raise ValueError(f"expected targets (G, Q, K) and options (Q, K) with an option in every row, got {shapes}")
    present_GQ = ~(np.isnan(targets_GQK) & options_QK).any(axis=-1)
    if not present_GQ.any():
        raise ValueError("there is no target to meet: every (group, question) pair is absent")
    targets_GQK = np.where(options_QK, np.where(present_GQ[..., None], targets_GQK, 1.0), 0.0)
    has_any_G = present_GQ.any(axis=1)
    return targets_GQK[has_any_G], options_QK, present_GQ[has_any_G]
