"""Checkpoints: save a learner to a folder, and restore it.

A checkpoint contains the arrays of a `LearnerState` by name, and a description of the properties
that must agree before they are restored into a learner. Names and arrays are the same on every
backend and under every sharding.

======  =======================================================================================
Format  Contents
======  =======================================================================================
1       the rule as text (and the ``vjp_method``, which is not read); shape, dtype, unit and kind
        of random keys of every array; whether the traces are at the start of a sequence; a
        checksum of each array and of the description; the user's own tree
2       the same, with checksums that do not depend on how arrays are sharded; see `checksums`
======  =======================================================================================
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from .._arguments import Kind, check_option
from .._brainstate import is_watched
from .._errors import CheckpointError, OptionError
from .._learner import Learner, LearnerState
from .._learner.learner import LEARNER
from .._learner.state.learner_state import FORECASTS
from .._typing import PyTree, path_name
from . import store
from .contents import (
    OPTIMIZER,
    Contents,
    array_of,
    check_arrays,
    contents_of,
    contents_of_data,
    differences,
    has_forecasts,
    leaves_by_name,
)
from .trees import as_data, of_data

FORMAT = 2
"""Format of new checkpoints. Every format up to it can be read."""

FOLDER = Kind(
    "the path of a folder on a disk",
    lambda value: (
        isinstance(value, (str, os.PathLike))
        and isinstance(path := os.fspath(value), str)
        and path != ""
        and not any(word in path for word in ("://", "\0"))
    ),
)


def save(folder: str | os.PathLike[str], learner: Learner, extra: PyTree = None) -> None:
    """Save a learner to a folder, replacing its previous checkpoint there.

    A checkpoint contains parameters, states, traces, the optimizer of `Learner.etrace_online`, and
    random keys (of the model and of ``brainstate.random``). It needs the package orbax-checkpoint.

    Saving is atomic: if the program ends at any time, the folder contains the last complete
    checkpoint. Saving does not change the learner.

    Parameters
    ----------
    folder
        Path of the folder. It is created if necessary; other files in it do not change.
    learner
        The learner, between two of its calls.
    extra
        Additional values that `restore` returns: arrays, numbers, strings and None, in lists,
        tuples (also named tuples) and dicts. Examples are a step counter or the values of your own
        States.

    Raises
    ------
    OptionError
        For values of a different type, or inside a transformation.
    CheckpointError
        If saving fails: the path is a file, the disk is full, or another program saves to the same
        folder at the same time. The previous checkpoint then remains.
    MissingPackageError
        If orbax-checkpoint is not installed.

    Notes
    -----
    The new checkpoint is read back before the previous one is deleted, which takes memory for
    another copy of its arrays.

    The code of the model, and constants in it such as time constants, are not saved: the restoring
    program must build the learner in the same way. If several processes share the learner's arrays,
    all of them must call this function.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp, tempfile
    >>> def build():
    ...     return braintrace.compile(braintrace.nn.IndRNN(2, 3), "d_rtrl", jnp.ones((2,)))
    >>> learner, folder = build(), tempfile.mkdtemp()
    >>> first = learner(jnp.ones((2,)))
    >>> braintrace.save(folder, learner, extra={"steps": 1})

    In a later run:

    >>> learner = build()
    >>> braintrace.restore(folder, learner)
    {'steps': 1}
    >>> second = learner(jnp.ones((2,)))
    """
    path = _checked(folder, learner)
    with learner.algorithm.traces.carried.peeking() as at_start:
        leaves = leaves_by_name(learner.functional().unsharded_state())
        arrays = {name: array_of(leaf) for name, leaf in leaves.items()}
        data = as_data(extra, "extra", arrays)
        description = {
            "format": FORMAT,
            "versions": {name: sys.modules[name].__version__ for name in ("braintrace", "jax")},
            **contents_of(learner, leaves).as_data(),
            "at start": at_start,
            "extra": data,
        }
        store.write(path, arrays, description)


def restore(folder: str | os.PathLike[str], learner: Learner) -> Any:
    """Restore a learner from a folder; return the ``extra`` of its checkpoint.

    See `save` for an example. Arrays get the placement of the learner's arrays. The learner may
    have been called before.

    Parameters
    ----------
    folder
        The folder that was passed to `save`.
    learner
        A learner of the same model, rule, batch and options.

    Returns
    -------
    pytree
        The ``extra`` of `save`. Arrays of JAX are on the default device.

    Raises
    ------
    NoCheckpointError
        If there is no complete checkpoint. It is a `FileNotFoundError`.
    CheckpointError
        If the checkpoint is damaged, has a later format, or belongs to a different learner (with a
        list of the differences), or if the path is a file. The learner does not change.
    MissingPackageError
        If orbax-checkpoint is not installed.
    """
    where = _checked(folder, learner)
    while True:
        path = store.last(where)
        try:
            return _restored(path, learner)
        except CheckpointError:
            # If the path differs, another program has saved a newer checkpoint: read that one.
            if jax.process_count() > 1 or store.last(where) == path:
                raise


def _restored(path: pathlib.Path, learner: Learner) -> Any:
    damaged = f"The checkpoint in '{path}' is damaged, and nothing has been restored: "
    with store.told(damaged):
        manifest = json.loads(store.read_text(path))
        number, version = manifest["format"], manifest["versions"]["braintrace"]
        is_newer = number > FORMAT
    if is_newer:
        raise CheckpointError(
            f"The checkpoint in '{path}' has format {number}, and this version of "
            f"braintrace reads formats up to {FORMAT}. It was written by version {version}: "
            "install that one, or a later one."
        )
    with store.told(damaged):
        saved, at_start = contents_of_data(manifest), manifest["at start"]
    functional = learner.functional()
    with learner.algorithm.traces.carried.peeking():
        state = functional.unsharded_state()
    leaves = leaves_by_name(state)
    with store.told(damaged):
        lines = differences(saved, contents_of(learner, leaves))
    if lines:
        raise CheckpointError(
            f"The checkpoint in '{path}' belongs to another learner, and nothing has been "
            f"restored:{''.join(lines)}\nBuild the learner as it was when it was saved; for "
            "another batch call `reset_state` of the learner with its size first, and for "
            "samples that wait for a label `init_forecasts` with the same `max_delay`."
        )
    like = {name: array_of(leaf) for name, leaf in leaves.items()}
    with store.told(damaged):
        arrays = store.read_arrays(path, manifest, like)
        check_arrays(saved, arrays)
        extra = of_data(manifest["extra"], arrays)
        new = _state_like(state, saved, arrays)
    functional.restore(new)
    if at_start:
        learner.algorithm.leave_starting_traces()
    else:
        learner.algorithm.traces.carried.claim()
    return extra


def _checked(folder: Any, learner: Any) -> pathlib.Path:
    check_option("folder", folder, FOLDER)
    check_option("learner", learner, LEARNER)
    if is_watched():
        raise OptionError(
            "A learner can only be saved and restored between its calls, not inside a "
            "transformation such as `jit` or `for_loop`."
        )
    try:
        return pathlib.Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise OptionError(f"`folder` is '{folder}': {error}") from error


def _state_like(own: LearnerState, saved: Contents, arrays: Mapping[str, Any]) -> LearnerState:
    """Return the state of a learner with new arrays by name, given its current state."""
    left_out = set() if has_forecasts(saved) else {FORECASTS}
    others = {path: value for path, value in own.others.items() if path not in left_out}
    rest = dataclasses.replace(own, others=others, optimizer={})
    leaves = [arrays[name] for name in leaves_by_name(rest)]
    new: LearnerState = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    paths = {path_name(path): path for path in own.optimizer}
    names = [n.removeprefix(OPTIMIZER) for n in saved.entries if n.startswith(OPTIMIZER)]
    optimizer = {paths.get(n, tuple(n.split("/"))): arrays[OPTIMIZER + n] for n in names}
    return dataclasses.replace(new, optimizer=optimizer)
