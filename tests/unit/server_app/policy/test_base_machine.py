"""Number format and threads of a model, by what the machine can do and the user says."""

from __future__ import annotations

import pytest
import torch
from fakes import tiny_causal_lm
from small import CHOSEN

from appa_flwr.config import THREADS, Config
from appa_flwr.core.errors import UserError
from server_app.policy import base as bases


@pytest.mark.parametrize(("key", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_models_load_in_the_config_s_number_format(tmp_path, key, dtype):
    tiny_causal_lm().save_pretrained(tmp_path)
    config = Config.load({"policy.compute-dtype": key, "policy.tuning": "lora"})
    model = bases.load_model(config, str(tmp_path), quantized=False)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not model.training


FLAGS = "processor: 0\nmodel name: bf16ish\nflags: fpu avx512f {} vnni\n\nprocessor: 1\n"


@pytest.mark.parametrize(
    ("key", "tuning", "gpu", "flags", "dtype"),
    [
        ("auto", "lora", None, "avx512_bf16", "bfloat16"),
        ("auto", "lora", None, "amx_bf16 amx_tile", "bfloat16"),
        ("auto", "lora", None, "asimd bf16", "bfloat16"),  # ARM
        ("auto", "lora", None, "avx512_fp16 amx_tile", "float32"),
        ("auto", "lora", "native", "", "bfloat16"),  # where there is a GPU, it decides
        ("auto", "lora", "emulates", "avx512_bf16", "float32"),  # slower than float32
        ("auto", "full", None, "avx512_bf16", "float32"),  # where all weights learn
        ("float32", "lora", None, "avx512_bf16", "float32"),  # what is named stays
        ("bfloat16", "lora", "emulates", "", "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_machine_computes_in_it(key, tuning, gpu, flags, dtype, tmp_path, monkeypatch):
    flags_file = tmp_path / "cpuinfo"
    flags_file.write_text(FLAGS.format(flags))
    monkeypatch.setattr(bases, "PROCESSOR_FILE", flags_file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or gpu == "native"
    )
    asked = Config.load({"policy.compute-dtype": key, "policy.tuning": tuning, "seed": 7})
    assert bases.with_dtype(asked).flat() == {**asked.flat(), "policy.compute-dtype": dtype}


def test_a_real_model_takes_the_threads_that_the_user_names_else_all_cores_and_the_tiny_one_takes_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(bases.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(bases.psutil, "cpu_count", lambda logical: 16 if logical else 4)
    assert bases.threads(Config.load({})) == 1
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 4  # six, of which two are a core's second
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert bases.threads(Config.load({})) == 1
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 3
    monkeypatch.setenv(THREADS, "")  # of the launcher, which sets the other where the user does not
    monkeypatch.setattr(bases.psutil, "cpu_count", lambda logical: None)  # a system that does not tell
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 6
    monkeypatch.setenv(THREADS, "two")
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        bases.threads(Config.load({**CHOSEN, "model": "org/name"}))
