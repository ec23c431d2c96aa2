"""User's step function: as a pure function of State values, and its calls of the learner.

A step function calls the learner, and the call must run the step that is being traced instead of a
step on the States. The replacement is bound to a context: another thread may trace pure functions
of the same learner meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .. import _brainstate
from .._brainstate import trace_stateful
from .._checks import is_quantity, named, parameter_names, shown
from .._core.steps import Inputs, operands
from .._core.traces import examples
from .._errors import OptionError, in_words
from .._graph.method import Weights
from .._jax import calls_back, every_equation, trace_state
from .._model import leaves_by_var, whole_values, write_by_path
from .._typing import Path, PyTree, path_name
from .arguments import Options, read_arguments, unwrap
from .base import BaseLearner

# --- functions of States as pure functions


class PureStep:
    """A function that reads and writes brainstate States, in pure form.

    Attributes
    ----------
    states, is_written
        The given parameters and then the others, and whether the function writes each.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[brainstate.State],
        example: tuple[Any, ...],
    ) -> None:
        traced = trace_stateful(function, *example)
        self._call, self.jaxpr = traced.call, traced.jaxpr
        known = set(map(id, parameters))
        self.states = [*parameters, *(s for s in traced.states if id(s) not in known)]
        places = {id(state): place for place, state in enumerate(self.states)}
        self._places = [places[id(state)] for state in traced.states]
        self._written = traced.is_written
        written = set(itertools.compress(self._places, self._written))
        self.is_written = [place in written for place in range(len(self.states))]

    def __call__(self, values: Sequence[Any], *arguments: Any) -> tuple[list[Any], Any]:
        """Return the new values of the States that are written, and the function's result."""
        new, result = self._call([values[place] for place in self._places], *arguments)
        return list(itertools.compress(new, self._written)), result

    def written_of(self, items: Sequence[Any]) -> list[Any]:
        """Select those of written States from one item per State."""
        return list(itertools.compress(items, self.is_written))

    def merge(self, values: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Return the values of the States with new values of the written ones."""
        new, pairs = iter(written), zip(values, self.is_written, strict=True)
        return [next(new) if is_written else value for value, is_written in pairs]


FEW = 1_000
"""Maximum number of scalars that are always written, instead of entering a loop."""


def run_if(flag: jax.Array, function: Callable[..., Any], carry: Any, *reads: Any) -> Any:
    """Run a function that writes States, or leave them and a carry as they are.

    It is a loop of at most one step, which writes its buffers in place; XLA copies the values of a
    branch. If it is mapped and no flag is true, it runs nothing; a branch would run both sides. A
    function without carry that writes few elements, or runs on an accelerator, runs always, and its
    results are selected. On a CPU, a step of an LSTM of 8 units then takes 0.6 of the time
    (2026-11-26). On a GPU, the host waits for the flag of a loop; a step of a stream without this
    wait takes 0.66 to 0.89 of the time (H100, 2026-11-27, nine streams). A carry of traces is not
    selected: its readers repeat the step of the traces, which takes 2 to 10 times the time (H100).

    Parameters
    ----------
    flag
        Whether it runs.
    function
        ``(carry, *reads) -> carry``.
    carry
        A pytree of arrays.
    *reads
        Pytrees of arrays, which are computed before the loop.
    """
    step = PureStep(function, (), (carry, *reads))
    before = [state.value for state in step.states]
    start = (step.written_of(before), carry)
    is_small = sum(leaf.size for leaf in jax.tree.leaves(start)) < FEW

    def once(index: jax.Array, now: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        # XLA computes what does not depend on the index before the loop, whether it runs or not.
        _, values = jax.lax.optimization_barrier((index, reads))
        written, result = step(step.merge(before, now[0]), now[1], *values)
        return written, result

    def selected(flag: jax.Array) -> Any:
        return jax.tree.map(functools.partial(jnp.where, flag), once(0, start), start)

    def in_place(flag: jax.Array) -> Any:
        return jax.lax.fori_loop(0, flag.astype(jnp.int32), once, start)

    loops = "while" in {equation.primitive.name for equation in every_equation(step.jaxpr)}
    if carry is not None or loops or calls_back(step.jaxpr):  # it may not end, or calls Python
        written, carry = in_place(flag)
    elif is_small:
        written, carry = selected(flag)
    else:
        written, carry = jax.lax.platform_dependent(flag, cpu=in_place, default=selected)
    for state, value in zip(step.written_of(step.states), written, strict=True):
        state.value = value
    return carry


# --- calls of the learner inside


INTERCEPTORS: ContextVar[Mapping[int, Callable[..., PyTree]]] = ContextVar(
    "braintrace_interceptors", default=types.MappingProxyType({})
)
"""What handles the calls of a learner inside the user's functions, by its identity."""


@contextlib.contextmanager
def intercepting(learner: BaseLearner, interceptor: Callable[..., PyTree]) -> Iterator[None]:
    """Let an interceptor handle the calls of a learner inside the context."""
    token = INTERCEPTORS.set({**INTERCEPTORS.get(), id(learner): interceptor})
    try:
        yield
    finally:
        INTERCEPTORS.reset(token)


LOOPS = (
    "`step_fn` calls the learner inside a compiled function, branch or loop. Call the learner "
    "directly, since the whole step is compiled, and return results with `has_aux=True`."
)

Values: TypeAlias = list[tuple[Path, Any]]
"""Leaves of the values of States, with their paths."""


def values_of(states: Mapping[Path, brainstate.State]) -> Values:
    """Return the current values of States."""
    return [(path, leaf) for path, s in states.items() for leaf in jax.tree.leaves(s.value)]


def traced_values(learner: BaseLearner) -> Values:
    """Return the values of the hidden states that traces follow."""
    paths = {state.path for state in learner.graph.traced_states}
    return values_of({path: s for path, s in learner.states_of_step.items() if path in paths})


def first_written(before: Values, now: Values) -> Path | None:
    """Return the first State whose value has changed, or ``None``."""
    pairs = zip(before, now, strict=True)
    return next((path for (path, then), (_, leaf) in pairs if leaf is not then), None)


class Recorder:
    """Replacement of the learner during one call of the step function.

    ``run`` runs the step: ``inputs -> (outputs, new states, records)``.
    """

    def __init__(self, learner: BaseLearner, run: Callable[[Inputs], Any]) -> None:
        self.learner, self._run = learner, run
        self.calls, self.records, self._trace = 0, None, trace_state()
        self._parameters, self._hidden = values_of(learner.param_states), traced_values(learner)

    def __call__(self, *arguments: Any) -> Any:
        """Run one step, which reads and writes the model's States."""
        if trace_state() != self._trace:
            raise OptionError(
                "`step_fn` calls the learner inside a compiled function, branch or loop. Call the "
                "learner directly, since the whole step is compiled, and return results with "
                "`has_aux=True`."
            )
        self.check_states()
        graph, states = self.learner.graph, self.learner.states_of_step
        inputs = leaves_by_var(graph, states, _brainstate.values_of(states.values()))
        inputs |= read_arguments(graph, unwrap(arguments))
        outputs, new_states, self.records = self._run(inputs)
        write_by_path(states, whole_values(graph, new_states))
        self._hidden = traced_values(self.learner)
        self.calls += 1
        return jax.tree.unflatten(graph.traced.output_tree, outputs)

    def check_states(self) -> None:
        """Refuse new values of parameters, and of hidden states that the step has not written."""
        path = first_written(self._parameters, values_of(self.learner.param_states))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the parameter '{path_name(path)}', which is fixed during a "
                "step. Change it with the gradient that the call returns, or in `update_fn`."
            )
        path = first_written(self._hidden, traced_values(self.learner))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the hidden State '{path_name(path)}', and traces do not follow "
                "this write. Change it in `update` of the model; to start a new sequence, use "
                "`reset`."
            )


