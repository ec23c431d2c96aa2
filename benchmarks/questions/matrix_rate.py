"""Share of the device's matrix rate.

The necessary operations of a gradient (a product is 2 m n k) per time, relative to one large
product in the same run. D_RTRL needs no product with the transposed recurrent weights; BPTT does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import subjects
from ..case import Case, Measurements, Prepared, Subject, Target
from ..networks import dense
from ..subjects import Task

PRODUCT, BPTT, ONLINE = "matrix product", "BPTT", "D_RTRL, one chunk"
SHARE = ": share of the matrix rate"
SIZES = {"cpu": 1024, "gpu": 8192}


def operations(steps: int, batch: int, inputs: int, hidden: int, outputs: int) -> dict[str, float]:
    """Return the floating-point operations of BPTT and of D_RTRL."""
    into, among, out = inputs * hidden, hidden * hidden, hidden * outputs
    forward = into + among + out
    pulled_back, weights = out, into + among + out
    online = 2.0 * steps * batch * (forward + pulled_back + weights)
    return {ONLINE: online, BPTT: online + 2.0 * steps * batch * among}


def product(size: int, dtype: Any) -> Subject:
    """Time one large matrix product."""
    matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    run: Callable[[Any], Any] = jax.jit(lambda a: a @ a)
    return Subject(lambda: run(matrix))


def prepare(task: Task, size: int) -> Prepared:
    """Return the gradients and the product."""
    network = task.network
    counts = operations(
        task.steps,
        task.batch,
        network.input_shape[0],
        network.states["h"][0],
        network.outputs,
    )
    counts[PRODUCT] = 2.0 * size**3

    def rates(found: Measurements) -> dict[str, float]:
        rate = {label: counts[label] / found.seconds[label] for label in counts}
        per_second = {f"{label}: operations per second": rate[label] for label in rate}
        shares = {label + SHARE: rate[label] / rate[PRODUCT] for label in (BPTT, ONLINE)}
        return {**per_second, **shares}

    return Prepared(
        {
            PRODUCT: lambda: product(size, jnp.dtype(task.dtype)),
            BPTT: lambda: subjects.bptt(task),
            ONLINE: lambda: subjects.online(task, "d_rtrl", task.steps),
        },
        derive=rates,
    )


def case(dtype: str, hidden: int, size: int, steps: int = 64, batch: int = 128) -> Case:
    """Return the case of one size and dtype."""
    return Case(
        name=f"matrix_rate/{dtype},H={hidden}",
        parameters={"dtype": dtype, "steps": steps, "hidden": hidden, "batch": batch},
        build=lambda: prepare(Task(dense(hidden=hidden), steps, batch, dtype), size),
        targets=(Target(ONLINE + SHARE, None, None), Target(BPTT + SHARE, None, None)),
    )


def cases(platform: str) -> list[Case]:
    """Return float32 on a processor; bfloat16 and larger sizes where a matrix unit is."""
    if platform == "cpu":
        return [case("float32", hidden, SIZES["cpu"]) for hidden in (256, 1024)]
    return [
        case(dtype, hidden, SIZES["gpu"])
        for dtype in ("float32", "bfloat16")
        for hidden in (256, 1024, 4096)
    ]
