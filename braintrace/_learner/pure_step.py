"""A stateful function of one step as a pure function of State values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import trace_stateful
from .._checks import shown
from .._compiler import state_paths
from .._errors import OptionError, ShapeError
from .._jax import calls_back, every_equation
from .._typing import PyTree, path_name

FEW = 1_000
"""Maximum number of scalars that are always written, instead of entering a loop."""


class PureStep:
    """A function that reads and writes brainstate States, in pure form.

    Parameters
    ----------
    model
        The model, for the names of its States.
    function
        The function.
    parameters
        States whose values are arguments of every call, and that the function must not write.
    example
        Example arguments.

    Raises
    ------
    OptionError
        If the function writes a parameter.
    ShapeError
        If it changes the pytree structure of a State.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        function: Callable[..., Any],
        parameters: Sequence[brainstate.State],
        example: tuple[Any, ...],
    ) -> None:
        def refuse(state: brainstate.State, old: PyTree, new: PyTree) -> ShapeError:
            return changed_structure(model, state, old, new)

        traced = trace_stateful(function, *example, refuse=refuse)
        self._call, self._jaxpr = traced.call, traced.jaxpr
        order = {id(state): index for index, state in enumerate(parameters)}
        # Index of the parameter of each State of the step; None for other States.
        self._parameter_of = [order.get(id(state)) for state in traced.states]
        pairs = list(zip(traced.states, traced.is_written, self._parameter_of, strict=True))
        if any(is_written and parameter is not None for _, is_written, parameter in pairs):
            raise OptionError(
                "`step_fn` writes a parameter. Parameters are fixed during a sequence gradient: "
                "update them with its result."
            )
        self.others = [state for state, _, parameter in pairs if parameter is None]
        self._is_written = [w for _, w, parameter in pairs if parameter is None]

    @functools.cached_property
    def always_ends(self) -> bool:
        """Whether it calls no Python and has no loop whose length depends on values."""
        names = (e.primitive.name for e in every_equation(self._jaxpr))
        return not calls_back(self._jaxpr) and "while" not in names

    def check_unused(self, traces: brainstate.State) -> None:
        """Refuse a function that reads or writes the State of the traces.

        Raises
        ------
        OptionError
            If it does.
        """
        if any(state is traces for state in self.others):
            raise OptionError(
                "`step_fn` or `update_fn` reads or writes the State of the traces, which "
                "is not available during a call. `update_fn` can read the traces after the step "
                "as `learner.traces.value`; to start a new sequence, use `reset`."
            )

    def __call__(
        self, parameters: Sequence[Any], others: Sequence[Any], *arguments: Any
    ) -> tuple[list[Any], Any]:
        """Return the new values of the States that are written, and the function's result."""
        rest = iter(others)
        values = [next(rest) if p is None else parameters[p] for p in self._parameter_of]
        new, result = self._call(values, *arguments)
        others = [value for value, p in zip(new, self._parameter_of, strict=True) if p is None]
        return self.written_of(others), result

    def written_of(self, others: Sequence[Any]) -> list[Any]:
        """Select the written ones from the other States' values."""
        return [value for value, w in zip(others, self._is_written, strict=True) if w]

    def merge(self, others: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Return the other States' values with new values of the written ones."""
        new = iter(written)
        return [
            next(new) if w else value for value, w in zip(others, self._is_written, strict=True)
        ]


def run_if(
    flag: jax.Array,
    model: brainstate.nn.Module,
    function: Callable[..., Any],
    carry: Any,
    *reads: Any,
) -> Any:
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
    model
        The model, for the names of its States.
    function
        ``(carry, *reads) -> carry``.
    carry
        A pytree of arrays.
    *reads
        Pytrees of arrays, which are computed before the loop.
    """
    step = PureStep(model, function, (), (carry, *reads))
    others = [state.value for state in step.others]
    start = (step.written_of(others), carry)
    is_small = sum(leaf.size for leaf in jax.tree.leaves(start)) < FEW

    def once(index: jax.Array, now: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        # XLA computes what does not depend on the index before the loop, whether it runs or not.
        _, values = jax.lax.optimization_barrier((index, reads))
        written, result = step((), step.merge(others, now[0]), now[1], *values)
        return written, result

    def selected(flag: jax.Array) -> Any:
        return jax.tree.map(functools.partial(jnp.where, flag), once(0, start), start)

    def in_place(flag: jax.Array) -> Any:
        return jax.lax.fori_loop(0, flag.astype(jnp.int32), once, start)

    if carry is not None or not step.always_ends:
        written, carry = in_place(flag)
    elif is_small:
        written, carry = selected(flag)
    else:
        written, carry = jax.lax.platform_dependent(flag, cpu=in_place, default=selected)
    for state, value in zip(step.written_of(step.others), written, strict=True):
        state.value = value
    return carry


def changed_structure(
    model: brainstate.nn.Module, state: brainstate.State, old: PyTree, new: PyTree
) -> ShapeError:
    """Return the error for a State whose pytree structure changes."""
    name = path_name(state_paths(model).get(id(state), (type(state).__name__,)))
    return ShapeError(
        f"A step changes State '{name}' from {shown(old)} to {shown(new)}: its pytree structure "
        f"was {jax.tree.structure(old)}, and is {jax.tree.structure(new)}. All States keep their "
        "values from before the call. In `step_fn`, `update_fn` and the optimizer, write a value "
        "of the same structure (and unit) as the State has, with all its entries."
    )
