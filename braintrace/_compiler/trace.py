"""Tracing: from a brainstate module to a flat program with named variables.

The inputs of the program are the leaves of the arguments of ``update``, followed by the leaves of
every State that it reads or writes. The outputs are the leaves of the result, followed by the
leaves of every State that it writes.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.typing import ArrayLike

from .._brainstate import StatefulTrace, initialise, trace_stateful, unnoticed_states
from .._checks import in_words, is_quantity, leaf_names, named, parameter_names, path_name, shown
from .._errors import CompilationError, ShapeError
from .._graph.traced_model import Axes, Batch, StateKind, StateLeaf, TracedModel
from .._jax import (
    ClosedJaxpr,
    every_equation,
    is_tracer,
    open_jaxpr,
    source_line,
    strongly_typed,
    trace_to_jaxpr,
)
from .._jaxpr.dataflow import BOTTOM, Flow
from .._jaxpr.program import Program, evaluate_inlined, program_of
from .._typing import Path, PyTree
from .canonicalize import spell_out_broadcasts

NO_CLOCK = (
    "braintrace: a step is traced once, and `brainstate.environ.set(t=...)` would stop the clock. "
    "Pass the time as an argument: `def update(self, t, x):` and in it "
    "`with brainstate.environ.context(t=t):`; see docs/brainstate.md."
)


def trace_model(
    model: brainstate.nn.Module,
    arguments: tuple[PyTree, ...],
    batch_size: int | None,
) -> tuple[TracedModel, dict[Path, brainstate.State]]:
    """Trace one ``update``.

    Return the step, and the States that it uses outside the model, by their path in the step.

    Parameters
    ----------
    model
        The model, its states initialised.
    arguments
        Example arguments of ``update``.
    batch_size
        ``None``: the model is traced as it is. A number: the model is written for one sample, and
        is vmapped over a leading batch axis of that size in ``arguments``.

    Raises
    ------
    CompilationError
        If ``update`` writes a State inside a raw JAX loop or branch, or changes the shape, dtype or
        unit of a State.
    """
    names = parameter_names(model.update, len(arguments))
    if batch_size is not None:
        _check_batch(arguments, batch_size)
        model = brainstate.graph.clone(model)
        initialise(model)
        arguments = jax.tree.map(lambda leaf: leaf[0], arguments)
    _make_keys(model)
    step = _traced_update(model, arguments, named(names, arguments))
    states = _by_path(model, step.states)
    argument_leaves, argument_tree = jax.tree.flatten(arguments)
    outputs = len(jax.tree.leaves(step.result_shapes[0]))
    program, is_written = _flattened(step, outputs)
    arguments_end = len(argument_leaves)
    traced = TracedModel(
        program=program,
        leaves=_state_leaves(program, states, is_written, outputs),
        argument_vars=program.in_vars[:arguments_end],
        argument_roots=tuple(names),
        argument_names=leaf_names(names, arguments),
        argument_tree=argument_tree,
        state_trees={path: jax.tree.structure(state.value) for path, state in states.items()},
        output_atoms=program.out_atoms[:outputs],
        output_tree=jax.tree.structure(step.result_shapes[0]),
        parameter_paths=tuple(tuple(p) for p in model.states(brainstate.ParamState)),
        batch_size=batch_size,
    )
    return traced, {path: state for path, state in states.items() if path[0] == _OUTSIDE}


_OUTSIDE = "<outside>"


def _by_path(
    model: brainstate.nn.Module, states: Iterable[brainstate.State]
) -> dict[Path, brainstate.State]:
    """Return States by their path in the model, or by a number outside of it."""
    paths: dict[int, Path] = {id(state): tuple(path) for path, state in model.states().items()}
    outside = itertools.count()
    return {
        paths.get(id(state)) or (_OUTSIDE, type(state).__name__, next(outside)): state
        for state in states
    }


def _traced_update(
    model: brainstate.nn.Module, arguments: tuple[PyTree, ...], call: str
) -> StatefulTrace:
    def changed(state: brainstate.State, old: PyTree, new: PyTree) -> CompilationError:
        (path,) = _by_path(model, [state])
        return CompilationError(
            f"`update` changes State '{path_name(path)}' from {_described(old)} to "
            f"{_described(new)} for {call}. A state keeps its shape, dtype and unit from step to "
            "step: convert the new value (`.astype`, `.to`), or initialise the state as `update` "
            "writes it."
        )

    try:
        with in_words(lambda: _failing_call(model, call)):
            step = trace_stateful(model.update, *arguments, refuse=changed)
    except KeyError as error:
        if "'t'" in str(error) and brainstate.environ.get("t", None) is None:
            error.add_note(NO_CLOCK)
        raise
    _refuse_leaked_tracers(step.jaxpr)
    _refuse_answers(step.jaxpr)
    # The next step could not read a State of another type.
    for state, new in zip(step.states, step.result_shapes[1], strict=True):
        is_kept = new is None or kind_of(state) == "random"
        if not is_kept and _described(state.value) != _described(new):
            raise changed(state, state.value, new)
    return step


def _flattened(step: StatefulTrace, outputs: int) -> tuple[Program, list[bool]]:
    """Return a step without calls and implicit broadcasts, and whether it writes each State's leaf.

    A State that the step returns as it was is a constant of the step: no gradient passes through it
    from step to step. Batch-norm statistics in evaluation mode are an example, in a pure function
    that returns all its state.
    """
    is_written: list[bool] = []
    counts = [len(jax.tree.leaves(state.value)) for state in step.states]
    may_write = np.repeat(step.is_written, counts)
    kinds = np.repeat([*map(kind_of, step.states)], counts)

    def run(*values: jax.Array) -> list[ArrayLike]:
        results = evaluate_inlined(step.jaxpr, values, spell_out_broadcasts)
        new, kept = iter(results[outputs:]), results[:outputs]
        taken = {id(value) for value in values}
        states = zip(values[len(values) - len(may_write) :], may_write, kinds, strict=True)
        for old, is_new, kind in states:
            value: Any = next(new) if is_new else old
            is_written.append(value is not old)
            if value is old:
                continue
            value = value if kind == "random" else strongly_typed(value)
            # A hidden state that equals an input, a constant or another state is copied: with its
            # own variable, changes to one do not affect the other.
            if kind in ("hidden", "other") and (id(value) in taken or not is_tracer(value)):
                value = jnp.copy(value)
            taken.add(id(value))
            kept.append(value)
        return kept

    avals = [var.aval for var in open_jaxpr(step.jaxpr)[0].invars]
    program, constants = open_jaxpr(trace_to_jaxpr(run, avals))
    # The contents of NumPy arrays may change later.
    own = [np.array(each) if isinstance(each, np.ndarray) else each for each in constants]
    return program_of(ClosedJaxpr(program, own)), is_written


def _make_keys(model: brainstate.nn.Module) -> None:
    """Make the keys of random States, which they otherwise make when first read.

    A key made during the trace of a step would have another type before the step than after it.
    """
    random_states = model.states(brainstate.random.RandomState).values()
    for state in (brainstate.random.DEFAULT, *random_states):
        state.value  # noqa: B018


def _described(value: PyTree) -> str:
    """Print dtypes, shapes, units and structure of a value, which a State keeps."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_quantity)
    arrays = []
    for leaf in leaves:
        aval = jax.typeof(saiunit.get_mantissa(leaf) if is_quantity(leaf) else leaf)
        unit = f" in {saiunit.get_unit(leaf)}" if is_quantity(leaf) else ""
        arrays.append(f"{aval.dtype}{list(aval.shape)}{unit}")
    is_array = jax.tree_util.treedef_is_leaf(tree)
    return ", ".join(arrays) + ("" if is_array else f" ({tree})")


