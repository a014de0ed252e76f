import sys

import pytest

from appa_flwr.launch import cli


@pytest.fixture
def appa(monkeypatch, capsys):
    """Run a command in this process: what it prints, or with an exit code its error, and for 2 nothing else."""

    def run(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["appa", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert int(ended.value.code or 0) == code, printed.err
        assert code != 2 or not printed.out
        return printed.err if code else printed.out

    return run
