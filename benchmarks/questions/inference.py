"""Prediction, and losses at few steps.

``predict`` is compared with the bare model in a jitted ``jax.lax.scan``. For the mask, the network
has one output per unit, so that the readout is a visible part of the work.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import oracles
from ..case import Case, NotOffered, Prepared, Subject, Target
from ..networks import NETWORKS, dense
from ..operations import PlainOps
from ..subjects import Task, learner_of, named, step_function

HIDDEN, BATCH = 256, 32
BARE, PREDICT = "bare model", "predict"
ALL, LAST, NO_READOUT = (
    "loss at every step",
    "loss at the last step",
    "10 outputs, last step",
)


def bare_function(task: Task) -> Any:
    """Compile the plain model over a sequence."""

    def run(parameters: Any, xs: Any) -> Any:
        def step(states: Any, x: Any) -> Any:
            return task.network.step(PlainOps(), parameters, states, x)

        return jax.lax.scan(step, task.network.start(task.batch), xs)[1]

    return jax.jit(run)


def bare(task: Task) -> Subject:
    """Run the plain model."""
    run, parameters, xs = bare_function(task), task.parameters, task.data[0]
    return Subject(lambda: run(parameters, xs))


def predict(task: Task) -> Subject:
    """Run ``predict`` from fresh states."""
    learner, xs = learner_of(task), task.data[0]
    if not hasattr(learner, "predict"):
        raise NotOffered("the learner has no `predict`")

    def deviation(outputs: Any) -> float:
        expected = bare_function(task)(task.parameters, xs)
        return oracles.deviation({"outputs": outputs}, {"outputs": expected})

    return Subject(
        lambda: learner.predict(xs),
        before=lambda: learner.reset_state(task.batch),
        deviation=deviation,
        tolerance=task.tolerance,
    )


def masked(task: Task, mask: Any) -> Subject:
    """Run a sequence gradient with weights of the steps."""
    learner, data = learner_of(task), task.data
    step = step_function(learner)

    def deviation(found: Any) -> float:
        gradient = jax.jit(oracles.bptt(task.network, cut_mixing=True))
        return oracles.deviation(named(found), gradient(task.parameters, *data, mask)[1])

    return Subject(
        lambda: learner.etrace_grad(*data, step_fn=step, mask=mask),
        before=lambda: learner.reset_state(task.batch),
        deviation=deviation,
        tolerance=task.tolerance,
    )


def predict_case(network: str, steps: int, batch: int = BATCH, hidden: int = HIDDEN) -> Case:
    """Return the case of ``predict``."""

    def build() -> Prepared:
        task = Task(NETWORKS[network](hidden=hidden), steps, batch)
        return Prepared({BARE: lambda: bare(task), PREDICT: lambda: predict(task)})

    return Case(
        name=f"inference/{network},T={steps}",
        parameters={"network": network, "steps": steps, "hidden": hidden, "batch": batch},
        build=build,
        targets=(Target(PREDICT, BARE, 1.1),),
        quick=(network, steps) == ("dense", 64),
    )


def mask_case(steps: int, hidden: int = HIDDEN, batch: int = BATCH, outputs: int = 1024) -> Case:
    """Return the case of a loss at the last step only."""

    def build() -> Prepared:
        wide = Task(dense(hidden=hidden, outputs=outputs), steps, batch)
        narrow = Task(dense(hidden=hidden), steps, batch)
        every, last = jnp.ones(steps), jnp.zeros(steps).at[-1].set(1.0)
        return Prepared(
            {
                ALL: lambda: masked(wide, every),
                LAST: lambda: masked(wide, last),
                NO_READOUT: lambda: masked(narrow, last),
            }
        )

    return Case(
        name=f"inference/mask,T={steps}",
        parameters={
            "steps": steps,
            "hidden": hidden,
            "batch": batch,
            "outputs": outputs,
        },
        build=build,
        targets=(Target(LAST, ALL, 1.0), Target(LAST, NO_READOUT, None)),
        quick=steps == 64,
    )


def cases(platform: str) -> list[Case]:
    """Return short and long sequences."""
    return [
        *(predict_case(network, steps) for network in ("dense", "lstm") for steps in (64, 512)),
        *(mask_case(steps) for steps in (64, 512)),
    ]
