"""One process of a long run: ``python -m benchmarks.soak.run FOLDER``.

It continues from what is saved in the folder, saves every few parts of the stream, and writes a
line about itself after every part. Ctrl-C ends it where it is, with everything saved.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

from ..questions.saving import arrays_of

DELAY, BATCH, INPUTS, UNITS = 3, 8, 2, 24
NOISE, RATE = 0.05, 3e-4
BEGINNING, NOT_COUNTED = 0.002, 0.1
"""Of samples and steps: how many begin anew, and how many do not count."""

NOT_FINITE, RESET = 1, 2
"""Of four parts, one has inputs that are not numbers; before another all samples begin anew."""

LOGS_OF_A_PART, PARTS_OF_A_SAVE = 4, 4
LINES, OUTCOME = "samples.jsonl", "outcome.json"
OnLog = Callable[[int, dict[str, Any]], None]


def part(number: int, steps: int) -> tuple[np.ndarray, ...]:
    """Return inputs, targets, weights and flags; the target is an earlier first input."""
    before, signs = (
        np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (steps, BATCH, INPUTS))
        for seed in (number, number + 1)
    )
    random = np.random.default_rng([number, 0])
    targets = np.concatenate([before[-DELAY:], signs])[:-DELAY, :, 0]
    if number % 4 == NOT_FINITE:
        signs[random.integers(steps, size=2), random.integers(BATCH, size=2)] = np.nan
    weights = (random.random(steps) >= NOT_COUNTED).astype(np.float32)
    return signs, targets, weights, random.random((steps, BATCH)) < BEGINNING


class Network(brainstate.nn.Module):
    """A cell and a readout, with noise on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 1)

    def update(self, x: Any) -> Any:
        noise = NOISE * brainstate.random.randn(*x.shape)
        return self.readout(self.cell(x + noise))[..., 0]


def new_learner() -> braintrace.Learner:
    """Return a learner that is the same in every process."""
    brainstate.random.seed(0)
    return braintrace.compile(Network(), "d_rtrl", jnp.zeros((BATCH, INPUTS)), batch_size=BATCH)


@jax.jit
def _plain_loop(h: jax.Array) -> jax.Array:
    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ jnp.eye(h.shape[1]) + h), None

    return jax.lax.scan(step, h, length=1000)[0]


def control() -> float:
    """Return the time on the processor of a loop of plain JAX."""
    start = time.process_time()
    jax.block_until_ready(_plain_loop(jnp.zeros((8, 64))))
    return time.process_time() - start


class Watched:
    """The memory of this process, and the programs that it compiles or reads."""

    def __init__(self) -> None:
        self.compilations = 0
        control()  # compiles it
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **about: Any) -> None:
        self.compilations += "backend_compile" in event

    def sample(self) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        arrays = jax.live_arrays()
        return {
            "process": os.getpid(),
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "arrays": len(arrays),
            "array_bytes": sum(array.nbytes for array in arrays),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "compilations": self.compilations,
        }


def ignored(step: int, metrics: dict[str, Any]) -> None:
    """Do nothing: Ctrl-C can end a call between two calls of this function."""


def learn(folder: Path, steps: int, length: int, on_log: OnLog = ignored) -> dict[str, Any] | None:
    """Learn the missing part of a stream; return the outcome, None if interrupted.

    The learner is saved in the folder, with a line after each part of ``length`` steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    watched, learner = Watched(), new_learner()
    learn_part = learning(learner, length, on_log)
    try:
        done = braintrace.restore(folder / "saved", learner)
    except braintrace.NoCheckpointError:
        done = 0
    with (folder / LINES).open("a") as lines:
        while done < steps:
            beside, start = control(), time.process_time()
            try:
                losses = learn_part(done)
                done += len(losses)
                jax.block_until_ready(losses)
                relative_time = (time.process_time() - start) / len(losses) / beside
                if done // length % PARTS_OF_A_SAVE == 0 or done >= steps:
                    braintrace.save(folder / "saved", learner, extra=done)
            except KeyboardInterrupt as interrupt:  # inside a call, it has the number of steps
                done += getattr(interrupt, "step", 0)
                braintrace.save(folder / "saved", learner, extra=done)
                return None
            about = {"step": done, "relative_time": relative_time, **watched.sample()}
            print(json.dumps(about), file=lines, flush=True)
    return outcome(learner)


def learning(learner: braintrace.Learner, length: int, on_log: OnLog) -> Callable[[int], Any]:
    """Return what learns from a step to the end of its part, and gives the losses."""
    optimizer = optax.adam(RATE)

    def step_fn(x: Any, target: Any) -> Any:
        return jnp.mean((learner(x) - target) ** 2)

    def learn_part(start: int) -> Any:
        number, skipped = divmod(start, length)
        if number % 4 == RESET and not skipped:
            learner.reset_state()
        inputs, targets, weights, begins = (array[skipped:] for array in part(number, length))
        with warnings.catch_warnings(action="ignore", category=braintrace.NonFiniteWarning):
            return learner.etrace_online(
                inputs,
                targets,
                step_fn=step_fn,
                optimizer=optimizer,
                mask=weights,
                reset=begins,
                log_every=length // LOGS_OF_A_PART,
                on_log=on_log,
            )

    return learn_part


def outcome(learner: braintrace.Learner) -> dict[str, Any]:
    """Return numbers in which two different learners differ."""
    state = learner.functional().state()
    return {
        "parameters": digest(state.parameters),
        "everything": digest(state),
        "skipped updates": int(learner.skipped_updates),
    }


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for array in arrays_of(tree).values():
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--part", type=int, required=True)
    options = parser.parse_args()
    # A process that a shell starts in the background ignores Ctrl-C otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = learn(options.folder, options.steps, options.part)
    if found is not None:
        (options.folder / OUTCOME).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
