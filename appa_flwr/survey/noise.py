"""Noise that protects respondents: added once to the counts of a file of respondents; what follows only reads it.

Neighbouring files differ by one respondent, a row. Options, groups, notes and thresholds come from the codebook or from
noisy counts. Each row is read on its own and has at most a stated weight, so that the counts of neighbours, which are
whole numbers, differ by at most `Noise.sensitivity`. OpenDP draws the noise, without a seed, and accounts for it.

Axis letters: R respondents, C all counts, G groups of a column, Q a group's questions, K options.
"""

import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from appa_flwr.core.arrays import FloatArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.survey import respondents
from appa_flwr.survey.codebook import UNWEIGHTED, Codebook, Listed
from appa_flwr.survey.frames import Frame, RawAnswer
from appa_flwr.survey.names import some
from appa_flwr.survey.nonanswers import code_text
from appa_flwr.survey.types import UNITS, Noise, Survey

_LEAST: Final = 2.0  # an answer's total, in standard deviations of its noise
_COARSE: Final = 0.1  # of a weight: rounding that moves it by more spoils it
_SEARCHED: Final = 0.05, 1e4  # standard deviations of the noise, as a multiple of the sensitivity


class Promise(NamedTuple):
    """What an owner promises to each respondent."""

    epsilon: float
    delta: float = 1e-6
    cap: float = 0.0  # largest weight, in people; 0 = the respondents have no weights
    again: bool = False  # even if the codebook holds a release


def plan(codebook: Codebook, promise: Promise) -> Noise:
    """Find the least noise that keeps a promise.

    Raises:
        UserError: the codebook has marks, holds a release (unless `again`), or has a weight and the promise no cap.
    """
    if marked := codebook.marked():
        raise UserError(
            f"the codebook is not confirmed: {some(marked)} may be there because of one person; check the lines that "
            "are marked seen or guessed, and remove the marks"
        )
    if codebook.releases and not promise.again:
        earlier = codebook.releases[-1].sentence()
        raise UserError(
            f"the codebook holds a release with {earlier}, to which this would add; if you mean it, --again"
        )
    if not codebook.questions:
        raise UserError("the codebook has no question")
    weight, has_weight = codebook.weight.column, codebook.weight.column != UNWEIGHTED
    if has_weight != bool(promise.cap):
        advice = f"want the largest {weight} that counts, in people, chosen without a look at the file"
        raise UserError(f"--weight-cap: {advice if has_weight else 'the codebook has no weight'}")
    cap = math.ceil(promise.cap * UNITS) / UNITS if has_weight else 1.0
    unit = Noise(*promise[:2], 1.0, len(codebook.questions), len(codebook.groups), cap)
    sd = _scale(unit.sensitivity * UNITS, promise.epsilon, promise.delta) / UNITS
    line = replace(unit, sd=sd, opendp=importlib.metadata.version("opendp"))
    return replace(line, total=max(line.epsilon, composed((*codebook.releases, line), line.delta)))


@lru_cache
def _scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """The least standard deviation of counts that keeps a promise."""
    dp, bounds = _opendp(), tuple(sensitivity * bound for bound in _SEARCHED)
    promise, chain = (epsilon, delta), partial(_mechanism, delta=delta)
    scale: float = dp.binary_search_param(chain, sensitivity, promise, bounds=bounds)
    return scale


def _opendp() -> Any:
    try:
        import opendp.prelude as library
    except ModuleNotFoundError:
        raise UserError("noise needs OpenDP: pip install '.[private]'") from None
    library.enable_features("contrib")
    return library


def _mechanism(scale: float, delta: float) -> Any:
    """Discrete Gaussian noise on whole numbers, accounted as zero-concentrated privacy, stated as (epsilon, delta)."""
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=scale)), delta)


def composed(releases: Sequence[Noise], delta: float) -> float:
    """The epsilon of several releases of the same respondents together, less than the sum of their epsilons."""
    rate = sum((line.sensitivity / line.sd) ** 2 for line in releases)
    epsilon: float = _mechanism(1.0 / math.sqrt(rate), delta).map(1.0)[0]
    return epsilon


