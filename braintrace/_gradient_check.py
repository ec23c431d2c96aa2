"""Gradient check: an online gradient, and backpropagation through time without a learner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ._brainstate import StatefulTrace, trace_stateful
from ._checks import check_model, common_length, is_quantity
from ._errors import OptionError
from ._from_function import gradients_by_path
from ._jax import strongly_typed
from ._learner import Learner, compile
from ._learner.compile import initialise, mapped_size
from ._learner.options import of_numbers
from ._learner.user_step import check_loss
from ._model import fresh_values
from ._rules import Rule
from ._tables import Table, as_html, as_text
from ._typing import Path, PyTree, path_name

CALLS = (
    "`step_fn` called the model {} times; it has to call its first argument exactly once per step."
)


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
    (xs, ys), steps = checked(model, (xs, ys))
    inputs = xs if isinstance(xs, tuple) else (xs,)

    def step_fn(run: Callable[..., PyTree], step: PyTree) -> PyTree:
        return loss(run(*step[0]), step[1])

    first = jax.tree.map(lambda leaf: leaf[0], inputs)
    size, vmap = options.pop("batch_size", None), options.pop("vmap", False)
    task = Task(model, step_fn, (inputs, ys), None, first, size, vmap)
    learner, bptt = learner_of(task, algorithm, options), trace_bptt(task)
    found, exact = online(task, learner, bptt).run(), bptt.program(steps).run()
    return compared(type(learner).__name__, steps, found, exact)


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


def checked(model: Any, sequences: PyTree) -> tuple[PyTree, int]:
    """Check a model; return its sequences as arrays, and the number of steps."""
    check_model(model)
    arrays, leaves, _ = of_numbers(sequences)
    steps = common_length([leaf.shape for leaf in leaves], "sequence")
    return jax.tree.map(jnp.asarray, arrays), steps


@contextlib.contextmanager
def same_keys() -> Iterator[None]:
    """Restore the keys of ``brainstate.random`` at the end."""
    key = brainstate.random.DEFAULT.value
    try:
        yield
    finally:
        brainstate.random.DEFAULT.value = key


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model, the loss ``step_fn(model, x)`` of a step, and sequences.

    ``arguments`` are an example of the model's arguments; ``mask``, the weights of the losses.
    """

    model: brainstate.nn.Module
    step_fn: Callable[..., PyTree]
    xs: PyTree
    mask: np.ndarray | None
    arguments: tuple[PyTree, ...]
    batch_size: int | None
    vmap: bool

    @property
    def steps(self) -> int:
        return len(jax.tree.leaves(self.xs)[0])

    def cut(self, steps: int) -> Task:
        xs, mask = jax.tree.map(lambda leaf: leaf[:steps], (self.xs, self.mask))
        return dataclasses.replace(self, xs=xs, mask=mask)

    def loss(self, model: Callable[..., PyTree], x: PyTree) -> PyTree:
        value = self.step_fn(model, x)
        check_loss(value)
        return saiunit.get_mantissa(value)


class Program(NamedTuple):
    temp: int  # bytes of temporary memory
    run: Callable[[], Any]  # returns the gradients by path


def _compiled(function: Callable[..., PyTree], *arguments: PyTree) -> Program:
    program = jax.jit(function).lower(*arguments).compile()
    temp = int(program.memory_analysis().temp_size_in_bytes)
    return Program(temp, functools.partial(program, *arguments))


