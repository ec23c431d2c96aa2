"""Comparison of learning rules with backpropagation through time, on a model and its data.

Backpropagation through time is ``jax.grad`` of `FunctionalLearner.predict`, which runs the model
alone: no trace and no rule takes part in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.typing import ArrayLike

from ._brainstate import trace_stateful, undone
from ._checks import check_model, common_length, is_quantity
from ._errors import BraintraceError, MissingPackageError, OptionError, optional_import
from ._from_function import gradients_by_path
from ._graph import ETraceGraph
from ._learner import Immediate, Learner, compile
from ._learner.chunks import default_budget
from ._learner.names import algorithm_of, rule_and_options
from ._learner.options import of_numbers, weights_of
from ._learner.user_step import check_loss
from ._rules import Rule
from ._tables import Table, as_html, as_text, in_bytes
from ._typing import Path, PyTree, path_name

RULES = ("d_rtrl", "es_d_rtrl", "immediate")
SMALL = 100
"""Maximum number of states per sample for which `RTRL` is compared by default."""


class _Result:
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
class GradientCheck(_Result):
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


@dataclasses.dataclass(frozen=True)
class ComparedRule(_Result):
    """One row of a comparison: a rule with a window.

    Attributes
    ----------
    rule, window
        Name of the rule, and the number of steps that are differentiated in full.
    gradient
        Its gradient compared with backpropagation through time, for every parameter; ``None`` for a
        refused rule.
    seconds
        Median time of a gradient of the sequence, divided by the number of steps.
    temp, traces
        Bytes of temporary memory of the compiled program, and of the traces.
    refused
        Reason why the rule was not run; ``None`` if it was run.
    cosine, deviation
        Cosine to the gradient by backpropagation through time, and norm of the difference relative
        to its norm, of all parameters together.
    """

    rule: str
    window: int | None = None
    gradient: GradientCheck | None = None
    seconds: float = math.nan
    temp: int = 0
    traces: int = 0
    refused: str | None = None
    cosine: float = math.nan
    deviation: float = math.nan

    def _parts(self) -> Iterator[Table | str]:
        yield _table("Gradient compared with backpropagation through time", [self])


@dataclasses.dataclass(frozen=True)
class RuleComparison(_Result):
    """Result of `compare_rules`; ``print`` shows a table.

    Attributes
    ----------
    steps, length
        Number of compared steps, and of steps of the given sequence.
    memory_budget
        Limit in bytes for backpropagation and for each rule.
    bptt
        Backpropagation through time, without a learner.
    checkpointed
        The same with the memory of about ``sqrt(steps)`` steps, each of which runs twice.
    rows
        One row per rule and window, in the order of the call.
    """

    steps: int
    length: int
    memory_budget: int
    bptt: ComparedRule
    checkpointed: ComparedRule
    rows: tuple[ComparedRule, ...]

    def plot(self, ax: Any = None) -> Any:
        """Draw cosine over memory (temporary memory and traces) with Matplotlib; return the axes.

        Each rule is a line, and each of its windows is a point. ``ax=None`` makes new axes.
        """
        pyplot = optional_import("matplotlib.pyplot", "examples")
        if ax is None:
            _, ax = pyplot.subplots(layout="constrained")
        rows = [r for r in (self.bptt, self.checkpointed, *self.rows) if r.refused is None]
        for rule in dict.fromkeys(row.rule for row in rows):
            own = sorted(
                (r.temp + r.traces, r.cosine, str(r.window or "")) for r in rows if r.rule == rule
            )
            ax.plot([p[0] for p in own], [p[1] for p in own], marker="o", label=rule)
            for memory, cosine, window in own:
                ax.annotate(window, (memory, cosine), xytext=(4, 4), textcoords="offset points")
        ax.set(xlabel="temporary memory and traces in bytes", ylabel="cosine to BPTT", xscale="log")
        ax.legend()
        return ax

    def _parts(self) -> Iterator[Table | str]:
        title = f"Gradients over {self.steps:,} steps, compared with backpropagation through time"
        yield _table(title, [self.bptt, self.checkpointed, *self.rows])
        if self.steps < self.length:
            yield (
                f"The sequence of {self.length:,} steps is shortened to its first {self.steps:,}: "
                "backpropagation over more of them needs more than `memory_budget`, "
                f"{in_bytes(self.memory_budget)}."
            )
        own = {f"#{n}": r.gradient.rows for n, r in enumerate(self.rows, 2) if r.gradient}
        cells = [
            [rows[0].parameter, *(f"{row.cosine:.3f}" for row in rows)]
            for rows in zip(*own.values(), strict=True)
        ]
        if cells:
            yield Table(
                "Cosine of each parameter", ["parameter", *own], cells[:-1], range(1, len(own) + 1)
            )
        for rule, reason in dict.fromkeys((r.rule, r.refused) for r in self.rows if r.refused):
            yield f"{rule} is refused: {reason}"


def _table(title: str, rows: Sequence[ComparedRule]) -> Table:
    heads = ["#", "rule", "window", "cosine", "deviation", "ms per step", "temporary", "traces"]
    return Table(title, heads, list(itertools.starmap(_cells, enumerate(rows))), range(3, 8))


def _cells(number: int, row: ComparedRule) -> list[str]:
    start = [str(number), row.rule, str(row.window or "-")]
    if row.refused is not None:
        return [*start, "refused", "", "", "", ""]
    numbers = f"{row.cosine:.4f}", f"{row.deviation:.1e}", f"{1e3 * row.seconds:.3g}"
    return [*start, *numbers, in_bytes(row.temp), in_bytes(row.traces)]


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
    task = _Task.of(model, step_fn, (inputs, ys), None, own)
    exact, learner = task.with_reference({}).exact(), task.learner(algorithm, options)
    found = task.online(learner).run()
    return _compared(type(learner).__name__, task.steps, found, exact.run())


def compare_rules(
    model: brainstate.nn.Module,
    xs: Any,
    *,
    step_fn: Callable[..., Any] | None = None,
    rules: Sequence[Any] | None = None,
    windows: Sequence[int | None] | None = None,
    mask: ArrayLike | None = None,
    batch_size: int | None = None,
    vmap: bool = False,
    memory_budget: int | None = None,
    repeats: int = 5,
    progress: bool = True,
    **options: Any,
) -> RuleComparison:
    """Compare learning rules and windows with backpropagation through time, on your data.

    Each row is the gradient of one sequence by one rule and window: its direction and error, its
    time and its memory. Backpropagation through time (BPTT) is ``jax.grad`` through the model's own
    step. Every gradient starts from the same states and random keys. Only copies of the model run:
    the model, its learners and the keys of ``brainstate.random`` do not change.

    Parameters
    ----------
    model
        A brainstate module, as for `braintrace.compile`.
    xs
        Sequence: a pytree of arrays, time first, such as ``inputs`` or ``(inputs, targets)``.
    step_fn
        ``step_fn(model, x) -> scalar``, the loss of one step. ``model`` is the model or a learner,
        and ``step_fn`` calls it exactly once; ``x`` is the slice of ``xs`` at that step. The loss
        of a sequence is the mean over its steps. ``None``: the mean of the squares of ``model(x)``.
    rules
        Rules: names, classes or instances as for `braintrace.compile`, or pairs of a rule and its
        options, ``("ottt", {"decay": 0.9})``. ``None``: `D_RTRL`, `ES_D_RTRL` and `Immediate`, and
        `RTRL` for models of at most 100 states per sample.
    windows
        Numbers of steps, used with every rule; an entry ``None`` is the rule without a window.
        ``None``: no window, and windows of a sixteenth and of a quarter of the sequence.
    mask
        Weights ``(T,)`` of the steps' losses; see `Learner.etrace_grad`.
    batch_size, vmap
        See `braintrace.compile`.
    memory_budget
        Bytes of memory. The sequence is shortened until the temporary memory of BPTT fits, and a
        rule is refused if its traces and temporary memory do not fit. ``None``: a tenth of the
        device's memory, and at most 1 GiB.
    repeats
        Number of timed rounds, each of which runs all gradients in turn.
    progress
        Show a progress bar if tqdm is installed.
    **options
        Options of every rule, as for `braintrace.compile`: ``strict``, ``mark``, ``trace_dtype``.

    Raises
    ------
    OptionError
        If a rule is unknown or an option value is not accepted; if ``step_fn`` does not call the
        model exactly once or returns no scalar; if the gradient by BPTT is zero.
    ShapeError, DtypeError
        For sequences that are empty or differ in length.

    Examples
    --------
    A leaky network has recurrent weights, so `D_RTRL` needs a window. `RTRL` is exact:

    >>> import brainstate, braintrace, jax.numpy as jnp, numpy as np
    >>> brainstate.random.seed(0)
    >>> model = braintrace.nn.LeakyRNN(2, 8, alpha=0.1)
    >>> xs = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4, 2)), jnp.float32)
    >>> table = braintrace.compare_rules(
    ...     model,
    ...     xs,
    ...     step_fn=lambda model, x: (model(x) ** 2).mean(),
    ...     rules=["d_rtrl", "rtrl"],
    ...     windows=[None, 16],
    ...     batch_size=4,
    ...     progress=False,
    ... )
    >>> [(row.rule, row.window) for row in table.rows]
    [('D_RTRL', None), ('D_RTRL', 16), ('RTRL', None), ('RTRL', 16)]
    >>> cosines = [round(row.cosine, 3) for row in table.rows]
    >>> cosines[0] < cosines[1] < cosines[2] == 1.0
    True
    """
    if "window" in options:
        raise OptionError("`compare_rules` has no `window`; pass a list of them as `windows`.")
    entries = _entries(model, RULES if rules is None else rules, options)
    own = {"batch_size": batch_size, "vmap": vmap}
    task = _Task.of(model, step_fn or _mean_of_squares, xs, mask, own)
    length, budget = task.steps, memory_budget or default_budget()
    if windows is None:
        windows = [None, *sorted({length // 16, length // 4} - {0})]
    # An error about the model or its data is not a reason of one rule: it is raised here.
    task = task.with_reference({"mark": options["mark"]} if "mark" in options else {})
    if rules is None and task.states_of_sample <= SMALL:
        entries += _entries(model, ["rtrl"], options)
    with _bar(progress, 1 + len(entries) * len(windows) + repeats) as tick:
        program = task.exact()
        while program.temp > budget and task.steps > 1:  # the memory is about proportional
            steps = max(1, min(task.steps - 1, 9 * task.steps * budget // (10 * program.temp)))
            task = task.cut(steps)
            program = task.exact()
        exact = program.run()
        in_parts = _measured(task, "BPTT in checkpoints", task.exact(in_parts=True), exact)
        every = [(None, _measured(task, "BPTT", program, exact)), (None, in_parts)]
        known: dict[tuple[int, int | None], _Measured] = {}
        tick()
        for (number, entry), window in itertools.product(enumerate(entries), windows):
            # `RTRL` ignores windows, and a window cannot be longer than the sequence.
            used = entry.instance.window_of(window) if entry.instance else None
            used = min(used, task.steps) if isinstance(used, int) else None
            if (number, used) not in known:
                known[number, used] = _measure(task, entry, used, exact, budget)
            every.append((window, known[number, used]))
            tick()
        times: list[list[float]] = [[] for _ in every]
        for _ in range(repeats):
            for own_times, (_, measured) in zip(times, every, strict=True):
                begin = time.perf_counter()
                jax.block_until_ready(measured.run())
                own_times.append((time.perf_counter() - begin) / task.steps)
            tick()
    medians = [
        math.nan if measured.row.refused else statistics.median(own_times)
        for own_times, (_, measured) in zip(times, every, strict=True)
    ]
    bptt, checkpointed, *rows = (
        dataclasses.replace(measured.row, window=window, seconds=seconds)
        for seconds, (window, measured) in zip(medians, every, strict=True)
    )
    return RuleComparison(task.steps, length, budget, bptt, checkpointed, tuple(rows))


class _Measured(NamedTuple):
    row: ComparedRule
    run: Callable[[], PyTree] = lambda: None


def _measured(
    task: _Task, name: str, program: _Program, exact: Mapping[Path, PyTree], traces: int = 0
) -> _Measured:
    check = _compared(name, task.steps, program.run(), exact)
    row = ComparedRule(
        name,
        gradient=check,
        temp=program.temp,
        traces=traces,
        cosine=check.rows[-1].cosine,
        deviation=check.rows[-1].deviation,
    )
    return _Measured(row, program.run)


def _measure(
    task: _Task, entry: _Entry, window: int | None, exact: Mapping[Path, PyTree], budget: int
) -> _Measured:
    try:
        if entry.instance is None:
            raise OptionError(entry.refused)
        own = {} if window is None else {"window": window}
        learner = task.learner(type(entry.instance), {**entry.options, **own})
        size = traces = learner.report().carried_bytes or 0
        if traces <= budget:
            program = task.online(learner)
            size += program.temp
        if size > budget:
            raise OptionError(
                f"traces and temporary memory of {in_bytes(size)} are more than `memory_budget`, "
                f"{in_bytes(budget)}."
            )
        return _measured(task, entry.name, program, exact, traces)
    except BraintraceError as error:
        return _Measured(ComparedRule(entry.name, refused=str(error)))


class _Entry(NamedTuple):
    name: str
    options: Mapping[str, Any]
    instance: Learner | None = None
    refused: str | None = None  # why these options make no rule


def _entries(
    model: brainstate.nn.Module, rules: Sequence[Any], options: Mapping[str, Any]
) -> list[_Entry]:
    entries = []
    for index, rule in enumerate(rules):
        given, own = rule_and_options(rule)
        algorithm = algorithm_of(given, f"rules[{index}]")
        told = ", ".join(f"{name}={value!r}" for name, value in own.items())
        name = algorithm.__name__ + (f"({told})" if told else "")
        entry = _Entry(name, {**options, **own})
        try:
            made = algorithm(model, **entry.options)
            text = made.rule if isinstance(given, Rule) else name
            entry = entry._replace(name=text, instance=made)
        except TypeError as error:
            reason = f'{error}; give the options with the rule, ("{given}", {{"option": ...}}).'
            entry = entry._replace(refused=reason)
        entries.append(entry)
    return entries


# --- one task for all rules


class _Program(NamedTuple):
    temp: int  # bytes of temporary memory
    run: Callable[[], Any]  # returns the gradients by path


def _compiled(gradient: Callable[..., PyTree], *arguments: PyTree) -> _Program:
    """Compile a function that returns a gradient and the rest of its results."""
    program = jax.jit(gradient).lower(*arguments).compile()
    temp = int(program.memory_analysis().temp_size_in_bytes)
    return _Program(temp, lambda: program(*arguments)[0])


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
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
    ) -> _Task:
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

    def with_reference(self, options: Mapping[str, Any]) -> _Task:
        return dataclasses.replace(self, reference=self.learner(Immediate, options))

    def cut(self, steps: int) -> _Task:
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

    def online(self, learner: Learner) -> _Program:
        """Compile the gradient of a learner."""
        pure = self.pure(learner)

        def gradient(state: PyTree, xs: PyTree) -> PyTree:
            # The new state is a result, as it is of every call of a learner.
            options = {"step_fn": lambda x: self.loss(learner, x), "mask": self.mask}
            return pure.grad(state, xs, **options)[::-1]

        program = _compiled(gradient, pure.state(), self.xs)
        return program._replace(run=lambda: gradients_by_path(learner.module, program.run()))

    def exact(self, in_parts: bool = False) -> _Program:
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


def _mean_of_squares(model: Callable[..., PyTree], x: PyTree) -> PyTree:
    leaves = jax.tree.leaves(model(x), is_leaf=is_quantity)
    return sum(jnp.mean(jnp.abs(saiunit.get_mantissa(leaf)) ** 2) for leaf in leaves)


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


@contextlib.contextmanager
def _bar(is_shown: bool, total: int) -> Iterator[Callable[[], Any]]:
    with contextlib.ExitStack() as stack:
        tick: Callable[[], Any] = int
        if is_shown:
            with contextlib.suppress(MissingPackageError):
                tqdm = optional_import("tqdm.auto", "examples").tqdm
                bar = tqdm(total=total, unit="row", desc="compare_rules")
                tick = stack.enter_context(bar).update
        yield tick


# --- numbers


def _compared(
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
