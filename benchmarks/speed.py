"""Gradients over backpropagation through time: ``python -m benchmarks.speed``.

Every number is a ratio to jitted BPTT in plain JAX (``lax.scan`` with ``unroll=1``) of the same
network, measured in turn in one process: the median over the rounds. Two rivals are columns of
their own: the same scan with ``unroll=4``, and in sqrt(T) checkpoints. ``--json FILE`` keeps the
results of a machine.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import statistics
import warnings
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace

from . import networks
from .networks import Network, Plain
from .timing import Call, median_ratio, temporary_mebibytes, time_in_turn

BPTT, UNROLLED, PARTS = "BPTT", "unroll=4", "checkpoints"
RESET, ON, ES, ES_ON = "D_RTRL", "D_RTRL, on", "ES_D_RTRL", "ES_D_RTRL, on"
STANDARD = (RESET, ON, ES, ES_ON)
"""After a reset, and carrying on from the sequence before."""
IN_JIT, CHECKPOINT = "D_RTRL, reset in jit", "D_RTRL, checkpoint"
RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Row:
    """A network with the lengths of its sequences, and the methods that are timed on it."""

    make: Callable[[], Network]
    steps: int
    batch: int
    methods: tuple[str, ...] = STANDARD

    @functools.cached_property
    def network(self) -> Network:
        return self.make()

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        return self.network.data(self.steps, self.batch)


def bptt(row: Row, unroll: int = 1, parts: int = 1) -> Call:
    """Return BPTT by one scan, or by a scan over checkpointed parts."""
    network, ops = row.network, Plain()

    def loss(parameters: Any, xs: Any, targets: Any) -> Any:
        def step(states: Any, now: Any) -> Any:
            states, output = network.step(ops, parameters, states, now[0])
            return states, network.loss(output, now[1])

        def part(states: Any, now: Any) -> Any:
            return jax.lax.scan(step, states, now, unroll=unroll)

        start = network.start(row.batch)
        if parts == 1:
            return part(start, (xs, targets))[1].mean()
        split = jax.tree.map(lambda v: v.reshape(parts, -1, *v.shape[1:]), (xs, targets))
        return jax.lax.scan(jax.checkpoint(part), start, split)[1].mean()

    gradient, parameters = jax.jit(jax.grad(loss)), network.parameters()
    return Call(
        lambda: gradient(parameters, *row.data), lambda: gradient.lower(parameters, *row.data)
    )


def count_parts(steps: int) -> int:
    """Return the divisor of a number of steps that is nearest to its root."""
    divisors = [n for n in range(1, steps + 1) if steps % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / math.sqrt(steps))))


def compile_learner(row: Row, rule: str, **options: Any) -> Any:
    if rule == "es_d_rtrl":
        options["decay_or_rank"] = 0.9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the coupling of units is truncated on purpose
        return braintrace.compile(
            networks.Model(row.network), rule, row.data[0][0], batch_size=row.batch, **options
        )


def step_of(row: Row, learner: Any) -> Callable[[Any, Any], Any]:
    return lambda x, target: row.network.loss(learner(x), target)


def sequence(
    row: Row,
    rule: str = "d_rtrl",
    resets: bool = True,
    masks: bool = False,
    checkpoint: bool = False,
    **options: Any,
) -> Call:
    """Return the gradient of a sequence, after a reset or carrying on.

    With ``masks``, every second step does not count.
    """
    learner = compile_learner(row, rule, **options)
    call: dict[str, Any] = {"step_fn": step_of(row, learner)}
    if masks:
        call["mask"] = jnp.arange(row.steps) % 2
    if checkpoint:
        call["checkpoint"] = True

    def run() -> Any:
        if resets:
            learner.reset_state(row.batch)
        return learner.etrace_grad(*row.data, **call)

    def lower() -> Any:
        pure = learner.functional()

        def gradient(state: Any, *data: Any) -> Any:
            return pure.grad(pure.reset(state) if resets else state, *data, **call)

        return jax.jit(gradient).lower(pure.state(), *row.data)

    if not resets:
        jax.block_until_ready(run())  # so that no trace is zero
    return Call(run, lower)


def in_jit(row: Row) -> Call:
    """Return a reset and the gradient of a sequence in one ``jit``, as in a loop of the user."""
    learner = compile_learner(row, "d_rtrl")
    step, pure = step_of(row, learner), learner.functional()

    def gradient(state: Any, *data: Any) -> Any:
        return pure.grad(pure.reset(state), *data, step_fn=step)

    compiled, held = jax.jit(gradient), [pure.reset(pure.state())]

    def run() -> Any:
        held[0], gradients = compiled(held[0], *row.data)
        return gradients

    return Call(run, lambda: compiled.lower(held[0], *row.data))


def descend(learner: Any, row: Row) -> Callable[[Any], None]:
    weights = learner.module.states(brainstate.ParamState)

    def update(gradients: Any) -> None:
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - RATE * g, weight.value, gradients[path])

    return update


def stream(row: Row, rule: str = "d_rtrl", **options: Any) -> Call:
    """Return a stream that learns on, in one call."""
    learner = compile_learner(row, rule)
    call: dict[str, Any] = {"step_fn": step_of(row, learner)}
    call["update_fn"] = descend(learner, row)
    call |= {"nonfinite": "ignore", **options}
    return Call(lambda: learner.etrace_online(*row.data, **call))


def one_by_one(row: Row, kind: str) -> Call:
    """Return the steps of a sequence in a call each."""
    learner = compile_learner(row, "d_rtrl")
    pairs = [tuple(part[t : t + 1] for part in row.data) for t in range(row.steps)]
    step = step_of(row, learner)
    if kind == "own grad":
        weights = learner.module.states(brainstate.ParamState)
        gradient = brainstate.transform.jit(brainstate.transform.grad(step, weights))
        take: Callable[[Any, Any], Any] = lambda x, y: gradient(x[0], y[0])  # noqa: E731
    elif kind == "pure":
        pure = learner.functional()
        jitted = jax.jit(functools.partial(pure.grad, step_fn=step))
        held = [jax.tree.map(jnp.copy, pure.state())]

        def take(x: Any, y: Any) -> Any:
            held[0], gradients = jitted(held[0], x, y)
            return gradients

    elif kind == "live":
        stream = learner.live(step, optax.sgd(RATE))

        def take(x: Any, y: Any) -> Any:
            stream.predict(x[0])
            return stream.learn(y[0])

    else:
        update = descend(learner, row)
        take = functools.partial(
            learner.etrace_online, step_fn=step, update_fn=update, nonfinite="ignore"
        )

    def run() -> Any:
        result = None
        for pair in pairs:
            result = take(*pair)
        return result

    return Call(run)


def first_gradient(row: Row) -> Call:
    """Return everything from the model to its first gradient, without compiled programs."""

    def run() -> Any:
        learner = compile_learner(row, "d_rtrl")
        return learner.etrace_grad(*row.data, step_fn=step_of(row, learner))

    return Call(run, starts_cold=True)


def compilation(row: Row) -> Call:
    """Return the compilation of a model that has its states, without caches of JAX."""
    model = networks.Model(row.network)
    brainstate.nn.init_all_states(model, batch_size=row.batch)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            braintrace.D_RTRL(model).compile_graph(row.data[0][0])

    return Call(run, starts_cold=True)


METHODS: dict[str, Callable[[Row], Call]] = {
    BPTT: bptt,
    UNROLLED: functools.partial(bptt, unroll=4),
    PARTS: lambda row: bptt(row, parts=count_parts(row.steps)),
    RESET: sequence,
    ON: functools.partial(sequence, resets=False),
    ES: functools.partial(sequence, rule="es_d_rtrl"),
    ES_ON: functools.partial(sequence, rule="es_d_rtrl", resets=False),
    IN_JIT: in_jit,
    CHECKPOINT: functools.partial(sequence, checkpoint=True),
    "D_RTRL, mask": functools.partial(sequence, masks=True),
    "D_RTRL, window=16": functools.partial(sequence, window=16),
    "D_RTRL, window=16, on": functools.partial(sequence, window=16, resets=False),
    "ES_D_RTRL, window=16": functools.partial(sequence, rule="es_d_rtrl", window=16),
    "RTRL": functools.partial(sequence, rule="rtrl"),
    "UORO": functools.partial(sequence, rule="uoro"),
    "stream": stream,
    "stream, every=8": functools.partial(stream, every=8),
    "stream, ES_D_RTRL": functools.partial(stream, rule="es_d_rtrl"),
    "calls of etrace_online": functools.partial(one_by_one, kind="etrace_online"),
    "calls of own grad": functools.partial(one_by_one, kind="own grad"),
    "calls of pure.grad": functools.partial(one_by_one, kind="pure"),
    "calls of live": functools.partial(one_by_one, kind="live"),
    "first gradient": first_gradient,
    "compilation": compilation,
}
WINDOWS = ("D_RTRL, window=16", "D_RTRL, window=16, on", "ES_D_RTRL, window=16")
STREAMS = ("stream", "stream, every=8")
CALLS = ("calls of etrace_online", "calls of own grad", "calls of pure.grad", "calls of live")
COLD = ("compilation", "first gradient")


def _row(make: Callable[..., Network], steps: int, batch: int, *methods: str, **sizes: Any) -> Row:
    return Row(functools.partial(make, **sizes), steps, batch, methods or STANDARD)


ROWS: dict[str, Row] = {
    "leaky": _row(networks.leaky, 100, 64),
    "GRU": _row(networks.gru, 100, 64, *STANDARD, CHECKPOINT),
    "LSTM": _row(networks.lstm, 100, 64),
    "LRU": _row(networks.lru, 100, 64),
    "GRU x3": _row(networks.gru, 100, 64, layers=3),
    "leaky x4": _row(networks.leaky, 100, 64, layers=4),
    "LRU x4": _row(networks.lru, 100, 64, layers=4),
    "sparse LIF, 10,000 neurons": _row(networks.sparse, 64, 1),
    "convolution": _row(networks.convolution, 64, 16),
    "LIF": _row(networks.spiking, 100, 64, *STANDARD, IN_JIT, CHECKPOINT, adapts=False),
    "ALIF": _row(networks.spiking, 100, 64, *STANDARD, IN_JIT, CHECKPOINT),
    "LIF, batch 4": _row(networks.spiking, 100, 4, adapts=False),
    "ALIF, batch 4": _row(networks.spiking, 100, 4),
    "LIF, 1,000 steps": _row(networks.spiking, 1000, 64, *STANDARD, CHECKPOINT, adapts=False),
    "ALIF, 1,000 steps": _row(networks.spiking, 1000, 64, *STANDARD, CHECKPOINT),
    "LIF, 512 units": _row(networks.spiking, 100, 64, adapts=False, hidden=512),
    "ALIF, 512 units": _row(networks.spiking, 100, 64, hidden=512),
    "ALIF, refractory": _row(networks.spiking, 100, 64, refractory=3),
    "GRU, windows": _row(networks.gru, 64, 64, *WINDOWS),
    "leaky, stream": _row(networks.leaky, 400, 4, *STREAMS),
    "LSTM, stream": _row(networks.lstm, 400, 1, *STREAMS),
    "leaky, random": _row(networks.leaky, 64, 8, "UORO"),
}
"""The rows of README and of the page."""

MORE: dict[str, Row] = {
    "ALIF, 2,048 units": _row(networks.spiking, 50, 16, hidden=2048),
    "leaky, 512 steps": _row(networks.leaky, 512, 32, hidden=256),
    "leaky, 1,024 units": _row(networks.leaky, 64, 32, hidden=1024),
    "leaky, 4,000 outputs": _row(networks.leaky, 64, 16, RESET, outputs=4000),
    "leaky, batch 16": _row(networks.leaky, 100, 16, RESET, ON, "stream"),
    "leaky, delay 10": _row(networks.leaky, 100, 16, RESET, ON, "stream", delay=10),
    "leaky x2": _row(networks.leaky, 100, 16, RESET, ON, "stream", layers=2),
    "leaky x2, delay 10": _row(networks.leaky, 100, 16, RESET, ON, "stream", layers=2, delay=10),
    "LSTM, mask": _row(networks.lstm, 100, 64, "D_RTRL, mask"),
    "LSTM, 256 units": _row(networks.lstm, 256, 32, hidden=256),
    "leaky x4, 256 units": _row(networks.leaky, 256, 64, layers=4, hidden=256),
    "GRU x3, 256 units": _row(networks.gru, 512, 32, layers=3, hidden=256),
    "sparse LIF, batch 16": _row(networks.sparse, 64, 16, RESET, ON, ES, ES_ON),
    "sparse LIF, a fly": _row(networks.sparse, 16, 1, RESET, ON, neurons=139_255, fan_out=108),
    "leaky, windows": _row(networks.leaky, 64, 32, *WINDOWS),
    "LSTM, windows": _row(networks.lstm, 64, 32, *WINDOWS),
    "ALIF, windows": _row(networks.spiking, 64, 32, *WINDOWS),
    "leaky, exact": _row(networks.leaky, 64, 8, "RTRL", hidden=32),
    "ALIF, stream": _row(networks.spiking, 100, 32, *STREAMS),
    "leaky, stream of ES_D_RTRL": _row(networks.leaky, 400, 4, "stream, ES_D_RTRL"),
    "LSTM, calls": _row(networks.lstm, 64, 1, *CALLS, inputs=4, hidden=8, outputs=2),
    "leaky, calls": _row(networks.leaky, 64, 32, *CALLS),
    "GRU x3, first": _row(networks.gru, 64, 8, *COLD, layers=3, hidden=64),
    "ALIF, first": _row(networks.spiking, 100, 8, *COLD),
    "leaky, first": _row(networks.leaky, 8, 64, *COLD),
    "smallest": _row(networks.leaky, 4, 2, RESET, inputs=2, hidden=4),
}
"""Further rows, with ``--all``."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A method on a row: its ratio to BPTT (milliseconds for BPTT itself) and temporary MiB."""

    row: str
    method: str
    milliseconds: float
    ratio: float
    mebibytes: float | None


