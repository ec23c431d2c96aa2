"""One task for all rules: gradients of a sequence by a rule, and by backpropagation through time.

Backpropagation through time is ``jax.grad`` of `FunctionalLearner.predict`, which runs the model
alone: no trace and no rule takes part in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import trace_stateful, undone
from ._checks import check_model, path_name
from ._errors import OptionError
from ._from_function import gradients_by_path
from ._learner.arguments import of_numbers, weights_of
from ._learner.compile import compile
from ._learner.full_rules import Immediate
from ._learner.learner import Learner
from ._learner.user_step import check_loss
from ._typing import PyTree


class Program(NamedTuple):
    temp: int  # bytes of temporary memory
    run: Callable[[], Any]  # returns the gradients by path


def _compiled(gradient: Callable[..., PyTree], *arguments: PyTree) -> Program:
    """Compile a function that returns a gradient and the rest of its results."""
    program = jax.jit(gradient).lower(*arguments).compile()
    temp = int(program.memory_analysis().temp_size_in_bytes)
    return Program(temp, lambda: program(*arguments)[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model, the loss ``step_fn(model, x)`` of a step, and sequences.

    Attributes
    ----------
    model, step_fn, xs
        As for `compare_rules`; ``xs`` are arrays.
    mask
        Weights of the losses; ``None``: all are one.
    arguments, options
        Example arguments of the model, and ``batch_size`` and ``vmap``.
    reference
        A learner without traces, which runs backpropagation and has the initial states.
    """

    model: brainstate.nn.Module
    step_fn: Callable[..., PyTree]
    xs: PyTree
    mask: np.ndarray | None
    arguments: tuple[PyTree, ...]
    options: Mapping[str, Any]
    reference: Any = None

    @classmethod
    def of(
        cls, model: Any, step_fn: Callable[..., PyTree], xs: PyTree, mask: Any, options: Any
    ) -> Task:
        """Check the arguments of a user."""
        check_model(model)
        arrays, steps, _ = of_numbers(xs)
        xs = jax.tree.map(jnp.asarray, arrays)
        weights = None if mask is None else np.asarray(weights_of(mask, steps))
        example = _arguments(step_fn, jax.tree.map(lambda leaf: leaf[0], xs))
        return cls(model, step_fn, xs, weights, example, options)

    @property
    def steps(self) -> int:
        return len(jax.tree.leaves(self.xs)[0])

    @property
    def states_of_sample(self) -> int:
        graph = self.reference.graph
        sizes = (math.prod(leaf.shape) for leaf in graph.traced.leaves if leaf.kind == "hidden")
        return int(sum(sizes)) // (graph.batch.samples or 1)

    def with_reference(self, options: Mapping[str, Any]) -> Task:
        return dataclasses.replace(self, reference=self.learner(Immediate, options))

    def cut(self, steps: int) -> Task:
        xs, mask = jax.tree.map(lambda leaf: leaf[:steps], (self.xs, self.mask))
        return dataclasses.replace(self, xs=xs, mask=mask)

    def loss(self, model: Callable[..., PyTree], x: PyTree) -> PyTree:
        return check_loss(self.step_fn(model, x))

    def learner(self, algorithm: Any, options: Mapping[str, Any]) -> Learner:
        """Compile a copy of the model; all copies have the same initial states."""
        key = brainstate.random.DEFAULT.value
        try:
            copy = brainstate.graph.clone(self.model)
            learner = compile(copy, algorithm, *self.arguments, **self.options, **options)
        finally:
            brainstate.random.DEFAULT.value = key
        return learner

    def pure(self, learner: Learner) -> Any:
        """Return the functions of a learner; its state includes the own States of ``step_fn``."""
        traced = learner.graph.traced
        outputs = [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in traced.output_atoms]
        output = jax.tree.unflatten(traced.output_tree, outputs)
        x = jax.tree.map(lambda leaf: leaf[0], self.xs)
        own = trace_stateful(lambda x: self.loss(lambda *_: output, x), x).states
        for path, state in self.model.states().items():
            if any(state is used for used in own):
                raise OptionError(
                    f"`step_fn` uses State '{path_name(path)}' of the model itself, and copies of "
                    "the model run: it has to call its first argument, and an attribute that is a "
                    "function must not refer to the model: write it as a method."
                )
        return learner.functional(**{"step_fn": list(own)} if own else {})

    def online(self, learner: Learner) -> Program:
        """Compile the gradient of a learner."""
        pure = self.pure(learner)

        def gradient(state: PyTree, xs: PyTree) -> PyTree:
            # The new state is a result, as it is of every call of a learner.
            options = {"step_fn": lambda x: self.loss(learner, x), "mask": self.mask}
            return pure.grad(state, xs, **options)[::-1]

        program = _compiled(gradient, pure.state(), self.xs)
        return program._replace(run=lambda: gradients_by_path(learner.module, program.run()))

    def exact(self, in_parts: bool = False) -> Program:
        """Compile the gradient by backpropagation through time."""
        learner, task, weights = self.reference, self, np.ones(self.steps)
        if self.mask is not None:
            weights = self.mask
            # The steps after the last loss may be padding that is not finite.
            task = self.cut(int(np.max(np.flatnonzero(weights), initial=0)) + 1)
        shares = jnp.asarray(weights / (np.sum(weights) or 1))[: task.steps]
        pure = self.pure(learner)
        start = pure.state()

        def losses(parameters: PyTree, state: PyTree, xs: PyTree) -> tuple[PyTree, jax.Array]:
            state = dataclasses.replace(state, parameters=parameters)
            after, values = pure.predict(state, xs, step_fn=lambda x: self.loss(learner, x))
            return dataclasses.replace(after, parameters={}), values

        def total(parameters: PyTree, state: PyTree, xs: PyTree, shares: jax.Array) -> PyTree:
            run = functools.partial(losses, parameters)
            values = _in_parts(run, state, xs) if in_parts else run(state, xs)[1]
            return jnp.sum(shares * values), values

        rest = dataclasses.replace(start, parameters={})
        xs = task.xs if self.mask is None else _without_gaps(task.xs, shares)
        gradient = jax.grad(total, has_aux=True)
        return _compiled(gradient, start.parameters, rest, xs, shares)


