"""Gradient check: an online gradient, and backpropagation through time.

Backpropagation through time is ``jax.grad`` of `FunctionalLearner.predict`, which runs the model
alone: no trace and no rule takes part in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ._brainstate import trace_stateful, undone
from ._checks import check_model, common_length, is_quantity
from ._errors import OptionError
from ._from_function import gradients_by_path
from ._graph.graph import ETraceGraph
from ._learner.arguments import of_numbers, weights_of
from ._learner.compile import compile
from ._learner.full_rules import Immediate
from ._learner.learner import Learner
from ._learner.user_step import check_loss
from ._rules import Rule
from ._tables import Table, as_html, as_text
from ._typing import Path, PyTree, path_name


class Result:
    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Table | str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the result as dicts, tuples, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """Comparison for one parameter; see `GradientCheck`."""

    parameter: str
    deviation: float
    cosine: float
    norm: float
    bptt_norm: float


@dataclasses.dataclass(frozen=True)
class GradientCheck(Result):
    """Result of `gradient_check`; ``print`` shows a table.

    Attributes
    ----------
    algorithm, steps
        The algorithm, and the number of steps.
    rows
        One per parameter, and the last one for ``'all parameters'``: ``parameter`` (its printed
        path), ``deviation`` (norm of the difference of the two gradients, relative to the norm by
        BPTT), ``cosine`` of the angle between them, and their norms ``norm`` and ``bptt_norm``.
    """

    algorithm: str
    steps: int
    rows: tuple[GradientRow, ...]

    def _parts(self) -> Iterator[Table | str]:
        title = f"{self.algorithm} against backpropagation through time over {self.steps} steps"
        heads = ["parameter", "relative deviation", "cosine", "norm", "norm by BPTT"]
        cells = [
            (
                r.parameter,
                *f"{r.deviation:.2e} {r.cosine:.6f} {r.norm:.3e} {r.bptt_norm:.3e}".split(),
            )
            for r in self.rows
        ]
        yield Table(title, heads, cells, numbers=range(1, 5))


def gradient_check(
    model: brainstate.nn.Module,
    algorithm: str | type[Learner] | Rule,
    xs: Any,
    ys: Any,
    loss: Callable[[Any, Any], Any],
    **options: Any,
) -> GradientCheck:
    """Compare the gradients of an algorithm with backpropagation through time.

    Both gradients are of the mean over time of ``loss(output, y)``, from the initial states of the
    model's ``init_state``. Backpropagation stores every step: choose a sequence that fits into
    memory and is longer than the time constants of the model. Over a single step, all algorithms
    agree. `compare_rules` compares several rules and windows, with their costs.

    Parameters
    ----------
    model
        Copies of it run: it does not change, nor do the keys of ``brainstate.random``.
    algorithm
        As for `braintrace.compile`.
    xs, ys
        Inputs of ``update`` and targets, time first; a tuple of inputs has one for each argument.
    loss
        ``(output, y) -> scalar`` of one step.
    **options
        Options of `braintrace.compile`: ``batch_size``, ``vmap`` and the options of the algorithm.

    Raises
    ------
    OptionError
        If the gradients by backpropagation are all zero.
    ShapeError, CompilationError, DtypeError
        For sequences of different lengths, and see `compile_etrace_graph`.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 3, activation="tanh")
    >>> xs, ys = jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 3))
    >>> squared = lambda output, y: ((output - y) ** 2).mean()
    >>> check = braintrace.gradient_check(model, "d_rtrl", xs, ys, squared, batch_size=1)
    >>> check.rows[-1].parameter, check.rows[-1].deviation < 1e-6
    ('all parameters', True)
    """
    inputs = xs if isinstance(xs, tuple) else (xs,)

    def step_fn(run: Callable[..., PyTree], step: PyTree) -> PyTree:
        return loss(run(*step[0]), step[1])

    own = {name: options.pop(name) for name in ("batch_size", "vmap") if name in options}
    task = Task.of(model, step_fn, (inputs, ys), None, own)
    exact, learner = task.with_reference({}).exact(), task.learner(algorithm, options)
    found = task.online(learner).run()
    return compared(type(learner).__name__, task.steps, found, exact.run())


# --- one task for all rules


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
        arrays, leaves, _ = of_numbers(xs)
        steps = common_length([leaf.shape for leaf in leaves], "sequence")
        xs = jax.tree.map(jnp.asarray, arrays)
        weights = None if mask is None else np.asarray(weights_of(mask, steps))
        example = _arguments(step_fn, jax.tree.map(lambda leaf: leaf[0], xs))
        return cls(model, step_fn, xs, weights, example, options)

    @property
    def steps(self) -> int:
        return len(jax.tree.leaves(self.xs)[0])

    @property
    def states_of_sample(self) -> int:
        graph: ETraceGraph = self.reference.graph
        sizes = (math.prod(leaf.shape) for leaf in graph.traced.leaves if leaf.kind == "hidden")
        return sum(sizes) // (graph.batch.samples or 1)

    def with_reference(self, options: Mapping[str, Any]) -> Task:
        return dataclasses.replace(self, reference=self.learner(Immediate, options))

    def cut(self, steps: int) -> Task:
        xs, mask = jax.tree.map(lambda leaf: leaf[:steps], (self.xs, self.mask))
        return dataclasses.replace(self, xs=xs, mask=mask)

    def loss(self, model: Callable[..., PyTree], x: PyTree) -> PyTree:
        value = self.step_fn(model, x)
        check_loss(value)
        return saiunit.get_mantissa(value)

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


# --- numbers


def compared(
    rule: str, steps: int, online: Mapping[Path, PyTree], exact: Mapping[Path, PyTree]
) -> GradientCheck:
    vectors = {path_name(path): (_flat(online[path]), _flat(exact[path])) for path in exact}
    both = [np.concatenate(own) for own in zip(*vectors.values(), strict=True)]
    if not np.any(both[1]):
        raise OptionError(
            f"The gradients by backpropagation over {steps} steps are all zero, so there is "
            "nothing to compare. Check that the loss depends on the output, and that neurons "
            "spike; or use a longer sequence."
        )
    rows = [_row(name, *own) for name, own in [*vectors.items(), ("all parameters", both)]]
    return GradientCheck(rule, steps, tuple(rows))


def _flat(gradient: PyTree) -> np.ndarray:
    leaves = jax.tree.leaves(gradient, is_leaf=is_quantity)
    return np.concatenate([np.ravel(saiunit.get_mantissa(leaf)) for leaf in leaves]).astype(complex)


def _row(name: str, online: np.ndarray, exact: np.ndarray) -> GradientRow:
    norm, bptt_norm, difference = map(np.linalg.norm, (online, exact, online - exact))
    with np.errstate(divide="ignore", invalid="ignore"):  # a zero gradient has no direction
        cosine = np.vdot(online, exact).real / (norm * bptt_norm)
        deviation = difference / bptt_norm if difference else 0.0
    return GradientRow(name, *map(float, (deviation, cosine, norm, bptt_norm)))
