"""Replies of the groups to a request for numbers, and their files in the run's folder.

A resumed run, a second rule or a repeated look-up reads these files instead of asking the groups again.

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
from appa_flwr.protocol import queries
from appa_flwr.protocol.queries import Layout


class TooFew(UserError):
    """Fewer groups answered than the run needs; the state of the run has not changed."""


@dataclass(frozen=True, eq=False)
class Replies:
    """The groups' replies to one request for numbers."""

    groups: tuple[str, ...]  # groups that replied, in the order of the run's groups
    numbers: Mapping[str, Layout]  # the arrays by name, see `appa_flwr.protocol.queries.layouts_of`
    data_GN: FloatArray  # a row for each group

    def each(self, name: str) -> FloatArray:
        """Every group's array, (G, its shape)."""
        return queries.split(self.data_GN, self.numbers)[name]

    def rows(self, name: str, names: Sequence[str]) -> FloatArray:
        """The arrays of the groups `names`; NaN for a group that did not reply."""
        array_of = dict(zip(self.groups, self.each(name), strict=True))
        missing = np.full(self.numbers[name].shape, np.nan)
        return np.stack([array_of.get(group, missing) for group in names])


def kept_replies(path: Path | None, numbers: Mapping[str, Layout]) -> Replies:
    """Read the replies that `keep_replies` has written, of no group if there is no file; UserError if that fails."""
    if path is None or not path.exists():
        return Replies((), numbers, np.empty((0, 0)))
    try:
        with np.load(path, allow_pickle=False) as file:
            groups, data_GN = tuple(file["groups"].tolist()), file["data"]
        queries.split(data_GN, numbers)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); without it the groups are asked again") from None
    return Replies(groups, numbers, data_GN)


def keep_replies(path: Path, replies: Replies) -> None:
    """Write replies to a file; raises a UserError if that fails."""
    content = io.BytesIO()
    np.savez(content, groups=np.array(replies.groups), data=replies.data_GN)
    replace_file(path, content.getvalue(), parents=True)
