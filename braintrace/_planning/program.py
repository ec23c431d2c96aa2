"""Program of a learner, traced without numbers.

Everything is traced with shapes instead of arrays: the model is created, its States are
initialised, it is compiled for a learning rule, and one of its methods is called.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._algorithms import ETraceAlgorithm
from .._brainstate import trace_stateful
from .._core.products.complex_packing import pack, pairs_of
from .._core.traces import starting_traces
from .._core.zero import as_arrays, examples
from .._errors import OptionError
from .._etrace_op import get_primitive_spec
from .._foreign import in_words
from .._function_model import gradients_by_path
from .._jax import equations_inside, for_devices, open_jaxpr
from .._learner import Learner, compile
from .._learner.calls.options import METHODS, Options
from .._learner.calls.request import Request
from .._learner.driver import prepared
from .._learner.state.optimizer import is_transformation
from .._rules import Rule
from .._sharding import Layout
from .._typing import Path, PyTree
from .division import Array, Parts, arrays, arrays_of_state, arrays_of_traces, sharded_sizes

LONGEST_AXIS = 2**31 - 1
"""XLA counts the elements of a flattened array in 32 bits."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the data for it, and the method that runs it.

    Attributes
    ----------
    make
        Returns the model; it is called inside a trace.
    algorithm, compile_options
        See `braintrace.compile`.
    example, batch_size
        Shapes of the arguments of one step, and their number of samples.
    method, options
        The method of the learner, and its options.
    steps
        Length of the sequences.
    from_zero
        Whether the sequences start with zero traces.
    optimizer
        Optimizer of the parameters; ``None``: parameters minus their gradients.
    """

    make: Callable[[], brainstate.nn.Module]
    algorithm: str | type[ETraceAlgorithm] | Rule
    compile_options: Mapping[str, Any]
    example: tuple[PyTree, ...]
    batch_size: int | None
    method: str
    options: Options
    steps: int
    from_zero: bool
    optimizer: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A traced program that has not been compiled, and the arrays of its learner.

    Attributes
    ----------
    traced
        The program.
    parameters, states, traces, optimizer
        Arrays of parameters, of other States and filters, of traces, and of an optimizer.
    arguments, aliased, results
        Arguments, the ones whose memory the program may use for its results, and these.
    places
        Row indices of the entries of sparse matrices.
    sharded
        Lengths of axes along which outputs are sharded; unsharded arrays may have equal lengths.
    chunk_size, records
        Number of steps in a chunk, and the bytes of their residuals.
    """

    traced: jax.stages.Traced
    parameters: list[Array]
    states: list[Array]
    traces: list[Array]
    optimizer: list[Array]
    arguments: list[Array]
    aliased: list[Array]
    results: list[Array]
    places: list[Array]
    sharded: frozenset[int]
    chunk_size: int
    records: int

    def temp_bytes(self) -> int:
        """Return the bytes that XLA's program needs besides its arguments and results.

        XLA ends the process where an axis is longer than `LONGEST_AXIS`. For such a program, which
        hardly any machine can run, the bytes of the residuals are a lower bound.
        """
        if _longest_axis(self.traced.jaxpr) > LONGEST_AXIS:
            return self.records
        return int(self.traced.lower().compile().memory_analysis().temp_size_in_bytes)


def _longest_axis(jaxpr: Any) -> int:
    equations = open_jaxpr(jaxpr)[0].eqns
    every = (inner for outer in equations for inner in (outer, *equations_inside(outer)))
    return max((n for e in every for v in e.outvars for n in v.aval.shape), default=0)


