"""What a command of the experiments does with an error."""

from __future__ import annotations

import importlib.util
import signal
import sys

import pytest
import typer

from appa_flwr.core.errors import UserError
from appa_flwr.launch.endings import RunFailed, Stopped
from experiments import entry


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("no such rule"), 2, "no such rule"),
        (RunFailed("it stopped"), 1, "it stopped"),
        (Stopped(signal.SIGTERM), 128 + 15, "stopped by SIGTERM; all processes of the run have ended"),
    ],
)
@pytest.mark.parametrize("module", ["experiments.rules", "experiments.grid.__main__"])
def test_what_went_wrong_is_one_line_and_an_exit_code(error, code, says, module, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec(module))
    monkeypatch.setattr(sys, "argv", ["rules"])

    def failing() -> None:
        raise error

    for call in (typer.run, lambda main: main()):
        with pytest.raises(SystemExit) as ended:
            entry.run(failing, call=call)
        assert ended.value.code == code
        assert capsys.readouterr() == ("", f"{module.removesuffix('.__main__')}: {says}\n")


def test_a_bug_keeps_its_traceback():
    def buggy() -> None:
        raise KeyError("rule")

    with pytest.raises(KeyError):
        entry.run(buggy, call=lambda main: main())