def _refuse_leaked_tracers(closed: ClosedJaxpr) -> None:
    if any(is_tracer(constant) for constant in open_jaxpr(closed)[1]):
        raise CompilationError(
            "`update` writes a State inside a raw `jax.lax` loop or branch, or another raw JAX "
            "transformation, so the written value is lost. Use `brainstate.transform.for_loop`, "
            "`scan`, `cond`, `while_loop`, `vmap` or `jit` instead: they carry States."
        )


def _refuse_answers(closed: ClosedJaxpr) -> None:
    for equation in every_equation(closed):
        if equation.primitive.name == "io_callback" and equation.outvars:
            raise CompilationError(
                "`update` reads the result of an `io_callback` "
                f"({source_line(equation)}). A step is evaluated several times, for its outputs "
                "and for derivatives, and each time the callback could answer differently. Pass "
                "the value as an argument of `update`, or use `jax.pure_callback`."
            )


def kind_of(state: brainstate.State) -> StateKind:
    """Return the kind of a State."""
    if isinstance(state, brainstate.HiddenState):
        return "hidden"
    if isinstance(state, brainstate.ParamState):
        return "parameter"
    return "random" if isinstance(state, brainstate.random.RandomState) else "other"


def _state_leaves(
    program: Program, states: Mapping[Path, brainstate.State], is_written: list[bool], outputs: int
) -> tuple[StateLeaf, ...]:
    new = iter(program.out_atoms[outputs:])
    every = (
        (path, leaf, state)
        for path, state in states.items()
        for leaf in range(len(jax.tree.leaves(state.value)))
    )
    inputs = program.in_vars[len(program.in_vars) - len(is_written) :]
    return tuple(
        StateLeaf(
            path,
            leaf,
            kind_of(state),
            is_grouped=isinstance(state, brainstate.HiddenGroupState),
            per_sample=isinstance(state, brainstate.ShortTermState),
            in_var=old,
            out_var=next(new) if writes else None,
        )
        for (path, leaf, state), old, writes in zip(every, inputs, is_written, strict=True)
    )


