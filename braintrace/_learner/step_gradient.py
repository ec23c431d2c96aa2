"""The value and gradient of one step of a stateful function, as a pure function."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._jax import is_var, jaxpr_as_fun
from .._jaxpr import program_of


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one differentiated step yields.

    Attributes
    ----------
    live
        Gradient leaves of the parameters that the step's loss depends on outside the traces.
    signal
        Derivative of the scaled loss with respect to the probes.
    written
        New values of the States that the step writes.
    loss, aux, records
        What the function returned; the loss is not scaled.
    """

    live: list[jax.Array]
    signal: Any
    written: list[Any]
    loss: jax.Array
    aux: Any
    records: Any


class StepGradient:
    """A stateful function of ``(probes, *inputs)``, differentiated and made pure.

    Parameters
    ----------
    function
        Returns ``(loss, aux, records)``; it may read and write brainstate States.
    parameters
        The States to differentiate with respect to.
    example
        Example arguments; the first one is the probes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[brainstate.State],
        example: tuple[Any, ...],
    ) -> None:
        self._function = brainstate.transform.StatefulFunction(
            function, static_argnums=(), return_only_write=True
        )
        self._function.make_jaxpr(*example)
        key = self._function.get_arg_cache_key(*example)
        states = self._function.get_states_by_cache(key)
        written = self._function.get_state_trace_by_cache(key).been_writen
        order = {id(state): index for index, state in enumerate(parameters)}
        # Index of the parameter behind each State of the step, or None.
        self._parameter_of = [order.get(id(state)) for state in states]
        self._is_written = [
            bool(w)
            for w, parameter in zip(written, self._parameter_of, strict=True)
            if parameter is None
        ]
        if any(w and p is not None for w, p in zip(written, self._parameter_of, strict=True)):
            raise OptionError(
                "`step_fn` writes a parameter. Parameters are fixed during a sequence gradient: "
                "update them with its result."
            )
        self.others = [
            state
            for state, parameter in zip(states, self._parameter_of, strict=True)
            if parameter is None
        ]
        self._trace([state.value for state in parameters], example)

    def _trace(self, parameters: list[Any], example: tuple[Any, ...]) -> None:
        others = [state.value for state in self.others]
        differentiate = jax.value_and_grad(self._scaled_loss, argnums=(0, 1), has_aux=True)

        def step(parameters: Any, probes: Any, others: Any, inputs: Any, scale: Any) -> Any:
            (_, results), (gradients, signal) = differentiate(
                parameters, probes, others, inputs, scale
            )
            return jax.tree.leaves(gradients), (signal, results)

        closed, shapes = jax.make_jaxpr(step, return_shape=True)(
            parameters, example[0], others, example[1:], jnp.ones(())
        )
        self._step = jaxpr_as_fun(closed)
        self._tree = jax.tree.structure(shapes)
        # The gradient of a parameter without a path to the loss outside the traces is a
        # constant zero: it depends on no input of the step, not even on the loss's scale.
        program = program_of(closed)
        inputs = set(program.in_vars)
        leaves = program.out_atoms[: len(shapes[0])]
        self._live = [is_var(a) and bool(program.depends_on([a]) & inputs) for a in leaves]

    def _scaled_loss(
        self, parameters: Any, probes: Any, others: Any, inputs: Any, scale: Any
    ) -> Any:
        rest = iter(others)
        values = [next(rest) if p is None else parameters[p] for p in self._parameter_of]
        new, (loss, aux, records) = self._function.jaxpr_call(values, probes, *inputs)
        kept = [value for value, p in zip(new, self._parameter_of, strict=True) if p is None]
        return loss * scale, (self.written_of(kept), loss, aux, records)

    def __call__(
        self, parameters: list[Any], others: list[Any], example: tuple[Any, ...], scale: Any
    ) -> StepResult:
        """Run one step on the values of parameters and other States."""
        flat = jax.tree.leaves((parameters, example[0], others, example[1:], scale))
        outputs = jax.tree.unflatten(self._tree, self._step(*flat))
        gradients, (signal, (written, loss, aux, records)) = outputs
        live = [g for g, is_live in zip(gradients, self._live, strict=True) if is_live]
        return StepResult(live, signal, written, loss, aux, records)

    def written_of(self, others: list[Any]) -> list[Any]:
        """Return those of the other States' values that a step writes."""
        return [value for value, w in zip(others, self._is_written, strict=True) if w]

    def merge(self, others: list[Any], written: list[Any]) -> list[Any]:
        """Return the other States' values with new ones for those that a step writes."""
        new = iter(written)
        return [
            next(new) if w else value for value, w in zip(others, self._is_written, strict=True)
        ]

    def write(self, written: list[Any]) -> None:
        """Write new values to the States."""
        for state, value in zip(self.written_of(self.others), written, strict=True):
            state.value = value

    def zero_gradients(self, parameters: list[Any]) -> list[jax.Array]:
        """Return zeros for the parameters that have a gradient outside the traces."""
        leaves = zip(jax.tree.leaves(parameters), self._live, strict=True)
        return [jnp.zeros_like(leaf) for leaf, is_live in leaves if is_live]

    def add(self, gradients: list[Any], live: list[jax.Array]) -> list[Any]:
        """Add the gradients outside the traces to the full list of gradients."""
        leaves, tree = jax.tree.flatten(gradients)
        rest = iter(live)
        total = [
            leaf + next(rest) if is_live else leaf
            for leaf, is_live in zip(leaves, self._live, strict=True)
        ]
        return jax.tree.unflatten(tree, total)