def run_step_function(
    step_fn: Callable[..., PyTree] | None, recorder: Recorder, slices: tuple[PyTree, ...]
) -> PyTree:
    """Return the result of a step function, which calls the learner exactly once.

    Raises
    ------
    OptionError
        If it does not, or writes a hidden state.
    """
    with intercepting(recorder.learner, recorder):
        result = recorder(*slices) if step_fn is None else call_user("step_fn", step_fn, *slices)
    if recorder.calls != 1:
        raise OptionError(
            f"`step_fn` called the learner {recorder.calls} times; it must call it exactly once "
            "per step, and not inside another compiled function."
        )
    recorder.check_states()
    return result


def call_user(name: str, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Call a function of the user; an error in it names the call."""

    def call() -> str:
        return f"`{name}` fails for {named(parameter_names(function, len(arguments)), arguments)}"

    with in_words(call):
        return function(*arguments)


def operands_of(learner: BaseLearner, step: PureStep, values: Sequence[PyTree]) -> Weights:
    """Return the operands of the relations, from values of the States of a step."""
    states = learner.states_of_step
    by_id = dict(zip(map(id, step.states), values, strict=True))
    own = [by_id[id(state)] for state in states.values()]
    return operands(learner.graph, leaves_by_var(learner.graph, states, own))


def example_slices(sequences: PyTree) -> PyTree:
    """Return zeros like the slices of one step."""

    def of_step(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))

    return examples(jax.tree.map(of_step, sequences))


# --- losses


def recorded_loss(
    recorder: Recorder, options: Options, slices: tuple[PyTree, ...]
) -> tuple[tuple[PyTree, PyTree, Any], Any]:
    """Return the loss of a step without its unit, auxiliary results and records; and the unit."""
    result = run_step_function(options.step_fn, recorder, slices)
    loss, aux = result if options.has_aux else (result, None)
    check_loss(loss)
    mantissa, unit = saiunit.split_mantissa_unit(loss)
    if not options.unit_aware and unit != saiunit.UNITLESS:
        raise OptionError(
            f"`step_fn` returned a loss in {unit}. Divide it by its unit, or pass "
            "`unit_aware=True` to get gradients in that unit over the parameter's."
        )
    return (mantissa, aux, recorder.records), unit


def check_loss(loss: PyTree) -> None:
    """Refuse a loss of a step that is not a real floating-point number.

    Raises
    ------
    OptionError
        If it is not.
    """
    with contextlib.suppress(TypeError):
        aval = jax.typeof(saiunit.get_mantissa(loss) if is_quantity(loss) else loss)
        if aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating):
            return
    raise OptionError(
        "`step_fn` must return a scalar loss, a floating-point number; it returned "
        f"{shown(loss)}. With `has_aux=True` it returns a pair `(loss, aux)`."
    )


def with_units(gradients: PyTree, loss_unit: Any) -> PyTree:
    """Convert gradients in the containers of their parameters to their physical units."""

    def converted(leaf: PyTree) -> PyTree:
        mantissa, unit = saiunit.split_mantissa_unit(leaf)
        return with_unit(mantissa, loss_unit / unit)

    return jax.tree.map(converted, gradients, is_leaf=is_quantity)


def with_unit(mantissa: PyTree, unit: Any) -> PyTree:
    """Return a quantity, or a plain array if there is no unit."""
    return mantissa if unit == saiunit.UNITLESS else saiunit.Quantity(mantissa, unit=unit)
