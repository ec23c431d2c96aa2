"""One process of a long run: ``python -m benchmarks.soak.run FOLDER``.

It goes on from what is saved in the folder, saves now and then, and writes a line about itself
after every part of the stream. Ctrl-C ends it where it is, with everything saved.
"""

import argparse
import gc
import hashlib
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

from . import stream

LOGS_OF_A_PART, PARTS_OF_A_SAVE = 4, 4
RATE = 3e-4
LINES, OUTCOME = "samples.jsonl", "outcome.json"
OnLog = Callable[[int, dict[str, Any]], None]


class Watched:
    """What is seen of this process: its memory, and the programs that it compiles or reads."""

    def __init__(self) -> None:
        self.begun, self.compilations = time.perf_counter(), 0
        control()  # compiles it
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **about: Any) -> None:
        self.compilations += "backend_compile" in event

    def sample(self) -> dict[str, Any]:
        """Return what there is now."""
        arrays = jax.live_arrays()
        return {
            "seconds": time.perf_counter() - self.begun,
            "processor_seconds": time.process_time(),
            "resident": resident_bytes(),
            "arrays": len(arrays),
            "array_bytes": sum(array.nbytes for array in arrays),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "compilations": self.compilations,
        }


def resident_bytes() -> int:
    """Return the memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@jax.jit
def _plain_loop(h: jax.Array) -> jax.Array:
    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ jnp.eye(h.shape[1]) + h), None

    return jax.lax.scan(step, h, length=1000)[0]


def control() -> float:
    """Return the time on a processor of a loop of plain JAX: what others do slows it as well."""
    start = time.process_time()
    jax.block_until_ready(_plain_loop(jnp.zeros((8, 64))))
    return time.process_time() - start


def told(step: int, metrics: dict[str, Any]) -> None:
    """Take note of nothing: that a call is watched is what lets Ctrl-C end it in the middle."""


def learn(folder: Path, steps: int, length: int, on_log: OnLog = told) -> dict[str, Any] | None:
    """Learn what is missing of a stream; return what has come of it, None if interrupted.

    The learner is saved in the folder, with a line after each part of ``length`` steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    watched, learner = Watched(), stream.learner()
    learn_part = learning(learner, length, on_log)
    try:
        done = braintrace.restore(folder / "saved", learner)
    except braintrace.NoCheckpointError:
        done = 0
    with (folder / LINES).open("a") as lines:
        while done < steps:
            try:
                about = learn_part(done)
            except braintrace.Interrupted as interrupt:
                braintrace.save(folder / "saved", learner, extra=done + interrupt.step)
                return None
            done += about["steps"]
            if done // length % PARTS_OF_A_SAVE == 0 or done >= steps:
                braintrace.save(folder / "saved", learner, extra=done)
                about["objects"] = len(gc.get_objects())
            about |= {"process": os.getpid(), "step": done, **watched.sample()}
            print(json.dumps(about), file=lines, flush=True)
    return outcome(learner)


def learning(
    learner: braintrace.Learner, length: int, on_log: OnLog
) -> Callable[[int], dict[str, Any]]:
    """Return what learns from a step on to the end of its part, and says what that took."""
    optimizer = optax.adam(RATE)

    def step_fn(x: Any, target: Any) -> Any:
        return jnp.mean((learner(x) - target) ** 2)

    def learn_part(start: int) -> dict[str, Any]:
        number, skipped = divmod(start, length)
        if number % 4 == stream.RESET and not skipped:
            learner.reset_state()
        now, beside = stream.part(number, length).since(skipped), control()
        clocks = time.perf_counter(), time.process_time()
        with warnings.catch_warnings(action="ignore", category=braintrace.NonFiniteWarning):
            losses = learner.etrace_online(
                now.inputs,
                now.targets,
                step_fn=step_fn,
                optimizer=optimizer,
                mask=now.weights,
                reset=now.begins,
                log_every=length // LOGS_OF_A_PART,
                on_log=on_log,
            )
        loss = float(np.nanmean(losses))
        return {
            "steps": len(losses),
            "loss": loss,
            "call": time.perf_counter() - clocks[0],
            "processor": time.process_time() - clocks[1],
            "control": beside,
        }

    return learn_part


def outcome(learner: braintrace.Learner) -> dict[str, Any]:
    """Return what tells two learners apart."""
    state = learner.functional().state()
    return {
        "parameters": digest(state.parameters),
        "everything": digest(state),
        "skipped updates": int(learner.skipped_updates),
    }


def digest(tree: Any) -> str:
    """Return a number that follows from all bits of some arrays."""
    found = hashlib.sha256()
    for leaf in _arrays(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def _arrays(tree: Any) -> Iterator[jax.Array]:
    for leaf in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        yield jax.random.key_data(leaf) if is_key else leaf


def main() -> None:
    """Run the part of a run that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--part", type=int, required=True)
    options = parser.parse_args()
    # What a shell starts in the background does not hear of Ctrl-C otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = learn(options.folder, options.steps, options.part)
    if found is not None:
        (options.folder / OUTCOME).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
