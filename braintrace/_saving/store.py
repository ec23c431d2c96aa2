"""Atomic storage of checkpoints: a folder that always contains the last complete one.

Orbax writes each checkpoint to a folder with a random name. The checkpoint is read back, and
renamed to the next number. Other programs see the rename as one atomic operation. Older checkpoints
are deleted only then. If the program ends at any time, the highest number is a complete checkpoint.

Two programs that save to one folder need no lock. Not every file system has locks, and a killed
program would keep its lock. Every step is a rename, at which only one program succeeds. A folder is
renamed to a random name before it is deleted, so a checkpoint that is being read never loses single
files. Orbax's `CheckpointManager` is not used: it commits before the checkpoint is read back, and
its names depend only on the step, so two programs that save at the same time mix their files.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._errors import BraintraceError, CheckpointError, NoCheckpointError
from .._optional import optional_import
from .checksums import checksums, checksums_of_format_1

NAME = re.compile(r"braintrace-checkpoint-(0|[1-9][0-9]{0,17})")
UNFINISHED = re.compile(
    r"braintrace-unfinished-[0-9a-f]+|braintrace-checkpoint-[0-9]+\.orbax-checkpoint-tmp.*"
)
OWNED = "owned"
"""Marker file in an unfinished folder. If another program deletes the folder, the file is missing,
even if orbax creates the folder again."""
OTHER = "another program saves to it at the same time"
PLAIN = re.compile(r"(?!.*gs:/)[\w /.:+=@,~#%&'()-]*")
"""Paths that orbax reads unchanged. It changes brackets and backslashes, for example, and it reads
``gs:/`` in any path as the start of a Google Cloud Storage bucket."""


def write(folder: pathlib.Path, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing the current one.

    Parameters
    ----------
    folder
        The folder; it is created if necessary.
    arrays, manifest
        Arrays by name, and their description for JSON.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be written and read back. The current one does not change.
    """
    orbax = _orbax()
    _refuse_a_file(folder)
    stored = {name: _as_stored(array) for name, array in arrays.items() if array.size}
    empty = {n: (a.shape, str(a.dtype)) for n, a in arrays.items() if n not in stored}
    text = json.dumps({**manifest, "empty": empty, "checksums": checksums(stored)})
    with told(f"Nothing was saved to '{folder}', and its contents are unchanged: "):
        own = _unfinished(folder, _by_the_first(functools.partial(_begin, folder)))
        try:
            with _for_orbax(own / "checkpoint") as path:
                _checkpointer().save(
                    path,
                    args=orbax.args.PyTreeSave(stored),
                    custom_metadata={"braintrace": text, "checksum": zlib.crc32(text.encode())},
                )
            _by_the_first(lambda: _finish(folder, own / "checkpoint", text, stored))
        except Exception as error:
            if jax.process_index() or (own / OWNED).exists():
                raise
            raise RuntimeError(OTHER) from error
        finally:
            if jax.process_index() == 0:
                shutil.rmtree(own, ignore_errors=True)


def last(folder: pathlib.Path) -> pathlib.Path:
    """Return the path of the checkpoint in a folder.

    Raises
    ------
    NoCheckpointError
        If there is none.
    CheckpointError
        If some processes do not see it, if its path is a file or a link, or if the folder's path is
        a file.
    """
    _refuse_a_file(folder)
    with told(f"'{folder}' cannot be read: "):
        number = _by_the_first(lambda: max(_numbers(folder), default=-1))
    if number < 0:
        raise NoCheckpointError(
            f"There is no checkpoint in '{folder}': no `save` has completed there."
        )
    path = _numbered(folder, number)
    if path.is_symlink() or path.is_file():
        raise CheckpointError(
            f"'{path}' is a {'symbolic link' if path.is_symlink() else 'file'}: expected the "
            "folder that `save` has written under this name. Move it away."
        )
    if not path.is_dir():
        raise CheckpointError(
            f"Process 0 has a checkpoint in '{path}', and process {jax.process_index()} does not "
            "see it: save to a folder that all processes share."
        )
    return path


