"""What several tests share: made-up catalogues and tables of answers, and tiny random language models.

Axis letters: G groups, Q questions, K options, E features, J rollouts, P prompt tokens, T response tokens.
"""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from nodes import Node
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from appa_flwr.protocol import queries, refusals
from appa_flwr.survey.types import Question
from server_app.policy.logprobs import response_logprobs, response_values, shared_prefix
from server_app.policy.models import FullModels, LoraModels, PolicyModels
from server_app.policy.sequences import Sequences, pad

Score = Callable[[Sequences], torch.Tensor]


def silent(message: Message) -> None:
    """A node that answers nothing."""


def failing(code: int, text: str = "") -> Node:
    """A node that answers by this error, in a refusal's own words where none are given."""
    return lambda message: Message(Error(code, text or refusals.REFUSALS[code]), reply_to=message)


GONE = failing(5, "node is gone")


def only(
    kind: str, answer: Callable[..., Message | None], well: Callable[..., Message | None]
) -> Callable[..., object]:
    """A node that answers messages of this kind by `answer`, and others as `well` does."""
    return lambda message: (answer if message.metadata.message_type == kind else well)(message)


def raising(error: BaseException, real: Callable[..., object] | None = None) -> Callable[..., object]:
    """A function that raises the error: at each call, or at the second alone of a real one."""
    calls = []

    def call(*given: object, **keys: object) -> object:
        calls.append(given)
        if real is None or len(calls) == 2:
            raise error
        return real(*given, **keys)

    return call


def catalogue_of(
    num_options: Sequence[int], *, train: Sequence[bool] | None = None, embedding_QKE: np.ndarray | None = None
) -> queries.Catalogue:
    """Questions with so many options each, those of `train` or all for training, with these features or none."""
    questions = tuple(
        Question(f"Q{q}", f"What about topic {q}?", tuple(f"answer {k}" for k in range(count)))
        for q, count in enumerate(num_options)
    )
    option_QK = np.arange(max(num_options))[None] < np.array(num_options)[:, None]
    train_Q = np.ones(len(questions), bool) if train is None else np.array(train)
    value_QKE = np.zeros((*option_QK.shape, 2)) if embedding_QKE is None else embedding_QKE
    return queries.Catalogue(
        train_Q, option_QK, questions, value_QKE.astype(np.float32), np.zeros(len(questions), bool)
    )


def random_tables(option_QK: np.ndarray, names: Sequence[str], *, seed: int) -> dict[str, np.ndarray]:
    """A random distribution over the real options for every group and question."""
    rng = np.random.default_rng(seed)
    tables = {}
    for name in names:
        table_QK = np.where(option_QK, rng.dirichlet(np.ones(option_QK.shape[1]), size=len(option_QK)), 0.0)
        tables[name] = table_QK / table_QK.sum(1, keepdims=True)
    return tables


QUESTIONS = catalogue_of([2, 3], train=[True, True]).questions
CATALOGUE = catalogue_of([2, 3, 3], train=[True, True, False])
REQUEST = queries.RewardQuery(np.array([0, 1, 1]), np.full((3, 3), 0.5), ("js",))
"""Three answers to the first two questions of the catalogue."""
KEY = ("js", queries.TARGET_REFERENCE)
GOOD = np.array([0.25, 0.5, 0.75])
"""Rewards for them that are ones."""

WEIGHTS = ArrayRecord({"w": Array(np.ones(1, np.float32))})
_numbers = itertools.count()


def new_request() -> queries.Query:
    """A request that nobody has been asked."""
    return replace(REQUEST, context_seed=next(_numbers)).query()


VOCABULARY = 61
ARCHITECTURES = ("qwen3", "llama", "gemma2")
PAD_ID = 0
ROUNDING = {"rtol": 0, "atol": 2e-5}
"""How far two ways to a float32 log-probability of these models may lie apart, in whatever order a processor adds up.

A logit of up to 7 comes of some twelve products of 32 to 64 terms, each wrong by up to sqrt(64) x 6e-8 of its size. If
these errors are independent they come to sqrt(12) x 8 x 6e-8 x 7 = 1.2e-5; found were 4e-6.
"""
WINDOW = 64
"""Longer than any prompt with its answer, as the product demands it."""


