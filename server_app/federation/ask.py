"""Replies of the groups to a request for numbers, and their files in the run's folder.

A resumed run, a second rule or a repeated look-up reads these files instead of using up the limits of the owners.

Axis letters: G groups that answered, N numbers.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Number


class TooFew(UserError):
    """Fewer groups answered than the run needs; the state of the run has not changed."""


class LostSum(UserError):
    """The total of a secure sum is lost, e.g. because a group did not open it; only another request can succeed."""


@dataclass(frozen=True, eq=False)
class Replies:
    """The groups' replies to one request for numbers."""

    groups: tuple[str, ...]  # groups that replied, in the order of the run's groups
    numbers: Mapping[str, Number]  # the arrays by name, see `appa_flwr.protocol.asks.numbers_of`
    data: FloatArray  # a row for each group (G, N), or only their sum (N,)
    task: str  # digest of the secure sum's task, else of the request; groups store their histories under this name

    def sum(self, name: str) -> FloatArray:
        """The groups' sum of an array."""
        sums = asks.split(self.data, self.numbers)[name]
        return sums if self.data.ndim == 1 else np.asarray(sums.sum(axis=0))

    def mean(self, name: str) -> FloatArray:
        """The groups' mean of an array."""
        return self.sum(name) / len(self.groups)

    def each(self, name: str) -> FloatArray:
        """Every group's array, (G, its shape); not available if only the sum is known."""
        assert self.data.ndim == 2, "single groups' numbers of a sum"
        return asks.split(self.data, self.numbers)[name]

    def rows(self, name: str, names: Sequence[str]) -> FloatArray:
        """The arrays of the groups `names`; NaN for a group that did not reply."""
        array_of = dict(zip(self.groups, self.each(name), strict=True))
        missing = np.full(self.numbers[name].shape, np.nan)
        return np.stack([array_of.get(group, missing) for group in names])


def kept_replies(path: Path, numbers: Mapping[str, Number]) -> Replies:
    """Read the replies that `keep_replies` has written; raises a UserError if that fails."""
    try:
        with np.load(path, allow_pickle=False) as file:
            groups, data, task = tuple(file["groups"].tolist()), file["data"], str(file["task"])
        asks.split(data, numbers)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); without it the groups are asked again") from None
    return Replies(groups, numbers, data, task)


def keep_replies(path: Path, replies: Replies) -> None:
    """Write replies to a file; raises a UserError if that fails."""
    content = io.BytesIO()
    np.savez(content, groups=np.array(replies.groups), data=replies.data, task=np.array(replies.task))
    replace_file(path, content.getvalue(), parents=True)
