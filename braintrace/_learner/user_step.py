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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._brainstate import trace_stateful, values_of
from .._checks import in_words, named, parameter_names, path_name, shown
from .._core.gradient import Inputs, operands
from .._core.sites import Probes, pre_step_probe
from .._core.traces import examples
from .._errors import OptionError
from .._graph.graph import specs_of
from .._graph.method import Weights
from .._graph.report import Diagnostic
from .._jax import calls_back, every_equation, trace_state
from .._model import add_to_states, leaves_by_var, whole_values, write_by_path
from .._typing import Path, PyTree
from .arguments import read_arguments, unwrap
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
        def run(*arguments: Any) -> Any:
            for state in parameters:
                state.value  # noqa: B018 - States are in the order of their first read
            return function(*arguments)

        traced = trace_stateful(run, *example)
        self._call, self.jaxpr = traced.call, traced.jaxpr
        self.states, self.is_written = list(traced.states), list(traced.is_written)

    def __call__(self, values: Sequence[Any], *arguments: Any) -> tuple[list[Any], Any]:
        """Return the new values of the States that are written, and the function's result."""
        new, result = self._call(list(values), *arguments)
        return self.written_of(new), result

    def written_of(self, items: Sequence[Any]) -> list[Any]:
        """Select those of written States from one item per State."""
        return list(itertools.compress(items, self.is_written))

    def merge(self, values: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Return the values of the States with new values of the written ones."""
        new, pairs = iter(written), zip(values, self.is_written, strict=True)
        return [next(new) if is_written else value for value, is_written in pairs]


def run_if(flag: jax.Array, function: Callable[..., Any], carry: Any, *reads: Any) -> Any:
    """Run a function that writes States, or leave them and a carry as they are.

    It is a loop of at most one step, which writes its buffers in place; XLA copies the values of a
    branch. If it is mapped and no flag is true, it runs nothing; a branch would run both sides. A
    function without carry on an accelerator runs always, and its results are selected: there, the
    host waits for the flag of a loop, and a step of a stream without this wait takes 0.66 to 0.89
    of the time (H100, 2026-11-27, nine streams). A carry of traces is not selected: its readers
    repeat the step of the traces, which takes 2 to 10 times the time (H100).

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

    def once(index: jax.Array, now: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        # XLA computes what does not depend on the index before the loop, whether it runs or not.
        _, values = jax.lax.optimization_barrier((index, reads))
        return step(step.merge(before, now[0]), now[1], *values)

    def selected(flag: jax.Array) -> Any:
        return jax.tree.map(functools.partial(jnp.where, flag), once(0, start), start)

    def in_place(flag: jax.Array) -> Any:
        return jax.lax.fori_loop(0, flag.astype(jnp.int32), once, start)

    loops = "while" in {equation.primitive.name for equation in every_equation(step.jaxpr)}
    if carry is not None or loops or calls_back(step.jaxpr):  # it may not end, or calls Python
        written, carry = in_place(flag)
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


def first_written(states: Mapping[Path, brainstate.State]) -> Callable[[], Path | None]:
    """Return a function that returns the first of some States that has a new value."""
    before = {path: jax.tree.leaves(state.value) for path, state in states.items()}

    def is_new(path: Path) -> bool:
        pairs = zip(before[path], jax.tree.leaves(states[path].value), strict=True)
        return any(leaf is not then for then, leaf in pairs)

    return lambda: next(filter(is_new, before), None)


def traced_states(learner: BaseLearner) -> dict[Path, brainstate.State]:
    """Return the hidden States that traces follow."""
    paths = {state.path for state in learner.graph.traced_states}
    return {path: s for path, s in learner.states_of_step.items() if path in paths}


class Recorder:
    """Replacement of the learner during one call of the step function.

    Parameters
    ----------
    learner, run
        The learner, and the function of the step: ``inputs -> (outputs, new states, records)``.
    past
        Perturbations of the states before the step, which ``step_fn`` reads before it calls the
        learner; ``None``: these states are constants.
    """

    def __init__(
        self, learner: BaseLearner, run: Callable[[Inputs], Any], past: Probes | None = None
    ) -> None:
        self.learner, self._run = learner, run
        self.calls, self.records, self._trace = 0, None, trace_state()
        self._old: Inputs = {}
        if past is not None:
            graph, states = learner.graph, learner.states_of_step
            now, followed = values_of(states.values()), graph.traced_states
            inputs = leaves_by_var(graph, states, now)
            self._old = {leaf.in_var: inputs[leaf.in_var] for leaf in followed}
            terms = {leaf.name: past[pre_step_probe(leaf)] for leaf in followed}
            seen = dict(zip(states, add_to_states(graph, [*states], now, terms), strict=True))
            write_by_path(states, {path: seen[path] for path in traced_states(learner)})
        self._observe()

    def _observe(self) -> None:
        states, held = self.learner.states_of_step, self.learner.graph.held_paths
        fixed = {path: states[path] for path in itertools.chain(*held.values())}
        watched = {**self.learner.param_states, **fixed, **traced_states(self.learner)}
        self._first_written = first_written(watched)

    def __call__(self, *arguments: Any) -> Any:
        """Run one step, which reads and writes the model's States."""
        if trace_state() != self._trace:
            raise OptionError(
                "`step_fn` calls the learner inside a compiled function, branch or loop. Call it "
                "directly: the whole step is compiled."
            )
        self.check_states()
        graph, states = self.learner.graph, self.learner.states_of_step
        inputs = {**leaves_by_var(graph, states, values_of(states.values())), **self._old}
        inputs |= read_arguments(graph, unwrap(arguments))
        outputs, new_states, self.records = self._run(inputs)
        write_by_path(states, whole_values(graph, new_states))
        self._observe()
        self.calls += 1
        return jax.tree.unflatten(graph.traced.output_tree, outputs)

    def run(self, step_fn: Callable[..., PyTree] | None, slices: tuple[PyTree, ...]) -> PyTree:
        """Return the result of a step function, which calls the learner exactly once.

        Raises
        ------
        OptionError
            If it does not, or writes a hidden state.
        """
        token = INTERCEPTORS.set({**INTERCEPTORS.get(), id(self.learner): self})
        try:
            result = self(*slices) if step_fn is None else call_user("step_fn", step_fn, *slices)
        finally:
            INTERCEPTORS.reset(token)
        if self.calls != 1:
            raise OptionError(
                f"`step_fn` called the learner {self.calls} times; it must call it exactly once "
                "per step, and not inside another compiled function."
            )
        self.check_states()
        return result

    def check_states(self) -> None:
        """Refuse new values of parameters, and of hidden states that the step has not written."""
        path = self._first_written()
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the State '{path_name(path)}'. Write a parameter, and a State "
                "that a weight is computed from, between the calls or in `update_fn`, and a hidden "
                "state in `update` of the model; to start a new sequence, use `reset`."
            )


def untraced_reads(learner: BaseLearner, probes: Collection[str]) -> list[Diagnostic]:
    """Return a warning for each state that is read before the call and that has no trace.

    ``probes`` are the perturbations that reach the loss.
    """
    graph, step = learner.graph, learner.compiled
    states = (leaf for leaf in graph.traced_states if leaf not in graph.read_late)
    early = [leaf.name for leaf in states if pre_step_probe(leaf) in probes]
    if not early:
        return []
    specs = step.method.trace_specs(graph, True), step.trace_specs
    every, kept = ({(spec.relation, spec.state) for spec in specs_of(each)} for each in specs)
    without_trace = {state for _, state in every - kept}
    message = (
        "`step_fn` reads State '{}' before it calls the learner. It has no trace, since no later "
        "step of the model reads it, and is a constant here, but not with a `window`."
    )
    lost = [name for name in early if name in without_trace]
    return [Diagnostic("warning", "untraced-state", message.format(n), (n,)) for n in lost]


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
    slices = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], sequences))
    return examples(slices)


# --- losses


def check_loss(loss: PyTree) -> jax.Array:
    """Return the loss of a step, if it is a real floating-point number without a unit.

    Raises
    ------
    OptionError
        If it is not.
    """
    with contextlib.suppress(TypeError):
        mantissa, unit = saiunit.split_mantissa_unit(loss)
        aval = jax.typeof(mantissa)
        if unit != saiunit.UNITLESS:
            raise OptionError(f"`step_fn` returned a loss in {unit}. Divide it by its unit.")
        if aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating):
            return mantissa
    raise OptionError(
        "`step_fn` must return a scalar loss, a floating-point number; it returned "
        f"{shown(loss)}. With `has_aux=True` it returns a pair `(loss, aux)`."
    )
