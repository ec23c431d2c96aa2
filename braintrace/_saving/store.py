"""A folder with the last checkpoint that was written to its end.

Each is written by orbax under a name of its own, which is changed to the next number when all of it
is there, at once as far as anybody sees. Only then is the one before deleted. Whenever the program
is ended in between, by whatever means, the highest number is whole.
"""

import contextlib
import functools
import json
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._errors import CheckpointError, NoCheckpointError
from .._optional import optional_import
from .checksums import checksums, checksums_of_format_1

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

    Raises
    ------
    CheckpointError
        If there is a file in the place of the folder.
    """
    orbax = _orbax()
    _refuse_a_file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _delete(folder, UNFINISHED)
    new = folder / f"braintrace-checkpoint-{_last_number(folder) + 1}"
    stored = {name: _as_stored(array) for name, array in arrays.items() if array.size}
    empty = {n: (a.shape, str(a.dtype)) for n, a in arrays.items() if n not in stored}
    text = json.dumps({**manifest, "empty": empty, "checksums": checksums(stored)})
    _checkpointer().save(
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
    CheckpointError
        If not all processes see it, or if there is a file in the place of the folder.
    """
    _refuse_a_file(folder)
    number = _last_number(folder)
    if number < 0:
        raise NoCheckpointError(
            f"There is no checkpoint in '{folder}': nothing has been saved there to its end."
        )
    path = folder / f"braintrace-checkpoint-{number}"
    if not path.is_dir():
        raise CheckpointError(
            f"Process 0 has a checkpoint in '{path}', and process {jax.process_index()} does not "
            "see it: save to a folder that all processes share."
        )
    return path


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """Return what JSON says of the arrays of a checkpoint.

    Raises
    ------
    CheckpointError
        If it is damaged.
    """
    checkpointer = _checkpointer()
    with _told(path):
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
    expected = manifest["checksums"]
    counted = checksums if manifest["format"] > 1 else checksums_of_format_1

    def placed(name: str) -> Any:
        array = like.get(name)
        if isinstance(array, jax.Array) and array.committed:
            return orbax.ArrayRestoreArgs(sharding=array.sharding)
        return orbax.RestoreArgs(restore_type=np.ndarray)

    wanted = {name: placed(name) for name in expected}
    with _told(path):
        arguments = orbax.args.PyTreeRestore(restore_args=wanted)
        found = _checkpointer().restore(path, args=arguments)
        for name, checksum in counted(found).items():
            if checksum != expected[name]:
                raise ValueError(f"'{name}' does not have its checksum")
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in manifest["empty"].items()}
    return {**found, **empty}


def _refuse_a_file(folder: pathlib.Path) -> None:
    """Raise an error if nothing can be saved in a folder, before anything is learned for it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"'{folder}' is a file: expected a folder, or a path where there is nothing yet. "
            "A learner is saved as several files; give them a folder of their own."
        )


def _orbax() -> Any:
    return optional_import("orbax.checkpoint", "checkpoint")


@functools.cache
def _checkpointer() -> Any:
    """Return the one of this process: each that is made leaves tens of kilobytes behind."""
    orbax = _orbax()
    return orbax.Checkpointer(orbax.PyTreeCheckpointHandler())


def _last_number(folder: pathlib.Path) -> int:
    """Return the highest number of a checkpoint, -1 if there is none; one process says it to all.

    What others see of a folder may be older, where it is on another machine.
    """
    names = folder.iterdir() if folder.is_dir() else ()
    found = filter(None, (NAME.fullmatch(child.name) for child in names))
    number = max((int(match[1]) for match in found), default=-1)
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


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
