"""Batched learner: copies with shared parameters, such as one for each environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._algorithms import ETraceAlgorithm
from ..._arguments import FUNCTION, POSITIVE, check_option, leaf_names, shown
from ..._errors import OptionError, ShapeError
from ..._function_model import FunctionModel
from ..._typing import PyTree
from .learner_state import LearnerState

OfStep: TypeAlias = Callable[..., tuple[Any, PyTree]]
"""``(step, *arguments) -> (value, results)`` of one copy; ``step(x)`` runs the model."""


class PureLearner(Protocol):
    """The functions of a `FunctionalLearner` that its copies need."""

    @property
    def algorithm(self) -> ETraceAlgorithm: ...
    def state(self) -> LearnerState: ...
    def reset(self, state: LearnerState, *, where: Any) -> LearnerState: ...
    def step(self, state: LearnerState, *arguments: PyTree) -> tuple[LearnerState, PyTree]: ...


class BatchedLearner:
    """Copies of a learner with shared parameters; created by `FunctionalLearner.batched`.

    Each copy has separate hidden states, traces and random keys: its *memory*. You write functions
    of one copy. `grad` and `run` make pure functions of all copies, which work under ``jax.jit``,
    ``lax.scan`` and ``jax.vmap`` (over seeds, for example). Arguments and results have the axis of
    the copies first; parameters do not.

    Parameters
    ----------
    pure
        The functions of one learner.
    size
        Number of copies.

    Examples
    --------
    The gradient of each of three predictions, of which the second starts an episode:

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 1)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones(2))
    >>> agents = learner.functional().batched(3)
    >>> def predict(step, x):
    ...     value = step(x)[0]
    ...     return value, {"value": value}
    >>> differentiate = jax.jit(agents.grad(predict))
    >>> parameters, memory = agents.parameters(), agents.memory()
    >>> xs, is_new = jnp.ones((3, 2)), jnp.array([False, True, False])
    >>> gradients, memory, results = differentiate(parameters, memory, xs, reset=is_new)
    >>> results["value"].shape, gradients[("u",)].shape
    ((3,), (3, 1))
    """

    def __init__(self, pure: PureLearner, size: int) -> None:
        check_option("size", size, POSITIVE, "`batched`: ")
        self._pure = pure
        self.size = size

    def parameters(self) -> PyTree:
        """Return the current parameters, which all copies share.

        Returns
        -------
        pytree
            By path; for a model of `from_function`, a pytree like its ``params``.
        """
        parameters, model = self._pure.state().parameters, self._pure.algorithm.model
        return model.as_params(parameters) if isinstance(model, FunctionModel) else parameters

    def memory(self) -> LearnerState:
        """Return the current state for each copy, without parameters and with separate keys."""
        state = dataclasses.replace(self._pure.state(), parameters={})
        same: LearnerState = jax.tree.map(lambda leaf: jnp.stack([leaf] * self.size), state)
        own = jax.tree.map(lambda data: _split(data, self.size), state.random)
        return dataclasses.replace(same, random=own)

    def grad(self, function: OfStep) -> Callable[..., tuple[PyTree, LearnerState, PyTree]]:
        """Return the function that computes the gradient of each copy.

        Parameters
        ----------
        function
            ``(step, *arguments) -> (value, results)`` of one copy. ``step(x)`` runs one step of the
            model, and ``value`` is the number that is differentiated, by the online gradient.

        Returns
        -------
        callable
            ``(parameters, memory, *arguments, reset=None) -> (gradients, memory, results)``. The
            gradients are separate for each copy, as `TDTrace.update` needs them. ``reset`` are
            booleans ``(size,)``: the copies that start a new sequence before this step. It raises
            `ShapeError` unless the first axis of each argument and of ``reset`` is ``size``.
        """
        of_one = jax.grad(self._of_one(function), has_aux=True)

        def gradients(
            parameters: PyTree, memory: LearnerState, *arguments: PyTree, reset: Any = None
        ) -> tuple[PyTree, LearnerState, PyTree]:
            result, (memory, results) = self._mapped(of_one, parameters, memory, reset, arguments)
            return result, memory, results

        return gradients

    def run(self, function: OfStep) -> Callable[..., tuple[LearnerState, PyTree]]:
        """Return the function that runs each copy without a gradient; see `grad`.

        Returns
        -------
        callable
            ``(parameters, memory, *arguments, reset=None) -> (memory, results)``.
        """
        of_one = self._of_one(function)

        def results(
            parameters: PyTree, memory: LearnerState, *arguments: PyTree, reset: Any = None
        ) -> tuple[LearnerState, PyTree]:
            _, (memory, result) = self._mapped(of_one, parameters, memory, reset, arguments)
            return memory, result

        return results

    def _of_one(self, function: OfStep) -> Callable[..., Any]:
        """Return a pure function of parameters, memory, the flag of a reset, and arguments."""
        check_option("function", function, FUNCTION, "`batched`: ")
        pure, model = self._pure, self._pure.algorithm.model

        def of_one(
            parameters: PyTree, memory: LearnerState, reset: ArrayLike | None, *arguments: PyTree
        ) -> tuple[Any, tuple[LearnerState, PyTree]]:
            if isinstance(model, FunctionModel):
                parameters = model.by_path(parameters)
            state = dataclasses.replace(memory, parameters=parameters)
            if reset is not None:
                state = pure.reset(state, where=reset)

            def step(*inputs: PyTree) -> PyTree:
                nonlocal state
                state, output = pure.step(state, *inputs)
                return output

            result = function(step, *arguments)
            if not (isinstance(result, tuple) and len(result) == 2):
                raise OptionError(
                    f"`function` of `batched` returned {shown(result)}; expected a pair "
                    "`(value, results)`."
                )
            value, results = result
            return value, (dataclasses.replace(state, parameters={}), results)

        return of_one

    def _mapped(
        self,
        of_one: Callable[..., Any],
        parameters: PyTree,
        memory: LearnerState,
        reset: ArrayLike | None,
        arguments: tuple[PyTree, ...],
    ) -> Any:
        names = ("reset", *(f"argument {i}" for i in range(len(arguments))))
        leaves = jax.tree.leaves(given := (reset, *arguments))
        for name, leaf in zip(leaf_names(names, given), leaves, strict=True):
            if jnp.shape(leaf)[:1] != (self.size,):
                raise ShapeError(
                    f"`batched`: `{name}` has shape {jnp.shape(leaf)}; expected {self.size} as "
                    "its first axis: one entry for each copy."
                )
        axes = (None, 0, None if reset is None else 0, *(0 for _ in arguments))
        return jax.vmap(of_one, in_axes=axes, axis_size=self.size)(
            parameters, memory, reset, *arguments
        )


def _split(data: jax.Array, size: int) -> jax.Array:
    """Return different random keys for each copy, as data."""
    keys = jax.random.wrap_key_data(data).reshape(-1)
    of_copy = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    new = jax.vmap(of_copy, in_axes=(None, 0))(keys, jnp.arange(size))
    return jax.random.key_data(new).reshape(size, *data.shape)
