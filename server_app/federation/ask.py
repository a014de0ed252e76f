"""What the server gets for a request for numbers, and how a run keeps it.

A resumed run, the second rule or a repeated look-up asks nobody twice, and spends no owner's limit.

Axis letters: G groups that answered, N numbers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Number

FloatArray = npt.NDArray[np.float64]


class TooFew(UserError):
    """Fewer groups answered than the run needs; nothing has changed."""


class HalfOpened(UserError):
    """Some groups have opened a sum and others stay away: what was asked for is lost, and must be asked otherwise."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Groups' numbers.

    Attributes:
        groups: over whom, in the order of the run's groups.
        numbers: the arrays by name, see `appa_flwr.protocol.asks.numbers_of`.
        data: a row for each group (G, N); where only the sum is known, that (N,).
        task: names the sum for the groups that took part in it.
    """

    groups: tuple[str, ...]
    numbers: Mapping[str, Number]
    data: FloatArray
    task: str

    def sum(self, name: str) -> FloatArray:
        """The groups' sum of an array."""
        sums = asks.split(self.data, self.numbers)[name]
        return sums if self.data.ndim == 1 else np.asarray(sums.sum(axis=0))

    def mean(self, name: str) -> FloatArray:
        """The groups' mean of an array."""
        return self.sum(name) / len(self.groups)

    def each(self, name: str) -> FloatArray:
        """Every group's array, (G, its shape); there is none where only the sum is known."""
        assert self.data.ndim == 2, "single groups' numbers of a sum"
        return asks.split(self.data, self.numbers)[name]

    def rows(self, name: str, names: Sequence[str]) -> FloatArray:
        """The arrays of these groups, NaN for one that did not answer."""
        array_of = dict(zip(self.groups, self.each(name), strict=True))
        missing = np.full(self.numbers[name].shape, np.nan)
        return np.stack([array_of.get(group, missing) for group in names])


def kept_answer(path: Path, numbers: Mapping[str, Number]) -> Answer:
    """An answer that `keep_answer` has written, to a request with these arrays.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            groups, data, task = tuple(file["groups"].tolist()), file["data"], str(file["task"])
        asks.split(data, numbers)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); without it the groups are asked again") from None
    return Answer(groups, numbers, data, task)


def keep_answer(path: Path, answer: Answer) -> None:
    """Write an answer down; a UserError where that fails."""
    content = io.BytesIO()
    np.savez(content, groups=np.array(answer.groups), data=answer.data, task=np.array(answer.task))
    replace_file(path, content.getvalue(), parents=True)
