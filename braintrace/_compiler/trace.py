"""Tracing: from a brainstate module to a flat program with named variables.

The inputs of the program are the leaves of the arguments of ``update``, followed by the leaves of
every State that it reads or writes. The outputs are the leaves of the result, followed by the
leaves of every State that it writes.
"""

import itertools
from collections.abc import Iterable, Sequence

import brainstate
import jax
import numpy as np
import saiunit

from .._brainstate import StatefulTrace, initialise, trace_stateful
from .._checks import is_quantity, leaf_names, named, parameter_names, shown
from .._errors import CompilationError, ShapeError, in_words
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import (
    ClosedJaxpr,
    every_equation,
    is_tracer,
    open_jaxpr,
    source_line,
    trace_to_jaxpr,
)
from .._jaxpr.evaluate import Rule, inlined
from .._jaxpr.program import Program, program_of
from .._typing import Path, PyTree, path_name
from .canonicalize import rewriting, spell_out_broadcasts
from .marks import MarkedStep, Marking, with_marks
from .state_arrays import (
    StateArray,
    kind_of,
    map_over_batch,
    state_arrays_of,
    step_of,
    without_unchanged,
)

NO_CLOCK = (
    "braintrace: a step is traced once, and `brainstate.environ.set(t=...)` would stop the clock. "
    "Pass the time as an argument: `def update(self, t, x):` and in it "
    "`with brainstate.environ.context(t=t):`; see docs/brainstate.md."
)


def trace_model(
    model: brainstate.nn.Module,
    arguments: tuple[PyTree, ...],
    batch_size: int | None,
    unroll_limit: int,
    marking: Marking | None = None,
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
    unroll_limit
        Longest loop with an ETP operation that is unrolled.
    marking
        The parameters to mark here; ``None``: the rule needs no marks.

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
    flat = program_of(_with_own_constants(step))
    flat, arrays = without_unchanged(flat, state_arrays_of(states, step.is_written))
    marked = MarkedStep(flat, arrays, is_mapped=batch_size is not None)
    if marking is not None:
        marked = with_marks(marked, marking)
    rewrite = rewriting(unroll_limit, shows_tangents=marking is not None)
    program = _rewritten(marked.program, arrays, batch_size, rewrite)
    count, outputs = len(argument_leaves), len(jax.tree.leaves(step.result_shapes[0]))
    traced = TracedModel(
        program=program,
        leaves=_state_leaves(program, arrays, count, outputs),
        argument_vars=program.in_vars[:count],
        argument_roots=tuple(names),
        argument_names=leaf_names(names, arguments),
        argument_tree=argument_tree,
        state_trees={path: jax.tree.structure(state.value) for path, state in states.items()},
        output_atoms=program.out_atoms[:outputs],
        output_tree=jax.tree.structure(step.result_shapes[0]),
        parameter_paths=tuple(tuple(p) for p in model.states(brainstate.ParamState)),
        batch_size=batch_size,
        has_found_marks=marked.is_marked,
        unmarked=marked.unmarked,
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


def _rewritten(
    flat: Program, arrays: Sequence[StateArray], batch_size: int | None, rule: Rule
) -> Program:
    """Return the step in the form that the analyses read, for all samples."""
    step, avals = step_of(flat, arrays, rule), [var.aval for var in flat.in_vars]
    if batch_size is None:
        return program_of(trace_to_jaxpr(step, avals))
    mapped, mapped_avals = map_over_batch(step, arrays, avals, batch_size)
    # Vmapping adds broadcasts.
    return program_of(inlined(trace_to_jaxpr(mapped, mapped_avals), spell_out_broadcasts))


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


def _with_own_constants(step: StatefulTrace) -> ClosedJaxpr:
    """Return the program of a step with copies of NumPy arrays, whose contents may change later."""
    program, constants = open_jaxpr(inlined(step.jaxpr))
    own = [np.array(each) if isinstance(each, np.ndarray) else each for each in constants]
    return ClosedJaxpr(program, own)


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


def _state_leaves(
    program: Program, arrays: Sequence[StateArray], arguments: int, outputs: int
) -> tuple[StateLeaf, ...]:
    new = iter(program.out_atoms[outputs:])
    return tuple(
        StateLeaf(
            path=array.path,
            leaf=array.leaf,
            kind=array.kind,
            is_grouped=array.is_grouped,
            shape=tuple(old.aval.shape),
            dtype=old.aval.dtype,
            in_var=old,
            out_var=next(new) if array.written else None,
        )
        for array, old in zip(arrays, program.in_vars[arguments:], strict=True)
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
