"""The groups' steps in a training round of PluralLLM, in a file, so that memory holds one at a time.

Axis letters: G groups that trained, P weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryFile
from typing import Self

import numpy as np
import numpy.typing as npt

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.files import writing
from server_app import log

# of a group, in units of the round's median (norm bounding, Sun et al. 2019); honest groups' reach 1.25
LARGEST_STEP = 1.5


class Updates:
    """Steps of the groups, each with its number of answers and its mean loss.

    The file has no name, and is gone with the process; it lies in `folder`, since temporary folders are often memory.
    Sums are taken group by group in the order of `groups`, which must not depend on who answers first.

    Raises:
        UserError: the file cannot be written, here or in a method.
    """

    def __init__(self, folder: Path, *, groups: Sequence[str], size: int) -> None:
        self._folder, self._groups, self._size = folder, groups, size
        self._of: dict[str, tuple[int, float, float]] = {}  # group -> place in the file, answers, loss

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that have a step."""
        return tuple(name for name in self._groups if name in self._of)

    def __enter__(self) -> Self:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = TemporaryFile(dir=self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of a full disk, which `put` has told
            self._file.close()

    def put(self, name: str, step_P: FloatArray, *, count: float, loss: float) -> None:
        """Add a group's step."""
        self._of[name] = len(self._of), count, loss
        with writing(self._folder):
            self._file.write(step_P.astype(np.float64).tobytes())
            self._file.flush()

    def steps(self) -> Iterator[FloatArray]:
        """The groups' steps (P,)."""
        for name in self.names:
            self._file.seek(self._of[name][0] * self._size * 8)
            yield np.frombuffer(self._file.read(self._size * 8))

    def distances(self) -> FloatArray:
        """Distance of each step from the mean of the others', in units of that mean's length, (G,).

        It is NaN for a single group and where the others do not move.
        """
        total_P = sum(self.steps(), np.zeros(self._size))
        distance_G = np.full(len(self.names), np.nan)
        for g, step_P in enumerate(self.steps()):
            others_P = (total_P - step_P) / max(1, len(self.names) - 1)
            if (length := _length(others_P)) > 0:
                distance_G[g] = _length(step_P - others_P) / length
        return distance_G

    def mean(self, start_P: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], float]:
        """The groups' weights (P,) after their steps from `start_P`, and their loss: means by their numbers of answers.

        The arithmetic is that of Flower's FedAvg, with `bounded` steps.
        """
        total = sum(self._of[name][1] for name in self.names)
        mean_P, mean_loss = np.zeros(self._size, np.float32), 0.0
        for name, step_P in zip(self.names, self.bounded(), strict=True):
            _, count, loss = self._of[name]
            mean_P += (start_P + step_P).astype(np.float32) * (count / total)
            mean_loss += loss * (count / total)
        return mean_P, mean_loss

    def bounded(self) -> Iterator[FloatArray]:
        """The steps, at most `LARGEST_STEP` times the (lower) median length, so that no group decides the round."""
        length_G = [_length(step_P) for step_P in self.steps()]
        longest = LARGEST_STEP * median_low(length_G)
        for name, length, step_P in zip(self.names, length_G, self.steps(), strict=True):
            if length > longest > 0:
                log.warning(
                    "group %s: its step is %.1f times as long as the round's median, and counts for %.1f times",
                    *(name, length / longest * LARGEST_STEP, LARGEST_STEP),
                )
            yield step_P * (longest / length) if length > longest > 0 else step_P


def _length(value_P: FloatArray) -> float:
    # as over the rows of a matrix: NumPy adds up a single array in another order
    return float(np.linalg.norm(value_P[None], axis=1)[0])
