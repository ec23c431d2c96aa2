"""Time the first calls of a stack in this process: ``python -m benchmarks.fresh --help``."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from . import ways
from .stack import StackTask
from .stack_oracles import Layers

Seconds = dict[str, float]


def _online(task: StackTask, model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    learner = ways.learner_of(task, "d_rtrl", model)
    return ways.from_zero(task, learner), ways.sequence_gradient(task, learner)


def _bptt(task: StackTask, model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    gradient = ways.bptt_gradient(task, model)
    return gradient, gradient


WAYS: Mapping[str, Callable[..., tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "BPTT": _bptt,
    "D_RTRL, auto": _online,
}
LABELS = tuple(label for way in WAYS for label in (way, f"{way}, and once more"))


def first_calls(task: StackTask, way: str) -> Seconds:
    """Return the seconds from the model to the first gradient, and to the second."""
    model = task.model()
    jax.block_until_ready((task.data, [state.value for state in model.states().values()]))
    start = time.perf_counter()
    first, again = WAYS[way](task, model)
    jax.block_until_ready(first())
    once = time.perf_counter() - start
    jax.block_until_ready(again())
    return {way: once, f"{way}, and once more": time.perf_counter() - start}


def main() -> None:
    """Time the way that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fresh", description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("cell", help="name in braintrace.nn")
    for size in ("layers", "hidden", "steps", "batch"):
        parser.add_argument(size, type=int)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    layers = Layers(options.cell, options.layers, options.hidden)
    task = StackTask(layers, options.steps, options.batch)
    options.out.write_text(json.dumps(first_calls(task, options.way)))


if __name__ == "__main__":
    main()