def _in_parts(run: Callable[..., PyTree], state: PyTree, xs: PyTree) -> jax.Array:
    """Run a sequence in parts; of each, backpropagation stores the states at its start."""
    steps = len(jax.tree.leaves(xs)[0])
    length = math.isqrt(steps)
    whole = steps - steps % length
    part: Any = jax.checkpoint(run)
    parts = jax.tree.map(lambda x: x[:whole].reshape(-1, length, *x.shape[1:]), xs)
    state, losses = jax.lax.scan(part, state, parts)
    if whole == steps:
        return losses.ravel()
    rest = jax.tree.map(lambda x: x[whole:], xs)
    return jnp.concatenate([losses.ravel(), part(state, rest)[1]])


def _without_gaps(xs: PyTree, shares: jax.Array) -> PyTree:
    """Replace what is not finite in steps whose loss does not count: its derivative is not."""

    def filled(leaf: jax.Array) -> jax.Array:
        counts = jnp.expand_dims(shares != 0, tuple(range(1, leaf.ndim)))
        return jnp.where(counts | jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(filled, xs)


class _Called(BaseException):
    """Ends a ``step_fn`` at its call of the model, with the arguments."""


def _arguments(step_fn: Callable[..., PyTree], x: PyTree) -> tuple[PyTree, ...]:
    """Return the arguments with which ``step_fn`` calls the model."""

    def call(*arguments: PyTree) -> PyTree:
        raise _Called(*arguments)

    try:
        with undone():
            step_fn(call, x)
    except _Called as found:
        return found.args
    raise OptionError(
        "`step_fn` called the model 0 times; it has to call its first argument exactly once per "
        "step."
    )
