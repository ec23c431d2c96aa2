"""Checkpoints of a learner, stored by orbax.

A checkpoint has three parts: ``state`` contains the arrays of the `LearnerState` by name, ``extra``
the user's own pytree, and ``about`` the rule, and the dtype, shape and digest of every array.
"""

import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import CheckpointError, NoCheckpointError, optional_import
from ._jax import on_host
from ._learner.functional import LearnerState
from ._learner.learner import Learner
from ._typing import PyTree


def save(folder: str | os.PathLike[str], learner: Learner, extra: PyTree = None) -> None:
    """Save a learner to a folder, replacing its previous checkpoint there.

    A checkpoint contains parameters, states, traces, the optimizer of `Learner.etrace_online`, and
    random keys (of the model and of ``brainstate.random``). It needs the package orbax-checkpoint.

    Saving is atomic: if the program ends at any time, the folder contains the last complete
    checkpoint. Saving does not change the learner.

    Parameters
    ----------
    folder
        Path of the folder. It is created if necessary.
    learner
        The learner, between two of its calls.
    extra
        Additional values that `restore` returns: a pytree of arrays and numbers that orbax takes.

    Raises
    ------
    MissingPackageError
        If orbax-checkpoint is not installed.

    Notes
    -----
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
    orbax = _orbax()
    arrays = _by_name(learner.functional().state())
    own = jax.tree.map(lambda leaf: on_host(leaf) if _is_array(leaf) else leaf, extra)
    about = {
        **_about(learner, arrays),
        "at start": learner.carried.given("zero") is None,
        "digests": {name: _digest(array) for name, array in arrays.items()},
        "digests of extra": {name: _digest(leaf) for name, leaf in _by_name(own).items()},
    }
    parts = {
        "state": orbax.args.StandardSave(_for_orbax(arrays)),
        "extra": orbax.args.StandardSave({"extra": own}),
        "about": orbax.args.JsonSave(about),
    }
    with _manager(folder) as manager:
        manager.save(1 + (manager.latest_step() or 0), args=orbax.args.Composite(**parts))


def restore(folder: str | os.PathLike[str], learner: Learner) -> Any:
    """Restore a learner from a folder; return the ``extra`` of its checkpoint.

    See `save` for an example. Arrays get the placement of the learner's arrays. If the checkpoint
    has the state of an optimizer, call `Learner.init_optimizer` first.

    Parameters
    ----------
    folder
        The folder that was passed to `save`.
    learner
        A learner of the same model, rule, batch and options.

    Returns
    -------
    pytree
        The ``extra`` of `save`, as orbax returns it: tuples are lists, named tuples are dicts, and
        arrays are NumPy arrays.

    Raises
    ------
    NoCheckpointError
        If the folder has no checkpoint. It is a `FileNotFoundError`.
    CheckpointError
        If the checkpoint is damaged, or belongs to a different learner (with a list of the
        differences). The learner does not change.
    MissingPackageError
        If orbax-checkpoint is not installed.
    """
    orbax = _orbax()
    if not pathlib.Path(folder).expanduser().is_dir():
        raise NoCheckpointError(f"There is no checkpoint in '{folder}': it is not a folder.")
    with _manager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            raise NoCheckpointError(f"There is no checkpoint in '{folder}'.")
        state = learner.functional().state()
        arrays = _by_name(state)
        try:
            part = orbax.args.Composite(about=orbax.args.JsonRestore())
            about = manager.restore(step, args=part).about
            differences = _differences(about, _about(learner, arrays))
            if not differences:
                parts = {
                    "state": orbax.args.StandardRestore(_for_orbax(arrays)),
                    "extra": orbax.args.StandardRestore(),
                }
                found = manager.restore(step, args=orbax.args.Composite(**parts))
                new = {**arrays, **found.state}
                _check_digests(new, about["digests"])
                _check_digests(_by_name(found.extra["extra"]), about["digests of extra"])
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint in '{folder}' is damaged, and nothing has been restored: {error}"
            ) from error
    if differences:
        raise CheckpointError(
            f"The checkpoint in '{folder}' belongs to another learner, and nothing has been "
            f"restored:{''.join(differences)}\nBuild the learner as it was when it was saved; call "
            "`reset_state` with its batch size and `init_optimizer` with its optimizer first. To "
            "continue with other layers, restore into a learner of the saved model, and copy the "
            "parameters that stay: `new.param_states[path].value = old.param_states[path].value`."
        )
    leaves = [new[name] for name in arrays]
    learner.functional().restore(jax.tree.unflatten(jax.tree.structure(state), leaves))
    if about["at start"]:
        learner.begin_sequence()
    return found.extra["extra"]


def _orbax() -> Any:
    return optional_import("orbax.checkpoint", "checkpoint")


def _manager(folder: str | os.PathLike[str]) -> Any:
    options = {"max_to_keep": 1, "enable_async_checkpointing": False}
    path, orbax = pathlib.Path(folder).expanduser().absolute(), _orbax()
    return orbax.CheckpointManager(path, options=orbax.CheckpointManagerOptions(**options))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a pytree by name, in order; leaves of a state are arrays."""
    is_state = isinstance(tree, LearnerState)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.asarray(x) if is_state else x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _about(learner: Learner, arrays: Mapping[str, Any]) -> dict[str, Any]:
    types = {name: f"{a.dtype}{list(a.shape)}" for name, a in arrays.items()}
    return {"rule": learner.rule, "arrays": types}


def _digest(array: Any) -> str:
    is_key = jnp.issubdtype(getattr(array, "dtype", None), jax.dtypes.prng_key)
    data = on_host(jax.random.key_data(array) if is_key else array)
    bits = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return hashlib.blake2b(bits.data, digest_size=16).hexdigest()


def _check_digests(arrays: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    for name, array in arrays.items():
        if _digest(array) != digests[name]:
            raise ValueError(f"'{name}' does not have its digest")


def _for_orbax(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the arrays that are not empty; arrays that every process has are of NumPy."""
    one = jax.process_count() == 1
    return {
        name: a if a.committed and (one or not a.is_fully_replicated) else np.asarray(a)
        for name, a in arrays.items()
        if a.size
    }


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    there, here = ({"rule": d["rule"], **d["arrays"]} for d in (saved, own))
    return [
        f"\n- `{name}` is {there.get(name, 'missing')}; this learner has {here.get(name, 'none')}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