def program_for(work: Workload, parts: Parts) -> PlannedProgram:
    """Return the program of one device for its samples, without allocating arrays.

    Parameters
    ----------
    work
        The workload of all devices.
    parts
        Numbers of parts of samples and outputs.

    Raises
    ------
    OptionError
        If the model cannot be created without numbers, or for an optimizer with its own States.
    ShapeError
        If the batch size is not a multiple of the number of parts.
    """
    if work.optimizer is not None and not is_transformation(work.optimizer):
        raise OptionError(
            "`optimizer` is not an `optax.GradientTransformation`; other optimizers hold "
            "parameters of an existing model. Leave it out."
        )
    batch_size = parts.of_batch(work.batch_size)
    example = parts.of_example(work.example, work.batch_size)
    work = dataclasses.replace(work, example=example, batch_size=batch_size)
    found: list[PlannedProgram] = []

    def build(*example: PyTree) -> None:
        found.append(_traced(work, example, parts))

    try:
        with for_devices(parts.devices):
            trace_stateful(build, *work.example)
    except jax.errors.ConcretizationTypeError as error:
        raise OptionError(
            "This model cannot be planned from shapes alone: it depends on the values of arrays. "
            "Create the model, and plan it."
        ) from error
    return found[0]


def _made(work: Workload) -> brainstate.nn.Module:
    try:
        return work.make()
    except jax.errors.ConcretizationTypeError:
        raise  # `program_for` explains it
    except Exception:
        with in_words(OptionError, lambda: "`network` makes no model"):
            raise


def _traced(work: Workload, example: tuple[PyTree, ...], parts: Parts) -> PlannedProgram:
    learner = compile(
        _made(work), work.algorithm, *example, batch_size=work.batch_size, **work.compile_options
    )
    algorithm = learner.algorithm
    with in_words(OptionError, lambda: f"`steps` is {work.steps}, too many to plan"):
        sequences = _over_time(work.example, work.steps)
    algorithm.divide(parts.of_model)
    moments = _begun(learner, work.optimizer)
    request = _request(learner, work, sequences, moments)
    driver, arguments = prepared(learner.parts, request, algorithm.states_of_model, list)
    starting, has_traces = _starting_traces(algorithm), work.method != "predict"
    is_zero = work.method == "etrace_grad" and work.from_zero
    given = starting if has_traces and not is_zero else None
    states = driver.body.states(algorithm.states_of_model)
    values = [state.value for state in states]
    traced = driver.trace(values, given, arguments, owned=has_traces)
    in_place = given is not None and driver.body.replaces(sequences, given)

    compiled = algorithm.compiled
    layout = parts.layout(compiled.full_graph, compiled.trace_specs)
    sharded = _sharded(algorithm, layout)
    paths = {id(state): path for path, state in algorithm.states_of_model.items()}
    parameters = _joined(arrays_of_state(p, s.value, layout) for p, s in _parameters(algorithm))
    own_of_optimizer = _like_parameters(arrays(moments.value), parameters)
    held = {
        id(s): own_of_optimizer
        if s is moments
        else arrays_of_state(paths.get(id(s)), s.value, layout)
        for s in states
    }
    of_method, _, after = traced.out_info
    written = _joined(held[id(state)] for state in driver.body.written(states))
    learned = {id(state) for state in algorithm.param_states.values()}
    own = [s for s in algorithm.states_of_step.values() if id(s) not in learned]
    traces = arrays_of_traces(starting, layout)
    taken = [] if given is None else traces
    chunks = list(driver.body.chunks_by_length.values())
    length = chunks[0].length if chunks else min(work.steps, work.options.every)
    records = chunks[0].record_bytes if chunks else length * algorithm.graph.record_bytes
    return PlannedProgram(
        traced=traced,
        parameters=parameters,
        states=_joined(arrays_of_state(paths.get(id(s)), s.value, layout) for s in own),
        traces=traces,
        optimizer=own_of_optimizer,
        arguments=[*_joined(held.values()), *taken, *arrays(arguments)],
        aliased=taken if in_place else [],
        results=[*_by_shape(of_method, sharded), *written, *_by_shape(after, sharded)],
        places=_places(algorithm, sharded),
        sharded=sharded,
        chunk_size=length,
        records=records if has_traces else 0,
    )


