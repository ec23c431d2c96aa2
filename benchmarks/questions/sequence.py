"""Gradient of a sequence: one leaky layer.

A leaky tanh RNN with an ordinary readout and a loss at every step. BPTT is the jitted
``jax.value_and_grad`` of the scanned plain model. The library runs ``reset_state`` and then
``etrace_grad``; "without reset" omits the reset, like the hand-written programs, which start from
zeros. "Matrix products" are those of `D_RTRL` alone, one recurrent product a step.
"""

import itertools
from functools import partial
from typing import Any

import jax

from .. import handwritten, subjects
from ..case import Case, Subject, Subjects, Target
from ..handwritten_windows import split_inputs
from ..networks import dense
from ..subjects import Task

STEPS, HIDDEN, BATCHES = (64, 512), (256, 1024), (1, 32, 128)
MORE_SIZES = (
    [(steps, 256, 32) for steps in (16, 128, 256, 1024)]
    + [(64, hidden, 32) for hidden in (128, 512, 2048)]
    + [(64, 256, batch) for batch in (4, 512)]
)
PRODUCTS = "matrix products"
TARGETS = (
    Target("D_RTRL, one chunk", "BPTT", 1.0),
    Target("D_RTRL, auto", "BPTT", 1.2),
    Target("D_RTRL, chunks of 16", "BPTT", None),
    Target("D_RTRL, one chunk", PRODUCTS, None),
    Target("ES_D_RTRL, auto", "BPTT", 1.0),
    Target("ES_D_RTRL, one chunk", "BPTT", 1.0),
    Target("D_RTRL, one chunk, without reset", "BPTT", None),
    Target("D_RTRL, auto, without reset", "BPTT", None),
    Target("ES_D_RTRL, auto, without reset", "BPTT", None),
    Target("D_RTRL, one chunk, without reset", "hand-written, one chunk", 1.15),
    Target("D_RTRL, chunks of 16, without reset", "hand-written, chunks of 16", 1.15),
)


def products(task: Task) -> Subject:
    """Time the matrix products of `D_RTRL` alone, in one chunk."""
    small = jax.tree.map(lambda weight: 0.5 * weight, task.network.parameters())

    @jax.jit
    def run(p: Any, xs: Any) -> Any:
        def step(h: Any, drive: Any) -> Any:
            new = h @ p["w_rec"] + drive
            return new, new

        first = task.network.start(task.batch)["h"]
        states = jax.lax.scan(step, first, xs @ p["w_in"])[1]
        x, h = (part.reshape(-1, part.shape[-1]) for part in (xs, states))
        output = h @ p["w_out"]
        signal = output @ p["w_out"].T
        return x.T @ signal, h.T @ signal, h.T @ output

    return Subject(lambda: run(small, task.data[0]))


def compared(task: Task) -> Subjects:
    by_hand = partial(subjects.by_hand, task)
    in_chunks = partial(split_inputs, length=16, part=handwritten.of_chunk)
    found: Subjects = {
        "BPTT": partial(by_hand, subjects.plain_bptt, "bptt"),
        PRODUCTS: partial(products, task),
        "hand-written, one chunk": partial(by_hand, handwritten.one_chunk),
        "hand-written, chunks of 16": partial(by_hand, in_chunks),
    }
    ways: dict[str, Any] = {"one chunk": task.steps, "auto": "auto"}
    for algorithm, sizes in (("d_rtrl", ways | {"chunks of 16": 16}), ("es_d_rtrl", ways)):
        for size, chunk in sizes.items():
            label = f"{algorithm.upper()}, {size}"
            found[label] = partial(subjects.online, task, algorithm, chunk)
            found[f"{label}, without reset"] = partial(
                subjects.online, task, algorithm, chunk, count_reset=False
            )
    return found


def case(steps: int, hidden: int, batch: int) -> Case:
    task = Task(dense(hidden=hidden), steps, batch)
    return Case(
        f"sequence/T={steps},H={hidden},B={batch}",
        compared(task),
        TARGETS,
        quick=(steps, hidden, batch) == (64, 256, 32),
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return the sizes of the targets, and some between them."""
    sizes = [*itertools.product(STEPS, HIDDEN, BATCHES), *MORE_SIZES]
    if platform != "cpu":
        sizes += [(64, 1024, 256), (64, 4096, 32), (64, 4096, 128)]
    return [case(*size) for size in sizes]
