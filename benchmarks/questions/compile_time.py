"""Analysis time over the number of equations.

Stacked leaky layers with elementwise operations between the weight and the state; one layer has
about 50 equations. An LSTM has constant equations and growing arrays.
"""

import time
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from .. import oracles
from ..case import Case, NotOffered, Prepared
from ..networks import squared_error

WIDTH, BATCH, STEPS = 16, 8, 6
LAYERS = (2, 5, 10, 20, 50, 100)
QUICK = (2, 10)
SIZES = ((256, 1024), (256, 2048))
QUICK_SIZES = ((8, 16), (16, 32))


class Layer(brainstate.nn.Module):
    """A leaky layer with many equations."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.w = brainstate.ParamState(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5)
        self.leak = brainstate.ParamState(jnp.zeros(WIDTH))

    def init_state(self, batch_size: int) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, WIDTH)))

    def update(self, x: Any) -> Any:
        drive = braintrace.matmul(x, self.w.value)
        decay = braintrace.element_wise(self.leak.value, jax.nn.sigmoid)
        self.h.value = _layer(drive, decay, self.h.value)
        return self.h.value


def _layer(drive: Any, decay: Any, h: Any) -> Any:
    for _ in range(20):
        drive = jnp.tanh(1.1 * drive)
    return decay * h + drive


def stack(layers: int) -> brainstate.nn.Module:
    """Return a model of some layers."""
    keys = jax.random.split(jax.random.key(0), layers)
    model = brainstate.nn.Sequential(*(Layer(key) for key in keys))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    return model


def equations(model: Any) -> int:
    """Return the number of equations of one step."""
    closed, _ = brainstate.transform.make_jaxpr(model.update)(jnp.ones((BATCH, WIDTH)))
    return len(closed.jaxpr.eqns)


def analysis(layers: int) -> tuple[float, int]:
    """Return the seconds that the analysis takes, and the number of equations."""
    if not hasattr(braintrace, "compile_etrace_graph"):
        raise NotOffered("the library does not name its compiler")
    model = stack(layers)
    start = time.perf_counter()
    braintrace.compile_etrace_graph(model, jnp.ones((BATCH, WIDTH)))
    return time.perf_counter() - start, equations(model)


def analysis_of_lstm(batch: int, units: int) -> float:
    """Return the seconds that the analysis of one LSTM layer takes."""
    if not hasattr(braintrace, "compile_etrace_graph"):
        raise NotOffered("the library does not name its compiler")
    model = braintrace.nn.LSTMCell(WIDTH, units)
    brainstate.nn.init_all_states(model, batch_size=batch)
    jax.block_until_ready([state.value for state in model.states().values()])
    start = time.perf_counter()
    braintrace.compile_etrace_graph(model, jnp.ones((batch, WIDTH)))
    return time.perf_counter() - start


def check() -> tuple[float, float]:
    """Return how far the gradient of one layer is from BPTT, which is exact here."""
    model = stack(1)
    keys = jax.random.split(jax.random.key(1), 2)
    xs, targets = (jax.random.normal(key, (STEPS, BATCH, WIDTH)) for key in keys)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH)
    found = learner.etrace_grad(
        xs, targets, step_fn=lambda x, target: squared_error(learner(x), target)
    )
    weights = {path: state.value for path, state in model.states(brainstate.ParamState).items()}

    def loss(weights: Any) -> Any:
        named = {path[-1]: value for path, value in weights.items()}

        def step(h: Any, now: Any) -> Any:
            h = _layer(now[0] @ named["w"], jax.nn.sigmoid(named["leak"]), h)
            return h, squared_error(h, now[1])

        return jax.lax.scan(step, jnp.zeros((BATCH, WIDTH)), (xs, targets))[1].mean()

    return oracles.deviation(found, jax.grad(loss)(weights)), 1e-4


def prepare(layers: tuple[int, ...], sizes: tuple[tuple[int, int], ...]) -> Prepared:
    """Return the times of all models; small ones go first and fill the caches."""

    def derive(_: Any) -> dict[str, float]:
        analysis(1)
        found = {}
        for count in layers:
            seconds, size = analysis(count)
            found[f"{count} layers: equations"] = float(size)
            found[f"{count} layers: seconds"] = seconds
            found[f"{count} layers: milliseconds per equation"] = 1e3 * seconds / size
        analysis_of_lstm(2, 4)
        found |= {f"LSTM {b} x {n}: seconds": analysis_of_lstm(b, n) for b, n in sizes}
        return found

    return Prepared(derive=derive, checks={"D_RTRL of one layer": check})


def case(layers: tuple[int, ...], sizes: tuple[tuple[int, int], ...]) -> Case:
    """Return the case of some depths, and of some batches and units of an LSTM."""
    return Case(
        name=f"compile_time/to {layers[-1]} layers",
        parameters={"layers": list(layers), "sizes": [list(size) for size in sizes]},
        build=lambda: prepare(layers, sizes),
        quick=layers == QUICK,
        full=layers == LAYERS,
    )


def cases(platform: str) -> list[Case]:
    """Return depths of 100 to 5,000 equations with wide LSTMs, and few with narrow ones."""
    return [case(LAYERS, SIZES), case(QUICK, QUICK_SIZES)]
