"""A folder with the last checkpoint that was written to its end.

Each is written by orbax under a name of its own, which is changed to the next number when all of it
is there, at once as far as anybody sees. Only then is the one before deleted. Whenever the program
is ended in between, by whatever means, the highest number is whole.
"""

import contextlib
import json
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError, NoCheckpointError
from .._optional import optional_import

NAME = re.compile(r"braintrace-checkpoint-(\d+)")
UNFINISHED = re.compile(NAME.pattern + r"\.orbax-checkpoint-tmp.*")


def write(folder: pathlib.Path, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Write a checkpoint in the place of the one that there is.

    Parameters
    ----------
    folder
        Where; it is made if need be.
    arrays, manifest
        Arrays by name, and what JSON says of them.
    """
    orbax = _orbax()
    folder.mkdir(parents=True, exist_ok=True)
    _delete(folder, UNFINISHED)
    new = folder / f"braintrace-checkpoint-{max(_numbers(folder), default=-1) + 1}"
    stored = {name: _as_stored(array) for name, array in arrays.items() if array.size}
    empty = {n: (a.shape, str(a.dtype)) for n, a in arrays.items() if n not in stored}
    text = json.dumps({**manifest, "empty": empty, "checksums": _checksums(stored)})
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            new,
            args=orbax.args.PyTreeSave(stored),
            custom_metadata={"braintrace": text, "checksum": zlib.crc32(text.encode())},
        )
    _delete(folder, NAME, but=new)


def last(folder: pathlib.Path) -> pathlib.Path:
    """Return where the checkpoint in a folder is.

    Raises
    ------
    NoCheckpointError
        If there is none.
    """
    numbers = _numbers(folder) if folder.is_dir() else []
    if not numbers:
        raise NoCheckpointError(
            f"There is no checkpoint in '{folder}': nothing has been saved there to its end."
        )
    return folder / f"braintrace-checkpoint-{max(numbers)}"


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """Return what JSON says of the arrays of a checkpoint.

    Raises
    ------
    CheckpointError
        If it is damaged.
    """
    orbax = _orbax()
    with _told(path), orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(path).custom_metadata or {}
        text = found.get("braintrace", "")
        if zlib.crc32(text.encode()) != found.get("checksum"):
            raise ValueError("its description does not have its checksum")
        manifest: dict[str, Any] = json.loads(text)
        return manifest


def read_arrays(
    path: pathlib.Path, manifest: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arrays of a checkpoint by name.

    Parameters
    ----------
    path, manifest
        Where it is, and what `read_manifest` has returned.
    like
        Arrays by name, some of those in it: these are placed as they are. All others, and those
        that are free to go to any device, are arrays of NumPy.

    Raises
    ------
    CheckpointError
        If it is damaged.
    """
    orbax = _orbax()
    checksums = manifest["checksums"]

    def placed(name: str) -> Any:
        array = like.get(name)
        if isinstance(array, jax.Array) and array.committed:
            return orbax.ArrayRestoreArgs(sharding=array.sharding)
        return orbax.RestoreArgs(restore_type=np.ndarray)

    wanted = {name: placed(name) for name in checksums}
    with _told(path), orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(path, args=orbax.args.PyTreeRestore(restore_args=wanted))
        for name, checksum in _checksums(found).items():
            if checksum != checksums[name]:
                raise ValueError(f"'{name}' does not have its checksum")
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in manifest["empty"].items()}
    return {**found, **empty}


def _orbax() -> Any:
    return optional_import("orbax.checkpoint", "checkpoint")


def _numbers(folder: pathlib.Path) -> list[int]:
    found = (NAME.fullmatch(child.name) for child in folder.iterdir())
    return [int(match[1]) for match in found if match]


def _delete(folder: pathlib.Path, names: re.Pattern[str], but: pathlib.Path | None = None) -> None:
    """Delete what has some names in a folder; one process does it for all."""
    if jax.process_index() == 0:
        for child in list(folder.iterdir()):
            if names.fullmatch(child.name) and child != but:
                shutil.rmtree(child, ignore_errors=True)


def _as_stored(array: Any) -> Any:
    """Return an array as orbax gets it: only what is divided over devices is left to its care."""
    is_divided = isinstance(array, jax.Array) and not array.is_fully_replicated
    return array if is_divided else np.asarray(array)


def _checksums(arrays: Mapping[str, Any]) -> dict[str, int | None]:
    """Return checksums of arrays by name, of those that this process has as a whole."""

    def of(array: Any) -> int | None:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return None
        content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return zlib.crc32(content)

    return {name: of(array) for name, array in arrays.items()}


@contextlib.contextmanager
def _told(path: pathlib.Path) -> Iterator[None]:
    """Tell whatever fails while a checkpoint is read as an error about it."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"The checkpoint in '{path}' is damaged, and nothing has been restored: "
            f"{lines[0] if lines else type(error).__name__}"
        ) from error