def _by_shape(tree: PyTree, sharded: frozenset[int]) -> list[Array]:
    """Return arrays of which the shape alone tells whether they are sharded."""
    return [
        dataclasses.replace(leaf, is_sharded=not sharded.isdisjoint(leaf.shape))
        for leaf in arrays(tree)
    ]


def _places(algorithm: ETraceAlgorithm, sharded: frozenset[int]) -> list[Array]:
    return [
        Array(operand.aval.shape, np.int32, not sharded.isdisjoint(operand.aval.shape))
        for relation in algorithm.graph.hidden_param_op_relations
        for name, operand in relation.trainable_vars.items()
        if (get_primitive_spec(relation.primitive).trace_axes or {}).get(name) == ("entry",)
    ]


def _like_parameters(moments: list[Array], parameters: list[Array]) -> list[Array]:
    """Return an optimizer's arrays, sharded like a parameter of the same shape."""
    shapes = {leaf.shape for leaf in parameters if leaf.is_sharded}
    return [dataclasses.replace(leaf, is_sharded=leaf.shape in shapes) for leaf in moments]


def _joined(found: Iterable[list[Array]]) -> list[Array]:
    return list(itertools.chain(*found))


def _parameters(algorithm: ETraceAlgorithm) -> Iterable[tuple[Path, brainstate.State]]:
    return algorithm.param_states.items()


def _sharded(algorithm: ETraceAlgorithm, layout: Layout) -> frozenset[int]:
    leaves = {(leaf.path, leaf.leaf): leaf for leaf in algorithm.graph.traced.leaves}
    return sharded_sizes((leaves[key], names) for key, names in layout.leaves.items())


def _starting_traces(algorithm: ETraceAlgorithm) -> PyTree:
    """Return initial traces as a learner outside of a trace carries them, coupled states packed."""
    specs = algorithm.compiled.trace_specs
    return jax.eval_shape(lambda: as_arrays(pack(starting_traces(specs), pairs_of(specs))))


def _over_time(example: tuple[PyTree, ...], steps: int) -> tuple[PyTree, ...]:
    """Return sequences that take no memory."""

    def of_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((steps, *leaf.shape), leaf.dtype)

    sequences: tuple[PyTree, ...] = examples(jax.tree.map(of_leaf, example))
    return sequences


def _request(
    learner: Learner, work: Workload, sequences: tuple[PyTree, ...], moments: brainstate.State
) -> Request:
    def step_fn(*slices: PyTree) -> jax.Array:
        return _sum_of_squares(learner(*slices))

    update_fn = functools.partial(_update, learner, work.optimizer, moments)
    functions: dict[str, Any] = {"step_fn": step_fn, "update_fn": update_fn}
    taken = {name: f for name, f in functions.items() if name in METHODS[work.method]}
    return Request(work.method, sequences, dataclasses.replace(work.options, **taken))


def _sum_of_squares(outputs: PyTree) -> jax.Array:
    leaves = map(saiunit.get_mantissa, jax.tree.leaves(outputs, is_leaf=saiunit.math.is_quantity))
    real = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    total: jax.Array = sum((jnp.sum(jnp.abs(leaf) ** 2) for leaf in real), jnp.zeros(()))
    return total


def _begun(learner: Learner, optimizer: Any) -> brainstate.State:
    """Return a State that contains the state of an optimizer."""
    state = () if optimizer is None else optimizer.init(learner.parts.parameters_for_optimizer())
    return brainstate.LongTermState(state)


def _update(learner: Learner, optimizer: Any, moments: brainstate.State, gradients: PyTree) -> None:
    parameters, changes = learner.parts.parameters_for_optimizer(), gradients
    if optimizer is not None:
        changes, moments.value = optimizer.update(gradients, moments.value, parameters)
    new = jax.tree.map(lambda w, c: (w - c).astype(w.dtype), parameters, changes)
    by_path = gradients_by_path(learner.algorithm.model, new)
    for path, state in learner.algorithm.param_states.items():
        state.value = by_path[path]