def measure(name: str, row: Row, rounds: int, seconds: float) -> list[Result]:
    rivals = (
        (BPTT,) if row.network.inputs == (10_000,) and row.batch > 1 else (BPTT, UNROLLED, PARTS)
    )
    calls = {method: METHODS[method](row) for method in (*rivals, *row.methods)}
    times = time_in_turn(calls, rounds, seconds)
    return [
        Result(
            name,
            method,
            1e3 * statistics.median(times[method]),
            median_ratio(times[method], times[BPTT]),
            temporary_mebibytes(call),
        )
        for method, call in calls.items()
    ]


def format_tables(results: list[Result]) -> str:
    """Return one Markdown table for the rows that have the same methods."""
    by_row: dict[str, dict[str, Result]] = {}
    for result in results:
        by_row.setdefault(result.row, {})[result.method] = result
    tables: dict[tuple[str, ...], list[str]] = {}
    for name, own in by_row.items():
        methods = tuple(own)[1:]
        cells = [f"{own[BPTT].milliseconds:.1f} ms", *(f"{own[m].ratio:.2f}" for m in methods)]
        memory = " / ".join(
            "–" if r.mebibytes is None else f"{r.mebibytes:.1f}" for r in own.values()
        )
        tables.setdefault(methods, []).append(f"| {' | '.join([name, *cells, memory])} |")
    lines = []
    for methods, rows in tables.items():
        head = ["", BPTT, *methods, "temporary MiB, in this order"]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows, ""]
    return "\n".join(lines)


