"""Files that appear whole or not at all, checks and locks of outputs, and readers whose errors name the file.

A file or folder is written under a temporary name beside its place, flushed to disk, and renamed. Its process holds a
lock on the temporary name. The system releases the lock when the process ends, however it ends: a temporary name
without a lock was left by a run that was killed, and the next write to the same place removes it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line checks outputs before it loads torch
    import torch
    from safetensors import safe_open
    from torch import Tensor

try:
    import fcntl
except ImportError:  # on a system without such locks nothing is refused, and nothing is removed
    fcntl = None  # type: ignore[assignment]

try:
    from safetensors import SafetensorError as SafetensorError
except ImportError:  # an optional dependency; `safetensors()` below names the extra that brings it

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """Stands for the class that is missing, and is never raised."""


NAME_ROOM = 64  # bytes that the names of temporary files, locks and checkpoints add to the name of their output


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary file that takes the place of `path` when the block ends. An error leaves no file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "numbers.txt")
        >>> with replacing(path) as temporary:
        ...     _ = temporary.write_text("1 2 3")
        >>> [file.name for file in path.parent.iterdir()]
        ['numbers.txt']
    """
    path = Path(path)
    remove_leftovers(path)
    with _temporary(path, folder=False) as temporary:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder that takes the name `path` when the block ends; nothing may have that name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    with _temporary(path, folder=True) as temporary:
        yield temporary
        for part in sorted(temporary.rglob("*"), reverse=True):
            if not part.is_symlink():
                _flush(part)
        _flush(temporary)
        if os.path.lexists(path):  # another process made it meanwhile; a rename would replace an empty folder
            raise FileExistsError(f"the output {path} exists already, so nothing was written; choose another name")
        temporary.rename(path)
        _flush(path.parent)


def remove_leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """Remove the temporary files, folders and lock that killed runs have left for `path`; returns their paths."""
    path = Path(path)
    return _remove(path.parent, re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{32}}\.tmp|lock)"))


def remove_leftovers_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove all temporary files and folders that killed runs have left in a folder; returns their paths."""
    return _remove(Path(folder), re.compile(r"\..+\.[0-9a-f]{32}\.tmp"))


def _remove(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = []
    for left in folder.iterdir() if fcntl is not None and folder.is_dir() else ():
        if pattern.fullmatch(left.name):
            with suppress(OSError), _opened(left) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
                found.append(left)
    return found


@contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold a lock file while the block runs, and remove it afterwards.

    Check inside the block whether the work is still to be done: the run that held the lock before may have done it.

    Args:
        path: the lock file.
        what: the output that it protects; the error names it if another process holds the lock.
    """
    path = Path(path)
    while True:
        with path.open("a") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(
                        f"another run is writing to {what}; wait for it, or choose another output"
                    ) from None
                except OSError:  # a file system without locks
                    pass
            if not _same_file(path, file.fileno()):  # its last holder removed it after it was opened here
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def check_out(path: str | os.PathLike[str], *, new: bool = True) -> None:
    """Raise an error if an output cannot be written, so that a run fails before its work instead of after it.

    Args:
        path: file or folder that the run will write.
        new: raise an error if it exists already. A run that was killed right after it wrote the output may have left
            temporary files beside it: these are removed. False for a folder, to which the run may add files.
    """
    path = Path(path)
    there = next(part for part in (path, *path.absolute().parents) if os.path.lexists(part))
    if new and there == path:
        remove_leftovers(path)
        raise FileExistsError(f"the output {path} exists already; choose another name")
    if there == path and not there.is_dir():
        raise NotADirectoryError(f"the output {path} exists and is not a folder; choose the name of a folder")
    _check_folder(there, path)
    longest = os.pathconf(there, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    for name, room in ((path.name, NAME_ROOM if new else 0), *((part, 0) for part in path.parts)):
        if (size := len(os.fsencode(name))) + room > longest:
            raise ValueError(f"an output may have at most {longest - room} bytes in this name; got {size}: {name}")


def _check_folder(folder: Path, out: Path) -> None:
    """Raise an error if the folder, or the nearest above it that exists, cannot be written to."""
    there = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    if not os.access(there, os.W_OK) or not there.is_dir():
        raise PermissionError(f"{out} cannot be made: {there} is no folder that can be written to")


@contextmanager
def locked_output(path: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """Hold the lock of an output while the block runs; yields the paths of what killed runs had left, now removed.

    Check inside the block whether the output exists: the run that held the lock before may have written it.
    """
    path = Path(path)
    _check_folder(path.absolute().parent, path)
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path.with_name(f".{path.name}.lock"), str(path)):
            yield remove_leftovers(path)
    finally:
        with suppress(OSError):  # a failed run leaves no empty folders
            for parent in made:
                parent.rmdir()


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a value as JSON, whole or not at all. NaN and infinity raise a ValueError, as JSON has neither."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Return the value in a JSON file; the error for a bad file names what it should be, such as "a plan of snnk"."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}, which should be {what}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, JSON nested too deeply
        raise ValueError(f"{path} is not {what}: {error}") from error


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, whole or not at all."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        safetensors().torch.save_file(held, temporary, dict(metadata) if metadata else None)


@contextmanager
def open_tensors(path: str | os.PathLike[str], device: str | torch.device | None = None) -> Iterator[safe_open]:
    """An open safetensors file, of which only the header has been read; a damaged file raises a ValueError."""
    library = safetensors()
    try:
        with library.safe_open(os.fspath(path), framework="pt", device=str(device or "cpu")) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}; copy it or save it again") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def tensor_header(file: safe_open) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype (in the words of safetensors, such as "F32") and shape of each tensor in an open file; reads no tensor."""
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
    return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def safetensors() -> Any:
    """The package of that name with its torch part. It is an optional dependency, and the error names the extra."""
    try:
        import safetensors.torch
    except ImportError:
        message = "save and load need safetensors: pip install safetensors, or the extra, pip install 'snnk[tables]'"
        raise ImportError(message) from None
    return safetensors


@contextmanager
def _temporary(path: Path, folder: bool) -> Iterator[Path]:
    """Yield a locked temporary name for `path`; it is removed at the end if it is still there."""
    temporary, descriptor = _claim(path, folder)
    try:
        yield temporary
    except OSError as error:
        if error.errno == errno.ENOENT and not temporary.exists():
            text = f"{path.parent} was removed while {path.name} was written to it; run the command again"
            raise FileNotFoundError(text) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, f"{error.strerror} for {path}; free some and run the command again") from error
        raise
    except SafetensorError as error:  # safetensors reports a full disk by an error that is no OSError
        raise OSError(errno.EIO, f"{path} cannot be written: {error}; run the command again") from error
    finally:
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        os.close(descriptor)


def _claim(path: Path, folder: bool) -> tuple[Path, int]:
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir() if folder else temporary.touch(exist_ok=False)
        try:
            descriptor = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _same_file(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)  # another process took it for a leftover before it was locked


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _flush(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)