def read_text(path: pathlib.Path, alone: bool = False) -> str:
    """Return the JSON description of the arrays of a checkpoint.

    Parameters
    ----------
    path
        Path of the checkpoint.
    alone
        Whether only the first process calls this function.

    Raises
    ------
    ValueError
        If it differs from the saved description.
    """
    with _for_orbax(path) as plain:
        found = _checkpointer(alone and jax.process_count() > 1).metadata(plain).custom_metadata
    text = (found or {}).get("braintrace", "")
    if zlib.crc32(text.encode()) != (found or {}).get("checksum"):
        raise ValueError("its description does not have its checksum")
    return str(text)


def read_arrays(
    path: pathlib.Path, manifest: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arrays of a checkpoint by name.

    Parameters
    ----------
    path, manifest
        Path of the checkpoint, and its description.
    like
        Some of its arrays by name, as examples of their placement. All other arrays, and arrays
        that are not committed to a device, are returned as NumPy arrays.

    Raises
    ------
    ValueError
        If they differ from the saved arrays.
    """
    orbax = _orbax()
    expected = manifest["checksums"]
    counted = checksums if manifest["format"] > 1 else checksums_of_format_1

    def placed(name: str) -> Any:
        array = like.get(name)
        if isinstance(array, jax.Array) and array.committed:
            return orbax.ArrayRestoreArgs(sharding=array.sharding)
        return _as_numpy()

    found = _read(path, {name: placed(name) for name in expected})
    for name, checksum in counted(found).items():
        if checksum != expected[name]:
            raise ValueError(f"'{name}' does not have its checksum")
    for name, (shape, dtype) in manifest["empty"].items():
        if 0 not in shape:
            raise ValueError(f"'{name}' of shape {shape} is declared empty")
        found[name] = np.zeros(shape, dtype)
    return found


# --- operations of the first process for all


def _begin(folder: pathlib.Path) -> int:
    """Create an unfinished folder, delete abandoned ones, and return the number in its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for child in list(folder.iterdir()):
        if UNFINISHED.fullmatch(child.name):
            _delete(child)
    number = secrets.randbits(62)
    own = _unfinished(folder, number)
    own.mkdir()
    try:
        (own / OWNED).touch()
    except FileNotFoundError as error:  # another program deleted the folder as abandoned
        raise RuntimeError(OTHER) from error
    return number


def _finish(
    folder: pathlib.Path, source: pathlib.Path, text: str, arrays: Mapping[str, Any]
) -> int:
    """Verify a checkpoint, rename it to the next number, and delete older ones; return 0."""
    if read_text(source, alone=True) != text:
        raise ValueError("its description differs when it is read back")
    expected = json.loads(text)["checksums"]
    found = _read(source, dict.fromkeys(arrays, _as_numpy()), alone=True)
    for name, array in arrays.items():
        back = found.pop(name)
        same = (back.shape, back.dtype) == (array.shape, array.dtype)
        if same and isinstance(array, np.ndarray):  # three times as fast as a checksum
            same = np.array_equal(_bits(back), _bits(array))
        elif same:
            same = checksums({name: back})[name] == expected[name]
        if not same:
            raise ValueError(f"'{name}' differs when it is read back")
    number = _commit(folder, source)
    for older in _numbers(folder):
        if older < number:
            _delete(_numbered(folder, older))
    return 0


def _commit(folder: pathlib.Path, source: pathlib.Path) -> int:
    """Rename a checkpoint to the next number, and return the number."""
    while True:
        number = max(_numbers(folder), default=-1) + 1
        target = _numbered(folder, number)
        if not NAME.fullmatch(target.name):
            raise ValueError(f"'{_numbered(folder, number - 1).name}' has the last number")
        try:
            source.rename(target)
        except OSError:
            if not (source.exists() and os.path.lexists(target)):
                raise
        else:
            break
    if max(_numbers(folder), default=number) > number:
        raise RuntimeError("another program has saved to it at the same time")
    return number


def _delete(path: pathlib.Path) -> None:
    """Delete a folder atomically: other processes see all of it or nothing."""
    if path.is_symlink() or not path.is_dir():
        return
    moved = _unfinished(path.parent, secrets.randbits(62))
    with contextlib.suppress(OSError):  # another process deletes it at the same time
        path.rename(moved)
        shutil.rmtree(moved, ignore_errors=True)


def _by_the_first(call: Callable[[], int]) -> int:
    """Return the result of a function that only the first process calls."""
    number, failure = 0, None
    if jax.process_index() == 0:
        try:
            number = call()
        except Exception as error:
            number, failure = -2, error
    if jax.process_count() > 1:
        # Without `jax_enable_x64`, JAX has no integers of 64 bits.
        halves = np.array([number], np.int64).view(np.uint32)
        halves = np.asarray(multihost_utils.broadcast_one_to_all(halves))
        number = int(np.ascontiguousarray(halves).view(np.int64)[0])
    if failure is not None:
        raise failure
    if number == -2:
        raise RuntimeError("process 0 has failed; its error says why")
    return number


# --- names and paths


def _numbered(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"braintrace-checkpoint-{number}"


def _unfinished(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"braintrace-unfinished-{number:x}"


def _numbers(folder: pathlib.Path) -> list[int]:
    """Return the numbers of checkpoints in a folder."""
    names = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    return [int(match[1]) for match in map(NAME.fullmatch, names) if match]


def _refuse_a_file(folder: pathlib.Path) -> None:
    """Raise an error if a folder's path is a file, before any training is lost."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            f"'{folder}' is a file: expected a folder, or a path that does not exist. A "
            "checkpoint consists of several files."
        )


@contextlib.contextmanager
def _for_orbax(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a path to the same file that orbax reads unchanged."""
    if PLAIN.fullmatch(path.as_posix()):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="braintrace-") as temporary:
        if not PLAIN.fullmatch(pathlib.Path(temporary).as_posix()):
            raise ValueError(f"orbax cannot use this path, nor a link to it in '{temporary}'")
        link = pathlib.Path(temporary) / "folder"
        link.symlink_to(path.parent, target_is_directory=True)
        yield link / path.name


# --- orbax


def _orbax() -> Any:
    return optional_import("orbax.checkpoint", "checkpoint")


@functools.cache
def _checkpointer(alone: bool = False) -> Any:
    """Return the checkpointer of this process; each new one would leak tens of kilobytes."""
    orbax = _orbax()
    if not alone:
        return orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
    processes = orbax.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="braintrace"
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=processes)
    return orbax.Checkpointer(handler, multiprocessing_options=processes)


def _read(path: pathlib.Path, wanted: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """Return arrays of a checkpoint by name, given orbax's restore arguments for each."""
    arguments = _orbax().args.PyTreeRestore(restore_args=wanted)
    with _for_orbax(path) as plain:
        checkpointer = _checkpointer(alone and jax.process_count() > 1)
        return dict(checkpointer.restore(plain, args=arguments))


def _as_numpy() -> Any:
    return _orbax().RestoreArgs(restore_type=np.ndarray)


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_stored(array: Any) -> Any:
    """Return an array in the form for orbax: only sharded arrays remain JAX arrays."""
    is_sharded = isinstance(array, jax.Array) and not array.is_fully_replicated
    return array if is_sharded else np.asarray(array)


@contextlib.contextmanager
def told(words: str) -> Iterator[None]:
    """Convert exceptions to errors about a checkpoint whose messages start with ``words``."""
    try:
        yield
    except BraintraceError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"{words}{lines[0] if lines else type(error).__name__}") from error