def select(rows: dict[str, Row], patterns: str | None) -> dict[str, Row]:
    if patterns is None:
        return rows
    chosen = patterns.split("|")
    return {name: row for name, row in rows.items() if any(fnmatch(name, p) for p in chosen)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--rows", metavar="PATTERNS", help="names of rows, with *, between |")
    parser.add_argument("--all", action="store_true", help="further sizes and methods")
    parser.add_argument("--rounds", type=int, default=9, help="at most; default 9")
    parser.add_argument("--seconds", type=float, default=12, help="of a row; default 12")
    parser.add_argument("--json", type=Path, help="file for the results of this machine")
    options = parser.parse_args()
    results: list[Result] = []
    for name, row in select(ROWS | (MORE if options.all else {}), options.rows).items():
        own = measure(name, row, options.rounds, options.seconds)
        results += own
        print(name, *(f"{r.method} {r.ratio:.2f}" for r in own[1:]), sep="  ", flush=True)
        jax.clear_caches()
    print("\n" + format_tables(results))
    if options.json is not None:
        machine = {"device": jax.devices()[0].device_kind, "processor": platform.processor()}
        machine |= {"jax": jax.__version__, "braintrace": braintrace.__version__}
        rows = [dataclasses.asdict(result) for result in results]
        options.json.write_text(json.dumps({"machine": machine, "results": rows}, indent=1))


if __name__ == "__main__":
    main()
