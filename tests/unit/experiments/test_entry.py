"""What a command of the experiments does with an error."""

from __future__ import annotations

import sys

import pytest
import typer

from appa_flwr.core.errors import UserError
from appa_flwr.launch.endings import RunFailed
from experiments import entry, grpo


@pytest.mark.parametrize(("error", "code"), [(UserError("no such rule"), 2), (RunFailed("it stopped"), 1)])
def test_what_went_wrong_is_one_line_and_an_exit_code(error, code, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", grpo.__spec__)
    monkeypatch.setattr(sys, "argv", ["grpo"])

    def failing() -> None:
        raise error

    for call in (typer.run, lambda main: main()):
        with pytest.raises(SystemExit) as ended:
            entry.run(failing, call=call)
        assert ended.value.code == code
        assert capsys.readouterr() == ("", f"experiments.grpo: {error}\n")


def test_a_bug_keeps_its_traceback():
    def buggy() -> None:
        raise KeyError("rule")

    with pytest.raises(KeyError):
        entry.run(buggy, call=lambda main: main())