def tiny_causal_lm(
    architecture: str = "qwen3", *, seed: int = 0, vocabulary: int = VOCABULARY, window: int = WINDOW
) -> PreTrainedModel:
    """A random causal LM with weights large enough for peaked answers; Gemma's sliding layers see `window` tokens."""
    ids = {"pad_token_id": PAD_ID, "eos_token_id": 1, "bos_token_id": None}
    attention = "eager" if architecture == "gemma2" else "sdpa"
    chosen = {"attn_implementation": attention, "initializer_range": 0.2, "tie_word_embeddings": False}
    return random_lm(architecture, seed=seed, vocab_size=vocabulary, sliding_window=window, **ids, **chosen).eval()


def random_lm(
    architecture: str, *, seed: int, hidden_size: int = 32, sliding_window: int = 4096, **settings: object
) -> PreTrainedModel:
    """A random causal LM of that architecture with 2 layers of 4 heads; leaves the global generator alone."""
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 1024,
    }
    if architecture == "gemma2":
        sizes |= {"query_pre_attn_scalar": hidden_size // 4, "sliding_window": sliding_window}
    of_model = {key: settings.pop(key) for key in ("attn_implementation", "dtype") if key in settings}
    configs = {"gemma2": Gemma2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    config = configs[architecture](**sizes, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **of_model)


PROMPTS = [[5, 9, 13, 22, 7, 3, 41], [17], [8, 30, 2, 44], [12, 12, 50, 6, 33]]
"""Token ids of unequal length."""

PREFIX = [33, 4, 19, 60, 27, 11, 52, 38, 21, 46]
"""Token ids for all prompts to begin with."""


def answer_rows(prompts: Sequence[Sequence[int]] = PROMPTS, *, shared: int = 0) -> Sequences:
    """The prompts behind the first tokens of the prefix, and random answers to them of 6, 2, 4, 1 and 1 tokens."""
    ids = pad(prompts, device=torch.device("cpu"), left=True)
    lengths = (6, 2, 4, 1, 1)[: len(prompts)]
    response_JT = torch.randint(1, VOCABULARY, (len(lengths), 6), generator=torch.Generator().manual_seed(0))
    mask_JT = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    return Sequences(torch.tensor(PREFIX[:shared], dtype=torch.long), *ids, response_JT * mask_JT, mask_JT)


def ppo_models(tuning: str, model: PreTrainedModel, *, value: bool = True) -> PolicyModels:
    """Policy, reference and value model: full tuning, or adapters over an adapter of SFT on other layers too."""
    if tuning == "full":
        return FullModels(model, value=value)
    torch.manual_seed(1)
    layers = ["q_proj", "v_proj", "down_proj"]
    own = LoraConfig(r=3, lora_alpha=6, target_modules=layers, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        adapter = save_adapter(model, Path(folder))
        return LoraModels(model, adapter, own, value=value)


def disturb(parameters: Iterable[torch.nn.Parameter], *, scale: float = 0.1, seed: int = 2) -> None:
    """Move every weight: LoRA's B and the value head begin at zero, and a zero passes no gradient on."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)


@contextmanager
def scoring(models: PolicyModels, which: str, prefix_C: torch.Tensor, *, temperature: float) -> Iterator[Score]:
    """Within the block, scores (J, T) of rows behind the prefix by "policy", "reference" or "value" model."""
    block = nullcontext(models.policy) if which == "policy" else getattr(models, which)()
    with block as model:
        trunk = model if which == "value" else model.base_model
        with shared_prefix(trunk, prefix_C) as prefix:
            if which == "value":
                yield partial(response_values, trunk, models.head, prefix=prefix)
            else:
                yield partial(response_logprobs, model, temperature=temperature, prefix=prefix)


def save_adapter(model: PreTrainedModel, folder: Path) -> Path:
    """An adapter as SFT leaves it, with random numbers in all its factors; the model stays as it is."""
    settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "o_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), settings)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def joined(sequences: Sequences) -> Sequences:
    """The same rows with the prefix back in each prompt, so that nothing is shared."""
    rows = zip(sequences.prompt_JP, sequences.prompt_mask_JP, strict=True)
    prompts = [[*sequences.prefix_C.tolist(), *ids[real].tolist()] for ids, real in rows]
    ids = pad(prompts, device=sequences.prefix_C.device, left=True)
    return Sequences(sequences.prefix_C[:0], *ids, sequences.response_JT, sequences.mask_JT)
