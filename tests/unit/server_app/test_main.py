"""What the server does with a run's keys before the first phase."""

from __future__ import annotations

import pytest
from fakes import FakeGrid
from flwr.app import Context, RecordDict
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.run.files import read_config
from server_app import main
from server_app.models import base


@pytest.mark.parametrize(("flags", "dtype"), [("avx512_bf16", "bfloat16"), ("sse", "float32")])
def test_the_number_format_is_resolved_for_the_server_s_machine(flags, dtype, tmp_path, monkeypatch):
    seen = []
    (told := tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(base, "PROCESSOR_FILE", told)
    monkeypatch.setattr(base.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(main, "run_phases", lambda grid, config, folder: seen.append(config))
    keys = {"policy.compute-dtype": "auto", "policy.tuning": "lora", "run-name": "r", "run.output-dir": str(tmp_path)}
    config = Config.load(keys)
    with flower_task():
        main.app(FakeGrid({}), Context(17, 1, {}, RecordDict(), dict(config.flat())))
    assert [run.policy.compute_dtype for run in seen] == [dtype]
    assert read_config(config.run_folder) == config  # as it was asked for: a resumed run must have the same keys


def test_keys_that_contradict_each_other_are_found_without_the_launcher(tmp_path):
    keys = {"data.num-groups": 3, "federation.min-groups": 4, "run-name": "r", "run.output-dir": str(tmp_path)}
    flat = Config.load({}).flat() | keys
    problem = "federation.min-groups = 4 must be at most the number of groups, which is 3"
    with flower_task(), pytest.raises(UserError, match=problem):
        main.app(FakeGrid({}), Context(17, 1, {}, RecordDict(), dict(flat)))
