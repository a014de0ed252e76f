"""Tables of `appa survey --diagnose` for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.table import Table

from appa_flwr.analysis.diagnosis import Diagnosis


def tables(found: Diagnosis) -> Iterator[Table]:
    """The end of every rule, and what each group makes of the gap between the ceilings."""
    rules = Table("rule", "Avg AS", "Min AS", "Min AS less average's", "took the plain mean")
    for name, end in found.ends.items():
        fell_back = found.destinations[name].fell_back
        rules.add_row(
            name,
            f"{end.avg_as:.3f}",
            f"{end.min_as:.3f}",
            end.over_average.signed,
            "-" if fell_back is None else f"{fell_back:.0%}",
        )
    yield rules
    if found.without:
        groups = Table("without group", "its answers", "gap of the others", "of all")
        known = {name: gap for name, (_, gap) in found.without.items() if not math.isnan(gap)}
        for name in (*sorted(known, key=known.__getitem__), *(found.without.keys() - known.keys())):
            gap = f"{known[name]:.3f}" if name in known else "-"
            groups.add_row(name, str(found.without[name][0]), gap, f"{found.differences.gap:.3f}")
        yield groups
