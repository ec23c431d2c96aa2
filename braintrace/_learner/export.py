"""Export of one step of a stream, for processes without the model and this library.

The exported function takes plain arrays by name and one step's slices. JAX keeps exports compatible
for six months; see the documentation of ``jax.export``.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp

from .._arguments import check_arrays
from .._optional import optional_import
from .._typing import PyTree
from .functional import FunctionalLearner
from .options import METHODS, ExportOptions, options_of, takes
from .parts import HasParts


@takes(METHODS["etrace_online"])
def export_step(
    learner: HasParts, *slices: PyTree, **options: Unpack[ExportOptions]
) -> tuple[bytes, dict[str, jax.Array]]:
    """Return one step of `etrace_online` as bytes, and its initial state.

    Another process runs it with JAX alone::

        step = jax.export.deserialize(program).call
        state, loss = step(state, x, y)

    Parameters
    ----------
    *slices
        Arguments of ``step_fn`` in one step; arrays may be `jax.ShapeDtypeStruct`.
    **options
        As for `etrace_online`: ``step_fn``, ``optimizer`` or ``update_fn``, ``has_aux`` and so on.

    Returns
    -------
    program
        The function ``(state, *slices) -> (state, loss)``, for the platform of this process; with
        ``has_aux`` a pair of loss and auxiliary results instead of the loss.
    state
        The learner's current parameters, states, traces, random keys and optimizer, by their names
        in a `LearnerState`.

    Raises
    ------
    MissingPackageError
        Without flatbuffers, of the extra ``export``.
    BraintraceError
        All errors that `etrace_online` would raise before it runs.
    """
    optional_import("flatbuffers", "export")
    for index, part in enumerate(slices):
        check_arrays(f"slice {index}", part)
    pure = FunctionalLearner(learner.parts, {})
    optimizer = options_of("etrace_online", options).optimizer
    if optimizer is not None:
        learner.parts.init_optimizer(optimizer)
    start = pure.state()
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(start), strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    structure = jax.tree.structure(start)

    def step(state: dict[str, jax.Array], *slices: PyTree) -> tuple[dict[str, jax.Array], PyTree]:
        now = jax.tree.unflatten(structure, [state[name] for name in names])
        sequences = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], slices)
        after, found = pure.online(now, *sequences, **options)
        new = dict(zip(names, jax.tree.leaves(after), strict=True))
        return new, jax.tree.map(lambda leaf: leaf[0], found)

    state = dict(zip(names, leaves, strict=True))
    exported = jax.export.export(jax.jit(step))(state, *slices)
    return bytes(exported.serialize()), state
