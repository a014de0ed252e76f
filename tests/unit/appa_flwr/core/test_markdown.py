"""Tables in Markdown."""

from __future__ import annotations

import pytest

from appa_flwr.core import markdown


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([], "| rule | FI |\n| --- | --- |"),
        ([["appa", "0.9"], ["min", ""]], "| rule | FI |\n| --- | --- |\n| appa | 0.9 |\n| min |  |"),
        ([["a|b", "two\nlines"]], "| rule | FI |\n| --- | --- |\n| a\\|b | two lines |"),
    ],
)
def test_a_table_holds_its_rows_and_no_cell_breaks_it(rows: list[list[str]], shown: str) -> None:
    assert markdown.table(["rule", "FI"], iter(rows)) == shown
