"""No bundle runs at a group that its owner has not pinned, by a guard that comes in no bundle."""

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supernode.cli import flwr_clientapp as flower_command
from flwr.supernode.runtime import run_clientapp

from appa_flwr.core.errors import UserError
from appa_flwr.launch.bundle import sent_files
from appa_flwr.launch.sites import CLIENT_APP, PROGRAMS, prepare
from appa_flwr.owner import guard
from appa_flwr.survey.generate import generate

COMMAND = ["guard", "--insecure", "--runtime-api-address", "127.0.0.1:1", "--token", "t", "--parent-pid", "7"]
MINE, OTHER = b"the bundle that was read", b"another one"


def pinning(*bundles: bytes) -> str:
    return f'bundle = "{" ".join(hashlib.sha256(bundle).hexdigest() for bundle in bundles)}"\n'


def checked(owner_policy: str | None, monkeypatch, tmp_path) -> None:
    """By a policy with this text, or by none."""
    path = tmp_path / "policy.toml"
    if owner_policy is not None:
        path.write_text(owner_policy)
    monkeypatch.setenv("APPA_POLICY", str(path))
    guard.check(MINE)


@pytest.mark.parametrize("owner_policy", ["", "may-leave = []\n", pinning(MINE), pinning(OTHER, MINE), 'bundle = ""\n'])
def test_a_pinned_bundle_runs_and_any_where_none_is_pinned(monkeypatch, tmp_path, owner_policy):
    checked(owner_policy, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("owner_policy", "why"),
    [(pinning(OTHER), guard.NOT_PINNED), (None, guard.UNREADABLE), ('bundle = "abc"\n', guard.UNREADABLE)],
)
def test_another_one_does_not_and_the_reason_holds_nothing_private(monkeypatch, tmp_path, owner_policy, why):
    with pytest.raises(UserError) as refused:
        checked(owner_policy, monkeypatch, tmp_path)
    assert str(refused.value) == why
    monkeypatch.delenv("APPA_POLICY")
    with pytest.raises(UserError, match=guard.UNREADABLE):
        guard.check(MINE)


def test_flower_still_starts_programs_by_their_names_and_unpacks_by_that_function():
    assert TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP] == CLIENT_APP
    assert set(TASK_TYPE_TO_COMMAND.values()) == set(PROGRAMS)
    assert "install_from_fab" in run_clientapp.run_clientapp.__code__.co_names


def test_flower_s_program_gets_the_arguments_that_flower_s_own_command_gives_it(monkeypatch, tmp_path):
    calls: list[dict[str, object]] = []
    own = sys.modules["flwr.supernode.cli.flwr_clientapp"]
    for module in (run_clientapp, own):
        monkeypatch.setattr(module, "run_clientapp", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(run_clientapp, "install_from_fab", None)
    monkeypatch.setattr(sys, "argv", COMMAND)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flower_command()
    guard.main()
    assert calls[0] == calls[1]
    assert calls[0]["parent_pid"] == 7


def test_the_bundle_that_was_checked_is_all_there_is_to_load_and_its_own_modules_run(tmp_path):
    bundle = build_fab_from_disk(sent_files(tmp_path))
    (tmp_path / "bundle").write_bytes(bundle)
    (tmp_path / "policy.toml").write_text(pinning(bundle))
    earlier = tmp_path / "home" / "apps" / "appa-flwr.appa-flwr.0.1.0.11111111"
    earlier.mkdir(parents=True)
    code = """
        import sys
        from contextlib import suppress
        from pathlib import Path
        from flwr.common.config import get_project_dir
        from flwr.supernode.runtime import run_clientapp
        from appa_flwr.owner import guard

        def program(**_):
            with suppress(guard.UserError):
                run_clientapp.install_from_fab(b"another one, which is not even unpacked", skip_prompt=True)
            run_clientapp.install_from_fab(Path("bundle").read_bytes(), skip_prompt=True)
            assert not get_project_dir("appa-flwr/appa-flwr", "0.1.0", "1" * 64).exists()
            (app,) = (Path(guard.os.environ["FLWR_HOME"]) / "apps").iterdir()
            sys.path.insert(0, str(app))
            import appa_flwr
            print(Path(appa_flwr.__file__).parent.parent == app)

        run_clientapp.run_clientapp = program
        sys.argv = "guard --insecure --runtime-api-address 127.0.0.1:1 --token t".split()
        guard.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=os.environ | {"FLWR_HOME": str(tmp_path / "home"), "APPA_POLICY": str(tmp_path / "policy.toml")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["apps"]  # the guard's folder is gone


def test_a_group_s_start_script_puts_the_guard_first(tmp_path: Path):
    sites = prepare(generate(num_questions=20, num_groups=2, seed=0), tmp_path, host="h", port=1, keys={}, bundle="")
    folder = sites.group("Avaria")
    for name in PROGRAMS:
        program = folder / "guard" / name
        if name == CLIENT_APP:
            assert program.read_text().splitlines()[1] == 'exec python -P -m appa_flwr.owner.guard "$@"'
            home = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "FLWR_HOME": str(tmp_path / "home")}
            asked = [program, "--help"]
            helped = subprocess.run(asked, env=os.environ | home, capture_output=True, text=True, check=True)
            assert "Run a Flower ClientApp" in helped.stdout
        else:  # an AgentApp, say, would run a bundle too
            refused = subprocess.run([program], capture_output=True, text=True, check=False)
            assert (refused.returncode, refused.stderr) == (1, "this node runs the ClientApp alone\n")
    elsewhere = tmp_path / "with:colon"
    elsewhere.mkdir()
    shutil.copy(folder / "start.sh", elsewhere)
    moved = subprocess.run([elsewhere / "start.sh"], capture_output=True, text=True, check=False)
    assert (moved.returncode, moved.stderr) == (1, f"{elsewhere}: the guard cannot stand on the PATH with a : in it\n")
    assert 'export PATH="$PWD/guard:$PATH" APPA_POLICY="$PWD/policy.toml"' in (folder / "start.sh").read_text()