@dataclasses.dataclass(frozen=True, eq=False)
class Bptt:
    """Backpropagation through time: `jax.grad` through the model's own step, without a learner.

    Attributes
    ----------
    step
        The loss of one step, as a function of the values of States.
    paths
        The path of each of these States; ``None``: a State outside of the model.
    parameters, start
        Values of the parameters, and initial values of the other States, by path.
    states_of_sample
        Number of hidden states of a sample.
    """

    task: Task
    step: StatefulTrace
    paths: tuple[Path | None, ...]
    parameters: dict[Path, PyTree]
    start: dict[Path, PyTree]
    states_of_sample: int

    @property
    def outside(self) -> list[brainstate.State]:
        """States of the step outside of the model."""
        return [s for s, path in zip(self.step.states, self.paths, strict=True) if path is None]

    def program(self, steps: int, scan: Callable[..., PyTree] = jax.lax.scan) -> Program:
        """Compile the gradient of the first steps."""
        task, weights = self.task.cut(steps), np.ones(steps)
        if task.mask is not None:
            weights = task.mask
            # The steps after the last loss may be padding that is not finite.
            task = task.cut(int(np.max(np.flatnonzero(weights), initial=0)) + 1)
        shares = jnp.asarray(weights / (np.sum(weights) or 1))[: task.steps]
        start = [
            None if path in self.parameters else strongly_typed(state.value)
            for state, path in zip(self.step.states, self.paths, strict=True)
        ]

        def loss(parameters: PyTree, start: PyTree, xs: PyTree, weights: jax.Array) -> jax.Array:
            step = functools.partial(self._weighted_step, parameters)
            return jnp.sum(scan(step, start, (xs, weights))[1])

        return _compiled(jax.grad(loss), self.parameters, start, task.xs, shares)

    def _weighted_step(
        self, parameters: dict[Path | None, PyTree], states: list[PyTree], now: PyTree
    ) -> tuple[list[PyTree], jax.Array]:
        x, weight = now

        def run(states: list[PyTree]) -> tuple[list[PyTree], jax.Array]:
            pairs = zip(self.paths, states, strict=True)
            new, loss = self.step.call([parameters.get(path, old) for path, old in pairs], x)
            written = zip(states, new, self.step.is_written, self.paths, strict=True)
            return [n if w and p not in parameters else old for old, n, w, p in written], loss

        def masked(states: list[PyTree]) -> tuple[list[PyTree], jax.Array]:
            after, loss = run(states)
            return after, jnp.zeros_like(loss)  # its derivative may not be finite

        if self.task.mask is None:
            after, loss = run(states)
        else:
            after, loss = jax.lax.cond(weight == 0, masked, run, states)
        return after, weight * loss


@same_keys()
def trace_bptt(task: Task) -> Bptt:
    """Trace the loss of one step on a copy of the model."""
    model = brainstate.graph.clone(task.model)
    initialise(model, None if task.vmap else task.batch_size)
    size = mapped_size(task.arguments, task.batch_size) if task.vmap else None
    run, calls = model if size is None else _mapped(model, task.arguments, size), []

    def call(*arguments: PyTree) -> PyTree:
        calls.append(arguments)
        return run(*arguments)

    x = jax.tree.map(lambda leaf: leaf[0], task.xs)
    step = trace_stateful(lambda x: task.loss(call, x), x)
    if len(calls) != 1:
        raise OptionError(CALLS.format(len(calls)))
    for path, state in task.model.states().items():
        if any(state is used for used in step.states):
            raise OptionError(
                f"A copy of the model uses State '{path_name(path)}' of the original. `step_fn` "
                "has to call its first argument; an attribute that is a function must not refer to "
                "the model: write it as a method."
            )
    paths = {id(state): path for path, state in model.states().items()}
    values = {path: state.value for path, state in model.states().items()}
    parameters = {path: values.pop(path) for path in model.states(brainstate.ParamState)}
    hidden = [values[path] for path in model.states(brainstate.HiddenState)]
    count = sum(map(np.size, jax.tree.leaves(hidden))) // (size or task.batch_size or 1)
    own = tuple(paths.get(id(state)) for state in step.states)
    return Bptt(task, step, own, parameters, values, count)


def _mapped(
    model: brainstate.nn.Module, arguments: tuple[PyTree, ...], size: int
) -> Callable[..., PyTree]:
    """Map a model for one sample over the samples of a batch; every sample has its own key."""
    single = brainstate.graph.clone(model)
    step = trace_stateful(single.update, *jax.tree.map(lambda leaf: leaf[0], arguments))
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
        written = zip(held, new, are_keys, step.is_written, strict=True)
        for state, value, is_key, is_written in written:
            if is_written:
                state.value = value[0] if is_key else value
        return output

    return call


@same_keys()
def learner_of(
    task: Task, algorithm: str | type[Learner] | Rule, options: Mapping[str, Any]
) -> Learner:
    own = {"batch_size": task.batch_size, "vmap": task.vmap, **options}
    return compile(brainstate.graph.clone(task.model), algorithm, *task.arguments, **own)


def online(task: Task, learner: Learner, bptt: Bptt) -> Program:
    """Compile the gradient of a learner, from the states of `Bptt`."""
    states = learner.module.states()
    for path, value in bptt.start.items():
        states[path].value = value
    pure = learner.functional(**{"step_fn": bptt.outside} if bptt.outside else {})

    def gradient(state: PyTree, xs: PyTree) -> PyTree:
        # The new state is a result, as it is of every call of a learner.
        return pure.grad(state, xs, step_fn=lambda x: task.loss(learner, x), mask=task.mask)

    temp, run = _compiled(gradient, pure.state(), task.xs)
    return Program(temp, lambda: gradients_by_path(learner.module, run()[1]))
