"""Atomic writing: a kill, a crash or a full disk leaves the old file or the new file, never a part of one."""

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from filelock import FileLock, Timeout

from appa_flwr.core.errors import UserError

PARTIAL, OLD, HASH = ".partial", ".old", ".sha256"
_STAND_INS: Final = {
    b"version https://git-lfs": "a Git LFS pointer, which stands for the file; fetch the file by `git lfs pull`",
    b"<!doctype": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn every failure to write into a one-line error with the path and the reason.

    Raises:
        UserError: the block raised an error of the operating system.
    """
    try:
        yield
    except Exception as error:
        # Rust libraries raise their own classes; their message has this phrase for an error of the operating system.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path}: cannot be written ({reason})") from error


def stand_in(path: Path) -> str | None:
    """What a file is that only stands for another one, and how to get that; None for any other file."""
    with path.open("rb") as content:
        start = content.read(512).lstrip(b"\xef\xbb\xbf \r\n\t").lower()
    return next((what for mark, what in _STAND_INS.items() if start.startswith(mark)), None)


def read_file(path: Path) -> bytes:
    """Read a file's bytes; raises UserError with the reason if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def sha256_of(source: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, or of the hashes of all files in a folder; empty if the path does not exist."""
    path = Path(source)
    if path.is_dir():
        files = (str(file) for file in sorted(path.rglob("*")) if file.is_file())
        return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists, and check it; raises as `writing`."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Check that files can be written to a folder; raises as `writing`."""
    with writing(folder):
        tempfile.TemporaryFile(dir=folder).close()


def check_place(folder: Path) -> None:
    """Check that a folder can be written to, or made, without making it; raises as `writing`."""
    check_folder(next(place for place in (folder, *folder.absolute().parents) if place.exists()))


def replace_file(path: Path, data: bytes, *, parents: bool = False, mode: int = 0o666) -> None:
    """Write a temporary file and rename it over the target, so that readers never see a part; `parents` makes folders.

    `mode` is the mode of the new file, before the process's umask is applied.

    Raises:
        UserError: the file cannot be written; the old file is intact.
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
            beside.unlink(missing_ok=True)  # frees space for the report of the error
            raise


def replace_hashed(path: Path, data: bytes) -> None:
    """Replace a file as `replace_file` does, and its hash beside it, which `sha256sum --check` reads too.

    The old hash is removed first and the new one written last: after a kill a whole file has its own hash or none.
    """
    beside = path.with_name(path.name + HASH)
    with writing(beside):
        beside.unlink(missing_ok=True)
    replace_file(path, data)
    replace_file(beside, f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())


def read_hashed(path: Path) -> bytes:
    """Read a file; raises OSError if that fails, ValueError if the file has a hash beside it that differs."""
    data, beside = path.read_bytes(), path.with_name(path.name + HASH)
    if beside.exists() and not beside.read_bytes().startswith(hashlib.sha256(data).hexdigest().encode()):
        raise ValueError(f"it is not what was written, as its hash in {beside.name} shows")
    return data


@contextmanager
def replaced_folder(folder: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into; it replaces `folder` after the block has ended without an error.

    A folder cannot be renamed over another one, so the old folder is renamed first. If the process ends between the
    two steps, `recover` restores the old folder. Missing parents are created. With `keep`, a folder that exists at the
    end, for example from another process, is not replaced.

    Raises:
        UserError: the folder cannot be written; the old folder is intact.
    """
    beside, old = _hidden(folder, PARTIAL), _hidden(folder, OLD)
    with writing(folder):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            mode = beside.stat().st_mode & 0o666  # some libraries write files that only the user can read
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
    """Clean up after a process that ended while it replaced a file or folder in this folder."""
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
    """Truncate a file, which need not exist, to its first `count` complete lines (None: all); returns their number."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith(b"\n")][:count]
    with writing(path), path.open("ab") as file:
        file.truncate(sum(map(len, kept)))
        sync(file)
    return len(kept)


def lock(path: Path) -> FileLock:
    """Lock a file for this process, until the lock's `release` or the end of the process.

    Raises:
        UserError: another process holds the lock; the message names it by its id.
    """
    # A separate lock file, since Windows does not let anyone write to a locked file.
    file, holder = path.with_name(f".{path.name}.lock"), ""
    held = FileLock(file, thread_local=False)
    with suppress(OSError):  # before the try, by which older versions of filelock empty the file
        holder = file.read_text()
    with writing(path):
        try:
            held.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{path.parent}: another run is writing here (process {holder}); wait or stop it") from None
    with suppress(OSError):
        file.write_text(str(os.getpid()))
    return held


def cache_folder() -> Path:
    """Folder of built models in the user's cache, which XDG_CACHE_HOME can set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "appa-flwr"


def check_cache() -> None:
    """Raise a UserError if the user's cache, which keeps built models, cannot be written."""
    try:
        make_folder(cache_folder())
    except (UserError, RuntimeError) as error:  # without HOME, Python may find no home
        raise UserError(f"the cache cannot be written ({error}); set XDG_CACHE_HOME to a folder") from None


def escape_output() -> None:
    """Make standard output escape characters that its encoding lacks, so that printing them cannot fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _hidden(path: Path, ending: str) -> Path:
    """Hidden path beside a path, unique to this process; `recover` finds it."""
    return path.with_name(f".{path.name}.{os.getpid()}{ending}")


def sync(file: IO[Any]) -> None:
    """Flush a file to disk, so that a crash of the machine cannot lose its content."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
