"""Uploads of what a run made to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the HTTP library below it
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from appa_flwr.core.errors import UserError
from appa_flwr.run.run_files import CARD, POLICY, WEIGHTS_FILE, read, read_config

ADAPTER_CONFIG, ADAPTER_BASE = "adapter_config.json", "base_model_name_or_path"


def upload(run_folder: Path, repository: str, *, public: bool, predictor: bool) -> str:
    """Upload a run's policy, or its predictor's weights with their card, into a repository that is made if need be.

    Returns:
        The address of the commit.

    Raises:
        UserError: the run has no policy or predictor yet, a link is among its files, an adapter's base is a folder of
            this machine, or the hub cannot be reached or refuses.
    """
    config = read_config(run_folder)
    folder = run_folder if predictor else run_folder / POLICY
    needed = [WEIGHTS_FILE, CARD.name] if predictor else ["README.md"]
    for name in needed:
        if not (folder / name).is_file():
            raise UserError(f"{run_folder}: the run has not made {folder / name} yet, so there is nothing to push")
    for path in map(folder.joinpath, needed) if predictor else folder.rglob("*"):
        if path.is_symlink():  # what it points to would be sent, wherever on this machine that lies
            raise UserError(f"{path}: is a link, and only files of the run itself are pushed; put a copy in its place")
    _check_base(folder / ADAPTER_CONFIG)
    what = "PluralLLM's weights" if predictor else f"policy, rule {config.rule}, seed {config.seed}"
    try:
        hub = HfApi()
        hub.create_repo(repository, private=not public, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=needed if predictor else None,
            commit_message=f"appa-flwr: {what}",
        )
    except LocalTokenNotFoundError:
        raise UserError("the hub does not know who you are; run hf auth login first") from None
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{repository}: cannot be pushed to the hub ({reason})") from None
    return str(done.commit_url)


def _check_base(path: Path) -> None:
    """An adapter on a folder of this machine could be loaded by nobody else, and would tell its path."""
    base = str((read(path, dict[str, object]) or {}).get(ADAPTER_BASE) or "")
    if base and Path(base).is_dir():
        raise UserError(
            f"{path}: the adapter's base model is the folder {base}, which others do not have; run with "
            "lora.export=merged, or with a model from the hub"
        )
