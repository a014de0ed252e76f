"""Writing so that a kill, a crash or a full disk leaves the old file or the new one, never a part of either."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from appa_flwr.core.errors import UserError

PARTIAL, OLD = ".partial", ".old"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn every failure to write into one line that names the path and the reason.

    Raises:
        UserError: the block ended by an error of the operating system.
    """
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise classes of their own, and tell the system's error by this phrase.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path}: cannot be written ({reason})") from error


def replace_file(path: Path, data: bytes, *, parents: bool = False, mode: int = 0o666) -> None:
    """Write next to the file and rename over it, so that a reader never sees half of it; `parents` makes folders.

    `mode` is that of the new file, less what the process's umask takes away.

    Raises:
        UserError: it cannot be written; what was there before is intact.
    """
    beside = _hidden(path, PARTIAL)
    with writing(path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                sync(file)
            os.replace(beside, path)
            sync_folder(path.parent)
        except OSError:
            beside.unlink(missing_ok=True)  # the space is needed to say what happened
            raise


@contextmanager
def replaced_folder(folder: Path, *, keep: bool = False) -> Iterator[Path]:
    """Give a new folder to write into, and put it in place of `folder` once the block has ended without an error.

    A folder cannot be renamed over another one. So the old one steps aside first; if the process ends right then,
    `recover` takes it back.

    Args:
        folder: to be replaced; folders above it are made.
        keep: leave the one that another process has put there meanwhile.

    Raises:
        UserError: it cannot be written; what was there before is intact.
    """
    beside, old = _hidden(folder, PARTIAL), _hidden(folder, OLD)
    with writing(folder):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            mode = beside.stat().st_mode & 0o666  # some libraries write for their user alone
            for path in beside.rglob("*"):
                if path.is_file():
                    with suppress(OSError):  # a file system without modes
                        path.chmod(mode)
                    with path.open("rb") as file:
                        sync(file)
            sync_folder(beside)
            if not (keep and folder.exists()):
                if folder.exists():
                    os.rename(folder, old)
                os.rename(beside, folder)
                sync_folder(folder.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Tidy up after a process that ended while it replaced something in this folder."""
    for old in folder.glob(f".*{OLD}"):
        target = folder / old.name[1:].rsplit(".", 2)[0]
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)
    for beside in folder.glob(f".*{PARTIAL}"):
        if beside.is_dir():
            shutil.rmtree(beside)
        else:
            beside.unlink()


def keep_lines(path: Path, count: int | None = None) -> int:
    """Cut a file, which need not exist, to its first `count` complete lines, None for all; how many are left."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith(b"\n")][:count]
    with writing(path), path.open("ab") as file:
        file.truncate(sum(map(len, kept)))
        sync(file)
    return len(kept)


def lock(path: Path) -> FileLock:
    """Hold a file for this process alone, until the lock's `release` or the process's end, however it ends.

    Raises:
        UserError: another process holds it.
    """
    # A file of its own: Windows keeps everybody from writing to one that is held.
    held = FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)
    with writing(path):
        try:
            held.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{path.parent}: another run is writing here; wait for its end, or stop it") from None
    return held


def cache_folder() -> Path:
    """Folder of built models: the user's cache, which XDG_CACHE_HOME can move."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "appa-flwr"


def check_cache() -> None:
    """See that the user's cache can be written, where built models are kept.

    Raises:
        UserError: it cannot.
    """
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # without HOME, Python may know no home at all
        raise UserError(f"the cache cannot be written ({error}); set XDG_CACHE_HOME to a folder") from None


def escape_output() -> None:
    """Have standard output show letters that its encoding lacks as escapes, so that no print can fail by them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _hidden(path: Path, ending: str) -> Path:
    """A name next to a path, of this process alone; `recover` finds it."""
    return path.with_name(f".{path.name}.{os.getpid()}{ending}")


def sync(file: IO[Any]) -> None:
    """Have what was written to a file stored, so that a crash of the machine cannot lose it."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The same for the names of the files in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
