"""Tracing: from a brainstate module to a flat program with named variables.

The inputs of the program are the leaves of the arguments of ``update``, followed by the leaves of
every State that it reads or writes. The outputs are the leaves of the result, followed by the
leaves of every State that it writes.
"""

from collections.abc import Sequence

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
    mapped_avals,
    mapped_axes,
    state_arrays_of,
    step_of,
    without_unchanged,
)


def state_paths(model: brainstate.nn.Module) -> dict[int, Path]:
    """Return the path of every State of ``model``, by identity."""
    return {id(state): tuple(path) for path, state in model.states().items()}


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
    names = argument_names(model, arguments)
    if batch_size is not None:
        check_batch(arguments, batch_size)
        model = brainstate.graph.clone(model)
        initialise(model)
        arguments = jax.tree.map(lambda leaf: leaf[0], arguments)
    _make_keys(model)
    step = _traced_update(model, arguments, named(names, arguments))
    out_shapes, state_shapes = step.result_shapes
    arrays, touched, outside = state_arrays_of(step.states, step.is_written, state_paths(model))
    _check_written(step.states, state_shapes, state_paths(model), named(names, arguments))

    argument_leaves, argument_tree = jax.tree.flatten(arguments)
    count = len(argument_leaves)
    flat, arrays = without_unchanged(program_of(_with_own_constants(step)), arrays, count)
    outputs = len(jax.tree.leaves(out_shapes))
    marked = MarkedStep(flat, arrays, is_mapped=batch_size is not None)
    if marking is not None:
        marked = with_marks(marked, marking)
    rewrite = rewriting(unroll_limit, shows_tangents=marking is not None)
    program = _program(marked.program.jaxpr, arrays, count, batch_size, rewrite)
    traced = TracedModel(
        program=program,
        leaves=_state_leaves(program, arrays, count, outputs),
        argument_vars=program.in_vars[:count],
        argument_roots=tuple(names),
        argument_names=leaf_names(names, arguments),
        argument_tree=argument_tree,
        state_trees={path: jax.tree.structure(state.value) for path, state in touched.items()},
        output_atoms=program.out_atoms[:outputs],
        output_tree=jax.tree.structure(out_shapes),
        parameter_paths=tuple(tuple(p) for p in model.states(brainstate.ParamState)),
        batch_size=batch_size,
        has_found_marks=marked.is_marked,
        unmarked=marked.unmarked,
    )
    return traced, outside


def _program(
    closed: ClosedJaxpr,
    arrays: list[StateArray],
    arguments: int,
    batch_size: int | None,
    rule: Rule,
) -> Program:
    """Return the flat program of a step whose State leaves are inputs and outputs."""
    step = step_of(closed, arrays, rule)
    avals = [var.aval for var in open_jaxpr(closed)[0].invars]
    if batch_size is None:
        return program_of(trace_to_jaxpr(step, avals))
    axes = mapped_axes(arrays, arguments)
    mapped = map_over_batch(step, arrays, axes, batch_size)
    flat = trace_to_jaxpr(mapped, mapped_avals(avals, axes, batch_size))
    # Vmapping adds broadcasts.
    return program_of(inlined(flat, spell_out_broadcasts))


def _traced_update(
    model: brainstate.nn.Module, arguments: tuple[PyTree, ...], call: str
) -> StatefulTrace:
    def refuse(state: brainstate.State, old: PyTree, new: PyTree) -> CompilationError:
        return _changed(state, old, new, state_paths(model), call)

    try:
        with in_words(lambda: call_of_update(model, arguments)):
            step = trace_stateful(model.update, *arguments, refuse=refuse)
    except KeyError as error:
        if "'t'" in str(error) and brainstate.environ.get("t", None) is None:
            error.add_note(NO_CLOCK)
        raise
    _refuse_leaked_tracers(step.jaxpr)
    _refuse_answers(step.jaxpr)
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


def _check_written(
    states: Sequence[brainstate.State],
    shapes: Sequence[PyTree],
    paths: dict[int, Path],
    arguments: str,
) -> None:
    """Refuse a step that changes a State's type: the next step could not read it."""
    for state, new in zip(states, shapes, strict=True):
        if new is None or kind_of(state) == "random":
            continue
        if described(state.value) == described(new):
            continue
        raise _changed(state, state.value, new, paths, arguments)


def _changed(
    state: brainstate.State, old: PyTree, new: PyTree, paths: dict[int, Path], arguments: str
) -> CompilationError:
    name = path_name(paths.get(id(state), (type(state).__name__,)))
    return CompilationError(
        f"`update` changes State '{name}' from {described(old)} to {described(new)} "
        f"for {arguments}. A state keeps its shape, dtype and unit from step to step: convert "
        "the new value (`.astype`, `.to`), or initialise the state as `update` writes it."
    )


def described(value: PyTree) -> str:
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
    program: Program, arrays: list[StateArray], arguments: int, outputs: int
) -> tuple[StateLeaf, ...]:
    out_atoms = iter(program.out_atoms[outputs:])
    return tuple(
        StateLeaf(
            path=array.path,
            leaf=array.leaf,
            kind=array.kind,
            is_grouped=array.is_grouped,
            shape=tuple(in_var.aval.shape),
            dtype=in_var.aval.dtype,
            in_var=in_var,
            out_var=next(out_atoms) if array.written else None,
        )
        for array, in_var in zip(arrays, program.in_vars[arguments:], strict=True)
    )


def argument_names(model: brainstate.nn.Module, arguments: tuple[PyTree, ...]) -> list[str]:
    """Return the parameter names of ``update`` for its arguments."""
    return parameter_names(model.update, len(arguments))


def check_batch(arguments: tuple[PyTree, ...], batch_size: int) -> None:
    """Refuse arguments of a vmapped model that do not start with the batch axis."""
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(arguments)]
    if any(shape[:1] != (batch_size,) for shape in shapes):
        raise ShapeError(
            f"The model is mapped over a batch of `batch_size`={batch_size}, so every argument "
            "needs this first axis; the example arguments have shapes "
            f"{', '.join(map(str, shapes))}."
        )


def call_of_update(model: brainstate.nn.Module, arguments: tuple[PyTree, ...]) -> str:
    """Print the arguments of a failing ``update`` and the model's hidden states."""
    call = named(argument_names(model, arguments), arguments)
    states = ", ".join(
        f"State '{path_name(path)}' = {shown(state.value)}"
        for path, state in model.states(brainstate.HiddenState).items()
    )
    ancestors = f" and {states}" if states else ""
    return f"`{type(model).__name__}.update` fails for {call}{ancestors}"
