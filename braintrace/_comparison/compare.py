"""Comparison of rules and windows with backpropagation through time, on a model and its data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm, Immediate, algorithm_of, rule_and_options
from .._checks import is_quantity
from .._errors import BraintraceError, MissingPackageError, OptionError, optional_import
from .._learner.calls.arguments import weights_of
from .._learner.calls.chunks import default_budget
from .._pictures import in_bytes
from .._typing import PyTree
from .bptt import Bptt, bptt_of
from .check import compared
from .run import RuleRun
from .table import ComparedRule, RuleComparison
from .workload import Workload, arguments_of, checked_sequences, restored

RULES = ("d_rtrl", "es_d_rtrl", "immediate")
SMALL = 100
"""Maximum number of states per sample for which `RTRL` is compared by default."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A rule of the comparison: its name in the table, its class, its options.

    ``refused`` is the reason why these options make no rule.
    """

    name: str
    algorithm: type[ETraceAlgorithm]
    options: Mapping[str, Any]
    refused: str | None = None


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
        Number of timed rounds, each of which runs all gradients in turn; at most 1000.
    progress
        Show a progress bar if tqdm is installed.
    **options
        Options of every rule, as for `braintrace.compile`: ``strict``, ``mark``, ``trace_dtype``.

    Returns
    -------
    RuleComparison
        A printable table. A rule that refuses the model is a row with the reason.

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
    (xs,), length = checked_sequences("compare_rules", model, {"xs": xs})
    if "window" in options:
        raise OptionError("`compare_rules` has no `window`; pass a list of them as `windows`.")
    entries = _entries(model, rules, options)
    lengths = _windows(windows, length)
    if mask is not None:
        weights_of(mask, length)
    states = [*model.states().values(), brainstate.random.DEFAULT]
    with restored(states):
        xs, loss = jax.tree.map(jnp.asarray, xs), step_fn or _mean_of_squares
        arguments = arguments_of(loss, jax.tree.map(lambda leaf: leaf[0], xs))
        work = Workload(model, loss, xs, mask, arguments, batch_size, vmap)
        # An error about the model or its data is not a reason of one rule: it is raised here.
        RuleRun(work, Immediate, {"mark": options["mark"]} if "mark" in options else {})
        bptt = bptt_of(work)
        budget = memory_budget or default_budget()
        if rules is None and bptt.states_of_sample <= SMALL:
            entries += _entries(model, ["rtrl"], options)
        total = 1 + len(entries) * len(lengths) + repeats
        with restored([*states, *bptt.outside]) as rewind, _bar(progress, total) as tick:
            found = _Comparison(bptt, budget, rewind, tick)
            jobs = itertools.product(entries, lengths)
            rows = [found.row(entry, window) for entry, window in jobs]
            return found.timed(rows, repeats, length)


def _mean_of_squares(model: Callable[..., PyTree], x: PyTree) -> PyTree:
    leaves = jax.tree.leaves(model(x), is_leaf=is_quantity)
    return sum(jnp.mean(jnp.abs(saiunit.get_mantissa(leaf)) ** 2) for leaf in leaves)


def _entries(
    model: brainstate.nn.Module, rules: Sequence[Any] | None, options: Mapping[str, Any]
) -> list[Entry]:
    given = RULES if rules is None else rules
    entries, texts = [], []
    for index, rule in enumerate(given):
        given_rule, own = rule_and_options(rule)
        algorithm = algorithm_of(given_rule, f"rules[{index}]")
        entry = Entry(algorithm.__name__, algorithm, {**options, **own})
        try:
            texts.append(algorithm(model, **entry.options).rule)
        except TypeError as error:
            texts.append(entry.name)
            reason = f'{error}; give options as ("{given_rule}", {{"name": value}}).'
            entry = dataclasses.replace(entry, refused=reason)
        entries.append(entry)
    names = [entry.name for entry in entries]
    return [
        dataclasses.replace(e, name=text) if names.count(e.name) > 1 else e
        for e, text in zip(entries, texts, strict=True)
    ]


def _windows(windows: Sequence[int | None] | None, steps: int) -> list[int | None]:
    if windows is None:
        return [None, *sorted({steps // 16, steps // 4} - {0})]
    return list(windows)


@contextlib.contextmanager
def _bar(is_shown: bool, total: int) -> Iterator[Callable[[], Any]]:
    bar = None
    if is_shown:
        with contextlib.suppress(MissingPackageError):
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            bar = tqdm(total=total, unit="row", desc="compare_rules")
    try:
        yield (lambda: None) if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()


class _Comparison:
    """Gradients of all rules, followed by rounds that time them in turn."""

    def __init__(
        self, bptt: Bptt, budget: int, rewind: Callable[[], None], tick: Callable[[], Any]
    ) -> None:
        self._budget, self._rewind, self._tick = budget, rewind, tick
        steps = bptt.work.steps
        temp, run = bptt.program(steps)
        while temp > budget and steps > 1:  # the memory is about proportional to the steps
            steps = max(1, min(steps - 1, 9 * steps * budget // (10 * temp)))
            temp, run = bptt.program(steps)
        self._work, self._start = bptt.work.cut(steps), bptt.start
        rewind()
        self._exact = run()
        tick()
        gradient = compared("BPTT", steps, self._exact, self._exact)
        self._bptt = ComparedRule("BPTT", gradient=gradient, temp=temp)
        temp, in_parts = bptt.program(steps, is_checkpointed=True)
        same = compared("BPTT in checkpoints", steps, in_parts(), self._exact)
        self._checkpointed = ComparedRule("BPTT in checkpoints", gradient=same, temp=temp)
        self._runs: list[tuple[Callable[[], Any], Callable[[], None]]] = [
            (run, lambda: None),
            (in_parts, lambda: None),
        ]
        self._rows: dict[tuple[str, Any], tuple[ComparedRule, int | None]] = {}

    def row(self, entry: Entry, window: int | None) -> tuple[ComparedRule, int | None]:
        """Return the row of a rule without its time, and the number of its run."""
        if entry.refused is not None:
            self._tick()
            return ComparedRule(entry.name, window, refused=entry.refused), None
        # `RTRL` ignores windows, and a window cannot be longer than the sequence.
        of_rule = entry.algorithm(self._work.model, **entry.options).window_of(window)
        length = min(of_rule, self._work.steps) if isinstance(of_rule, int) else None
        key = entry.name, length
        if key not in self._rows:
            self._rows[key] = self._run(entry, length)
        self._tick()
        row, number = self._rows[key]
        return dataclasses.replace(row, window=window), number

    def _run(self, entry: Entry, window: int | None) -> tuple[ComparedRule, int | None]:
        row = ComparedRule(entry.name, window)
        options = entry.options if window is None else {**entry.options, "window": window}
        try:
            self._rewind()
            run = RuleRun(self._work, entry.algorithm, options)
            row = self._measured(row, run)
        except BraintraceError as error:
            row = dataclasses.replace(row, refused=str(error))
        if row.refused is not None:
            return row, None
        learner, start = run.learner, self._start
        learner.reset_state()
        self._runs.append((lambda: run(start), learner.reset_state))
        return row, len(self._runs) - 1

    def _measured(self, row: ComparedRule, run: RuleRun) -> ComparedRule:
        """Return the row with memory and gradient, or refused for its memory."""
        row = dataclasses.replace(row, traces=run.traces)
        if row.traces <= self._budget:
            row = dataclasses.replace(row, temp=run.temp_bytes())
        if row.traces + row.temp > self._budget:
            return dataclasses.replace(
                row,
                refused=f"traces and temporary memory of {in_bytes(row.traces + row.temp)} are "
                f"more than `memory_budget`, {in_bytes(self._budget)}.",
            )
        self._rewind()
        found = compared(row.rule, self._work.steps, run(self._start), self._exact)
        return dataclasses.replace(row, gradient=found)

    def timed(
        self, rows: list[tuple[ComparedRule, int | None]], repeats: int, length: int
    ) -> RuleComparison:
        """Return the comparison with times, which are measured in turn."""
        times: list[list[float]] = [[] for _ in self._runs]
        for _ in range(repeats):
            for own, (run, reset) in zip(times, self._runs, strict=True):
                self._rewind()
                begin = time.perf_counter()
                jax.block_until_ready(run())
                own.append(time.perf_counter() - begin)
                reset()
            self._tick()
        seconds = [statistics.median(own) / self._work.steps for own in times]
        return RuleComparison(
            steps=self._work.steps,
            length=length,
            memory_budget=self._budget,
            bptt=dataclasses.replace(self._bptt, seconds=seconds[0]),
            checkpointed=dataclasses.replace(self._checkpointed, seconds=seconds[1]),
            rows=tuple(
                row if number is None else dataclasses.replace(row, seconds=seconds[number])
                for row, number in rows
            ),
        )