def _check_batch(arguments: tuple[PyTree, ...], batch_size: int) -> None:
    """Refuse arguments of a vmapped model that do not start with the batch axis."""
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(arguments)]
    if any(shape[:1] != (batch_size,) for shape in shapes):
        raise ShapeError(
            f"The model is mapped over a batch of `batch_size`={batch_size}, so every argument "
            "needs this first axis; the example arguments have shapes "
            f"{', '.join(map(str, shapes))}."
        )


def _failing_call(model: brainstate.nn.Module, call: str) -> str:
    """Print the arguments of a failing ``update`` and the model's hidden states."""
    states = ", ".join(
        f"State '{path_name(path)}' = {shown(state.value)}"
        for path, state in model.states(brainstate.HiddenState).items()
    )
    return f"`{type(model).__name__}.update` fails for {call}" + (
        f" and {states}" if states else ""
    )


# --- batch axes
#
# The batch axis of a State follows the `batch_size` of `init_state`. One trace of `init_state` with
# a size that no other axis has finds them. If `init_state` follows no size (States made in a
# constructor, a fixed batch), the first axis is the batch axis if it has the size that the user has
# given.

Shape = tuple[int, ...]
Shapes = Mapping[Path, Sequence[Shape]]
"""Shapes of the leaves of States, by path."""


def batch_of(model: brainstate.nn.Module, mapped: int | None, batch_size: int | None) -> Batch:
    """Return the number of samples of a model, and the batch axes of its States.

    Parameters
    ----------
    model
        The model, its States initialised.
    mapped
        Batch size if a model for one sample is vmapped; ``None``: it is not.
    batch_size
        The size that the user has passed to ``init_state``; ``None``: unknown.
    """
    now = _shapes(model)
    if mapped is not None:
        return Batch(mapped, MappingProxyType({p: (0,) * len(s) for p, s in now.items()}))
    size = _unlike_any(now, batch_size or 1)
    made = _made_with(model, size)
    if made is not None and made.keys() == now.keys() and made != now:
        return _following(now, made, size)
    axes = {
        path: tuple(0 if batch_size and s[:1] == (batch_size,) else None for s in shapes)
        for path, shapes in now.items()
    }
    has_batch = any(0 in leaves for leaves in axes.values())
    return Batch(batch_size if has_batch else None, MappingProxyType(axes))


def _shapes(model: brainstate.nn.Module) -> Shapes:
    return {
        tuple(path): [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(state.value)]
        for path, state in model.states(brainstate.ShortTermState).items()
    }


def _unlike_any(now: Shapes, batch_size: int) -> int:
    """Return a multiple of a batch size that no axis of the States has."""
    taken = {batch_size, *(size for leaves in now.values() for shape in leaves for size in shape)}
    return next(batch_size * k for k in itertools.count(2) if batch_size * k not in taken)


def _made_with(model: brainstate.nn.Module, size: int) -> Shapes | None:
    """Return the shapes of States for another batch size; ``None``: there is an error with it."""
    shapes: Shapes = {}

    def make() -> None:
        nonlocal shapes
        twin = brainstate.graph.clone(model)
        initialise(twin, batch_size=size)
        shapes = _shapes(twin)

    try:
        with unnoticed_states():
            trace_stateful(make)
    except Exception:  # `init_state` may fail in any way with another size
        return None
    return shapes


def _following(now: Shapes, made: Shapes, size: int) -> Batch:
    """Return the axes that follow ``batch_size``, given the States' shapes for two sizes."""
    axes: dict[Path, Axes] = {}
    unclear: list[Path] = []
    samples: set[int] = set()
    for path, shapes in now.items():
        found: list[int | None] = []
        for before, after in zip(shapes, made[path], strict=True):
            rank = len(before) if len(before) == len(after) else 0
            differ = [a for a in range(rank) if before[a] != after[a]]
            is_followed = [after[a] for a in differ] == [size]
            found.append(differ[0] if is_followed else None)
            if is_followed:
                samples.add(before[differ[0]])
            elif differ:
                unclear.append(path)
        axes[path] = tuple(found)
    if len(samples) > 1:
        unclear = [*now]
    count = min(samples, default=None)
    # A State of a single sample is shared by all samples.
    return Batch(count, MappingProxyType(axes), () if count == 1 else tuple(unclear))


def follow(samples: Flow, expected: np.ndarray) -> bool:
    """Test whether elements depend on the expected samples alone, or on none."""
    return samples is None or not np.any((samples != BOTTOM) & (samples != expected))


def laid_out(shape: Sequence[int], axis: int | None, count: int) -> np.ndarray:
    """Return the sample of every element of an array, given the axis of samples."""
    if axis is None:
        return np.zeros(shape, np.int32)
    assert shape[axis] == count
    index = [1] * len(shape)
    index[axis] = count
    numbers = np.arange(count, dtype=np.int32).reshape(index)
    return np.array(np.broadcast_to(numbers, shape))
