r"""Bytes of the stored traces.

D_RTRL needs one scalar per weight, sample and hidden state that a later step reads elementwise (per
patch entry and output pixel for a convolution, of the effective matrix for low-rank weights).
ES_D_RTRL needs each filtered input once, and a filtered factor per output and state of every
operation.
"""

from typing import Any

import jax
import jax.numpy as jnp

import braintrace

from ..case import Case, NotOffered, Prepared, Target
from ..networks import NETWORKS
from ..operations import PlainOps
from ..subjects import Task, agreement, learner_of

FLOAT = 4
STORED, NEEDED, REPORTED = "stored bytes", "needed bytes", "reported bytes"


def stored_bytes(learner: Any) -> float:
    """Return the bytes of a learner's traces; counts of steps are not traces."""
    kind = getattr(braintrace, "EligibilityTraces", None)
    if kind is None:
        raise NotOffered("the library does not name the State of its traces")
    leaves = [
        leaf for state in learner.states(kind).values() for leaf in jax.tree.leaves(state.value)
    ]
    return float(sum(leaf.nbytes for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)))


def reported_bytes(learner: Any) -> float:
    """Return what the learner's report says."""
    if not hasattr(learner, "report"):
        raise NotOffered("the learner has no `report`")
    return float(learner.report().stored_bytes)


def needed_bytes(task: Task, algorithm: str) -> float:
    """Return what the definition of an algorithm needs."""
    if algorithm == "d_rtrl":
        return float(FLOAT * task.batch * task.network.trace_elements)
    ops = PlainOps()
    states = task.network.start(task.batch)
    task.network.drive(ops, task.parameters, states, task.data[0][0])
    inputs = sum(x.size for x in ops.inputs.values())
    return float(FLOAT * (inputs + task.batch * task.network.factor_elements))


def prepare(task: Task, algorithm: str) -> Prepared:
    """Return what is stored and what is needed."""

    facts = {
        STORED: lambda: stored_bytes(learner_of(task, algorithm)),
        NEEDED: lambda: needed_bytes(task, algorithm),
    }
    if algorithm == "d_rtrl":
        facts[REPORTED] = lambda: reported_bytes(learner_of(task))
    return Prepared(facts=facts, checks={algorithm: lambda: agreement(task, algorithm)})


def case(network: str, algorithm: str, batch: int = 32, **sizes: int) -> Case:
    """Return the case of one network."""
    # ES_D_RTRL may share the factor of operations whose outputs are added up.
    targets = [Target(STORED, NEEDED, 1.0, equal=algorithm == "d_rtrl")]
    if algorithm == "d_rtrl":
        targets.append(Target(REPORTED, STORED, 1.0, equal=True))
    return Case(
        name=f"trace_bytes/{network},{algorithm}",
        parameters={
            "network": network,
            "algorithm": algorithm,
            "batch": batch,
            **sizes,
        },
        build=lambda: prepare(Task(NETWORKS[network](**sizes), 8, batch), algorithm),
        targets=tuple(targets),
        quick=(network, algorithm) == ("lstm", "d_rtrl"),
    )


def cases(platform: str) -> list[Case]:
    """Return every network with both algorithms."""
    return [case(name, algorithm) for name in NETWORKS for algorithm in ("d_rtrl", "es_d_rtrl")]
