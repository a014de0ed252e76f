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


class LostSum(UserError):
    """Some groups have opened a secure sum and others stay away: its total is lost, and this request with it."""


@dataclass(frozen=True, eq=False)
class Replies:
    """The groups' replies to one request for numbers.

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


def kept_replies(path: Path, numbers: Mapping[str, Number]) -> Replies:
    """The replies that `keep_replies` has written, to a request with these arrays.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            groups, data, task = tuple(file["groups"].tolist()), file["data"], str(file["task"])
        asks.split(data, numbers)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); without it the groups are asked again") from None
    return Replies(groups, numbers, data, task)


def keep_replies(path: Path, replies: Replies) -> None:
    """Write replies down; a UserError where that fails."""
    content = io.BytesIO()
    np.savez(content, groups=np.array(replies.groups), data=replies.data, task=np.array(replies.task))
    replace_file(path, content.getvalue(), parents=True)