def release(frame: Frame, codebook: Codebook, promise: Promise) -> tuple[list[RawAnswer], Noise]:
    """Count, add the noise, and compute all answers from the noisy counts; raises as `plan` and `weighed`."""
    line = plan(codebook, promise)
    weighed(frame, codebook, line.cap)
    noisy = {at: draw(count_GK, line) for at, count_GK in counts(frame, codebook, line.cap).items()}
    return [*_raw_answers(codebook, noisy, line.sd)], line


def weights(frame: Frame, codebook: Codebook, cap: float) -> IntArray:
    """Each respondent's weight (R,) as a release counts it: in 1 / `UNITS` people, at most the cap."""
    unit = 1.0 if codebook.weight.column == UNWEIGHTED else codebook.weight.unit
    weight_R = np.minimum(respondents.weights(frame, codebook.weight.column) / unit, cap)
    unit_R: IntArray = np.rint(weight_R * UNITS).astype(np.int64)
    return unit_R


def weighed(frame: Frame, codebook: Codebook, cap: float) -> list[str]:
    """Say what cap and rounding do to the weights, if there are any: for the owner's eyes alone.

    Raises:
        UserError: at least half of the weights above 0 are cut, or too small for steps of 1 / `UNITS`.
    """
    weight = codebook.weight
    if weight.column == UNWEIGHTED:
        return []
    weight_R = respondents.weights(frame, weight.column) / weight.unit
    capped_R = np.minimum(weight_R, cap)
    moved_R = np.abs(weights(frame, codebook, cap) / UNITS - capped_R)
    cut, coarse = np.count_nonzero(weight_R > cap), np.count_nonzero(moved_R > _COARSE * capped_R)
    text = (
        f"{weight.column} / {weight.unit:g} is {weight_R.min():.5g} to {weight_R.max():.5g}; of {(weight_R > 0).sum()} "
        f"weights the cap of {cap:g} cuts {cut}, and steps of 1/{UNITS} spoil {coarse} (for your eyes alone)"
    )
    if 2 * (cut + coarse) >= np.count_nonzero(weight_R):
        raise UserError(
            f"{frame.source}: {text}: most would be equal or 0. Below [weight] in the codebook, unit = NUMBER divides "
            "them; take it from the survey's design, not from the file: population / planned respondents"
        )
    return [text]


def counts(frame: Frame, codebook: Codebook, cap: float) -> dict[tuple[str, str], IntArray]:
    """Count each question, option and group, those of nobody too, in 1 / `UNITS` people.

    Returns:
        Columns of a group and of a question -> counts (G, K). A question that the file does not have counts nobody: in
        JSON lines a single respondent can make its column.
    """
    frame.require(*codebook.groups)
    unit_R = weights(frame, codebook, cap)
    group_of = {column: _places(frame, column, listed) for column, listed in codebook.groups.items()}
    cells = dict[tuple[str, str], IntArray]()
    for column, item in codebook.questions.items():
        option_R, num_options = _places(frame, column, item)
        for attribute, (group_R, num_groups) in group_of.items():
            counts_R = (group_R >= 0) & (option_R >= 0)
            cells[attribute, column] = np.zeros((num_groups, num_options), np.int64)
            np.add.at(cells[attribute, column], (group_R[counts_R], option_R[counts_R]), unit_R[counts_R])
    return cells


def _places(frame: Frame, column: str, listed: Listed) -> tuple[IntArray, int]:
    """Each respondent's index into the labels (R,), -1 for none, by that cell alone; and how many labels there are."""
    place = listed.label_places()
    cells = frame.cells[column] if column in frame.cells else [""] * len(frame.cells)
    return np.array([place.get(code_text(cell), -1) for cell in cells], np.int64), len(listed.labels)


