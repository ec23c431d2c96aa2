"""Backpropagation through time: `jax.grad` through the model's own step, without a learner."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._brainstate import StatefulTrace, trace_stateful
from .._checks import is_quantity, named
from .._errors import OptionError, in_words
from .._jax import strongly_typed
from .._learner.build import initialise, mapped_size
from .._learner.calls.arguments import weights_of
from .._learner.methods.step_function import check_loss
from .._runtime.initial_values import fresh_values
from .._typing import Path, PyTree, path_name
from .workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Bptt:
    """Loss of a sequence as a pure function of the parameters.

    Attributes
    ----------
    work
        Model, data and loss.
    step
        The loss of one step, as a function of the values of all States.
    parameters, start
        Values of the model's parameters, and initial values of its other States, by path.
    paths
        Path of each State of the step; ``None``: a State outside of the model.
    states_of_sample
        Number of hidden states of a sample.
    """

    work: Workload
    step: StatefulTrace
    parameters: dict[Path, PyTree]
    start: dict[Path, PyTree]
    paths: tuple[Path | None, ...]
    states_of_sample: int

    @property
    def outside(self) -> list[brainstate.State]:
        """States of the step outside of the model."""
        return [s for s, path in zip(self.step.states, self.paths, strict=True) if path is None]

    def program(
        self, steps: int, is_checkpointed: bool = False
    ) -> tuple[int, Callable[[], dict[Path, PyTree]]]:
        """Compile the gradient of the first steps; return its temporary memory and a call.

        A checkpointed one stores the states before ``sqrt(steps)`` parts, and runs each part twice.
        """
        weights = np.ones(steps)
        if self.work.mask is not None:
            weights = np.asarray(weights_of(self.work.cut(steps).mask, steps))
            # The steps after the last loss may be padding that is not finite.
            steps = int(np.max(np.flatnonzero(weights), initial=0)) + 1
        total = np.sum(weights)
        others = [
            None if path in self.parameters else strongly_typed(state.value)
            for state, path in zip(self.step.states, self.paths, strict=True)
        ]
        shares = jnp.asarray(weights[:steps] / (total or 1))
        arguments = (self.parameters, others, self.work.cut(steps).xs, shares)
        scan = _scan_in_parts if is_checkpointed else jax.lax.scan
        loss = functools.partial(self._loss, scan)
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
        temp = int(compiled.memory_analysis().temp_size_in_bytes)
        return temp, functools.partial(compiled, *arguments)

    def _loss(
        self,
        scan: Callable[..., PyTree],
        parameters: dict[Path, PyTree],
        others: list[PyTree],
        xs: PyTree,
        weights: jax.Array,
    ) -> jax.Array:
        def run(states: list[PyTree], x: PyTree) -> tuple[list[PyTree], jax.Array]:
            values = [
                parameters.get(path or (), state)
                for path, state in zip(self.paths, states, strict=True)
            ]
            new, loss = self.step.call(values, x)
            written = zip(states, new, self.step.is_written, self.paths, strict=True)
            return [n if w and p not in parameters else old for old, n, w, p in written], loss

        def masked(states: list[PyTree], x: PyTree) -> tuple[list[PyTree], jax.Array]:
            after, loss = run(states, x)
            return after, jnp.zeros_like(loss)  # its derivative may not be finite

        def step(states: list[PyTree], now: tuple[PyTree, jax.Array]) -> PyTree:
            x, weight = now
            if self.work.mask is None:
                after, loss = run(states, x)
            else:
                after, loss = jax.lax.cond(weight == 0, masked, run, states, x)
            return after, weight * loss

        return jnp.sum(scan(step, others, (xs, weights))[1])


def _scan_in_parts(
    step: Callable[..., PyTree], start: PyTree, sequences: PyTree
) -> tuple[PyTree, jax.Array]:
    steps = jax.tree.leaves(sequences)[0].shape[0]
    length = math.isqrt(steps)
    count, rest = divmod(steps, length)

    part: Any = jax.checkpoint(functools.partial(jax.lax.scan, step))
    parts = jax.tree.map(
        lambda x: x[: count * length].reshape(count, length, *x.shape[1:]), sequences
    )
    states, losses = jax.lax.scan(part, start, parts)
    if not rest:
        return states, losses.ravel()
    states, more = part(states, jax.tree.map(lambda x: x[count * length :], sequences))
    return states, jnp.concatenate([losses.ravel(), more])


def bptt_of(work: Workload) -> Bptt:
    """Trace the loss of one step on a copy of the model.

    Raises
    ------
    OptionError
        If ``step_fn`` returns no scalar, does not call its first argument once, or fails; or if a
        copy of the model would use the States of the original.
    """
    model = brainstate.graph.clone(work.model)
    initialise(model, None if work.vmap else work.batch_size)
    run, calls = _mapped(model, work) if work.vmap else model, []

    def loss_of_step(x: PyTree) -> PyTree:
        def call(*arguments: PyTree) -> PyTree:
            calls.append(arguments)
            return run(*arguments)

        loss = work.step_fn(call, x)
        check_loss(loss)
        return saiunit.get_mantissa(loss) if is_quantity(loss) else loss

    x = work.first
    with in_words(lambda: f"`step_fn` fails for {named(['x'], [x])}"):
        step = trace_stateful(loss_of_step, x)
    if len(calls) != 1:
        raise OptionError(
            f"`step_fn` called the model {len(calls)} times; it has to call its first argument "
            "exactly once per step."
        )
    own = {id(state): tuple(path) for path, state in model.states().items()}
    _check_own(work.model, step)
    values = {path: state.value for path, state in model.states().items()}
    parameters = {tuple(path): values[path] for path in model.states(brainstate.ParamState)}
    samples = mapped_size(work.arguments, work.batch_size) if work.vmap else work.batch_size or 1
    of_hidden = [state.value for state in model.states(brainstate.HiddenState).values()]
    hidden = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(of_hidden))
    return Bptt(
        work=work,
        step=step,
        parameters=parameters,
        start={path: value for path, value in values.items() if path not in parameters},
        paths=tuple(own.get(id(state)) for state in step.states),
        states_of_sample=hidden // samples,
    )


def _check_own(model: brainstate.nn.Module, step: StatefulTrace) -> None:
    used = {id(state) for state in step.states}
    for path, state in model.states().items():
        if id(state) in used:
            raise OptionError(
                f"A copy of `{type(model).__name__}` uses State '{path_name(path)}' of the "
                "original: `step_fn` calls the original and not its first argument, or an "
                "attribute of the model is a function that refers to the model. Call the "
                "argument, and write such a function as a method of the class."
            )


def _mapped(model: brainstate.nn.Module, work: Workload) -> Callable[..., PyTree]:
    """Map a model for one sample over the samples of a batch; every sample has its own key."""
    size = mapped_size(work.arguments, work.batch_size)
    first = jax.tree.map(lambda leaf: leaf[0], work.arguments)
    single = brainstate.graph.clone(model)
    step = trace_stateful(single.update, *first)
    states = model.states()
    for path, value in fresh_values(model, True, size, {}).items():
        states[path].value = value
    own = {id(state): states[path] for path, state in single.states().items()}
    held = [own.get(id(state), state) for state in step.states]
    are_keys = [isinstance(state, brainstate.random.RandomState) for state in held]
    axes = [
        0 if is_key or isinstance(state, brainstate.ShortTermState) else None
        for state, is_key in zip(held, are_keys, strict=True)
    ]

    def call(*arguments: PyTree) -> PyTree:
        values = [
            jax.random.split(state.value, size) if is_key else state.value
            for state, is_key in zip(held, are_keys, strict=True)
        ]
        in_axes = (axes, *(0 for _ in arguments))
        new, output = jax.vmap(step.call, in_axes=in_axes)(values, *arguments)
        for state, value, is_key, is_written in zip(
            held, new, are_keys, step.is_written, strict=True
        ):
            if is_written:
                state.value = value[0] if is_key else value
        return output

    return call
