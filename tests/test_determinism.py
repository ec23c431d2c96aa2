"""Two fresh processes compile a model to the same graph, trace keys and program."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
NAMES = ("LSTMPeephole", "PopulationsAsSlices", "OneWeightTwoGroups", "Stacked")

SCRIPT = """
import sys, warnings
import jax
import jax.numpy as jnp
import braintrace
from zoo import BY_NAME
from zoo_record import BATCH

warnings.simplefilter("ignore", braintrace.ApproximationWarning)
for name in sys.argv[1:]:
    entry = BY_NAME[name]
    x = jnp.ones(entry.shape)
    for algorithm in ("d_rtrl", "es_d_rtrl"):
        learner = braintrace.compile(entry.module(), algorithm, x, batch_size=BATCH)
        print(learner.graph)
        print(jax.tree.structure(learner.algorithm.traces.value))
        compiled = learner.algorithm.compiled
        inputs = compiled.inputs(learner.algorithm.states_of_step, (x,))

        def loss(inputs, traces, compiled=compiled):
            outputs, _, _ = compiled.single_step(inputs, traces)
            return sum(leaf.sum() for leaf in jax.tree.leaves(outputs))

        step = jax.jit(jax.grad(loss))
        print(step.lower(inputs, learner.algorithm.traces.value).as_text())
"""


def compiled_text(hash_seed):
    search = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(search),
        "JAX_PLATFORMS": "cpu",
    }
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, *NAMES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.core
def test_graph_trace_keys_and_program_do_not_depend_on_the_process():
    first, second = compiled_text(1), compiled_text(2)
    assert first.count("stablehlo.dot_general") > 0
    assert "w@" in first or "gates@" in first
    assert first == second