def draw(counts: IntArray, line: Noise) -> FloatArray:
    """Add noise to counts in 1 / `UNITS` people; returns people, in the same shape.

    Raises:
        RuntimeError: by OpenDP's account the noise does not keep the promise.
    """
    mechanism = _mechanism(line.sd * UNITS, line.delta)
    epsilon, delta = mechanism.map(line.sensitivity * UNITS)
    if not (epsilon <= line.epsilon and delta <= line.delta):
        raise RuntimeError(f"the noise keeps epsilon {epsilon}, delta {delta}, and not the promise {line}")
    return np.array(mechanism(counts.ravel().tolist()), dtype=np.float64).reshape(counts.shape) / UNITS


def _raw_answers(codebook: Codebook, noisy: Mapping[tuple[str, str], FloatArray], sd: float) -> Iterator[RawAnswer]:
    """Yield each question, and each group's answer to it; one that the noise outweighs is marked as unusable."""
    for column in dict.fromkeys(column for _, column in noisy):
        yield (question := respondents.question_of(codebook.questions[column]))
        for attribute, listed in codebook.groups.items():
            for name, noisy_K in zip(listed.labels, noisy[attribute, column], strict=True):
                answer = question._replace(group=respondents.full_name(codebook.groups, attribute, name))
                kept_K = np.array([kind == "answer" or codebook.refusals == "keep" for kind in question.kinds])
                if (people_K := people(noisy_K, sd)) is None or people(noisy_K[kept_K], sd) is None:
                    yield answer._replace(problem="the noise outweighs it")
                    continue
                # Sums of weights are not numbers of respondents.
                numbers = people_K.tolist() if codebook.weight.column == UNWEIGHTED else ()
                yield answer._replace(people=numbers, shares=(people_K / people_K.sum()).tolist())


def people(noisy_K: FloatArray, sd: float) -> FloatArray | None:
    """Project noisy counts (K,) on counts >= 0 of the same total; None if the noise outweighs that total."""
    total = float(noisy_K.sum())
    if total < _LEAST * sd * math.sqrt(len(noisy_K)) or not len(noisy_K):
        return None
    falling_K = np.sort(noisy_K)[::-1]
    excess_K = (np.cumsum(falling_K) - total) / np.arange(1, len(noisy_K) + 1)
    people_K: FloatArray = np.maximum(noisy_K - excess_K[falling_K > excess_K][-1], 0.0)
    return people_K


class Cost(NamedTuple):
    """Errors of a group's shares, in points of a hundred; the median over its questions."""

    group: str
    respondents: float  # of a question
    sampling: float
    cap: float  # of capped and rounded weights
    noise: float  # of a standard deviation of one person


def costs(survey: Survey, capped: Survey, mean_weight: float) -> list[Cost]:
    """Expected errors (root mean squares over the options) by the exact answers: for the owner's eyes alone.

    A share p of n respondents of mean weight w has the sampling error sqrt(p (1 - p) / n), and noise of standard
    deviation s adds about s sqrt(1 - 2 / K + sum p^2) / (w n). `capped` has the answers by capped and rounded weights.
    """
    rows = []
    for group, answers in survey.answers.items():
        counted = [key for key in answers if survey.respondents[group][key]]  # others have refusals alone
        n_Q = np.array([survey.respondents[group][key] for key in counted])
        size_Q = np.array([len(answers[key]) for key in counted])
        square_Q = np.array([(answers[key] ** 2).sum() for key in counted])
        sampling_Q = np.sqrt((1.0 - square_Q) / (size_Q * n_Q))
        ours = capped.answers.get(group, {})
        cap_Q = np.array([np.sqrt(np.mean((ours.get(key, 0.0) - answers[key]) ** 2)) for key in counted])
        noise_Q = np.sqrt(1.0 - 2.0 / size_Q + square_Q) / (mean_weight * n_Q)
        rows.append(Cost(group, np.median(n_Q), *(100.0 * np.median(x) for x in (sampling_Q, cap_Q, noise_Q))))
    return rows
