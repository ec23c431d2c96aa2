"""Export of one step of a stream, or of a prediction, for processes without this library.

The exported function takes plain arrays by name and one step's slices. JAX keeps exports compatible
for six months; see the documentation of ``jax.export``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp

from .._arguments import check_arrays
from .._errors import OptionError
from .._optional import optional_import
from .._shown import is_quantity
from .._typing import PyTree
from .calls.options import METHODS, ExportOptions, options_of, takes
from .calls.parts import HasParts
from .forecast import with_room_as, without_room
from .functional import FunctionalLearner
from .state.learner_state import FIELDS, LearnerState

OF_MODEL = ("parameters", "hidden", "others", "random")
"""Fields of a state that a prediction depends on."""

Exported: TypeAlias = tuple[bytes, dict[str, jax.Array]]
"""An exported function, and its initial state by name."""


@takes(METHODS["etrace_online"])
def export_step(learner: HasParts, *slices: PyTree, **options: Unpack[ExportOptions]) -> Exported:
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
        Skipped updates are counted in ``others/braintrace/skipped_updates`` of the state: an
        exported step cannot warn.

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
    OptionError
        If ``every`` is not 1: an exported step is a call of one step, which ends with an update.
    BraintraceError
        All errors that `etrace_online` would raise before it runs.
    """
    pure = FunctionalLearner(learner.parts, {})
    checked = options_of("etrace_online", options)
    optimizer = checked.optimizer
    if checked.every != 1:
        raise OptionError(
            f"`every` is {checked.every}, but an exported step updates at every call: pass "
            f"`optax.MultiSteps(optimizer, {checked.every}).gradient_transformation()` as "
            "`optimizer`, which accumulates gradients."
        )
    if optimizer is not None:
        learner.parts.init_optimizer(optimizer)

    def run(state: LearnerState, *sequences: PyTree) -> tuple[LearnerState, PyTree]:
        return pure.online(state, *sequences, **options)

    return _exported(run, pure.state(), FIELDS, slices)


def export_predict(learner: HasParts, *arguments: PyTree) -> Exported:
    """Return one step of the model as bytes, and its initial state.

    Another process runs it with JAX alone, as for `export_step`. It contains neither the learning
    rule nor the optimizer, and its parameters are constant.

    Parameters
    ----------
    *arguments
        Arguments of the model's ``update``; arrays may be `jax.ShapeDtypeStruct`.

    Returns
    -------
    program
        The function ``(state, *arguments) -> (state, output)``, for the platform of this process.
    state
        The learner's current parameters, states and random keys, by their names in a
        `LearnerState`. New parameters of the same learner fit an old program.

    Raises
    ------
    MissingPackageError
        Without flatbuffers, of the extra ``export``.
    BraintraceError
        All errors that `predict` would raise before it runs.
    """
    parts = learner.parts
    pure = FunctionalLearner(parts, {})

    def run(state: LearnerState, *sequences: PyTree) -> tuple[LearnerState, PyTree]:
        state, outputs = pure.predict(with_room_as(parts, state), *sequences)
        return without_room(state), outputs

    return _exported(run, without_room(pure.state()), OF_MODEL, arguments)


def _exported(
    run: Callable[..., tuple[LearnerState, PyTree]],
    start: LearnerState,
    fields: Iterable[str],
    slices: tuple[PyTree, ...],
) -> Exported:
    """Return a function of sequences of one step as bytes, and the fields that are its state."""
    optional_import("flatbuffers", "export")
    for index, part in enumerate(slices):
        check_arrays(f"slice {index}", part)
        _check_plain(f"`slice {index}`", part)
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(start), strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    known, structure = dict(zip(names, leaves, strict=True)), jax.tree.structure(start)
    kept = [name for name in names if name.partition("/")[0] in fields]

    def step(state: dict[str, jax.Array], *slices: PyTree) -> tuple[dict[str, jax.Array], PyTree]:
        values: dict[str, Any] = {**jax.tree.map(jnp.zeros_like, known), **state}
        now = jax.tree.unflatten(structure, [values[name] for name in names])
        sequences = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], slices)
        after, result = run(now, *sequences)
        _check_plain("The result of the step", result)
        new = dict(zip(names, jax.tree.leaves(after), strict=True))
        return {name: new[name] for name in kept}, jax.tree.map(lambda leaf: leaf[0], result)

    state = {name: known[name] for name in kept}
    exported = jax.export.export(jax.jit(step))(state, *slices)
    return bytes(exported.serialize()), state


def _check_plain(name: str, value: PyTree) -> None:
    """Refuse values with units, which a process without this library cannot read.

    Raises
    ------
    OptionError
        If there is one.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_quantity):
        if is_quantity(leaf):
            raise OptionError(
                f"{name} is in {leaf.unit}, but an exported step has plain arrays only: divide "
                "outputs by their unit, and multiply inputs by it, in the model or `step_fn`."
            )
