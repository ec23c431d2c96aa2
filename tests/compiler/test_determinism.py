"""Two fresh processes compile a model to the same graph, structure of a state and programs."""

import os
import subprocess
import sys

import places
import pytest

COMPILED = (
    "LSTMPeephole-d_rtrl",
    "PopulationsAsSlices-es_d_rtrl",
    "OneWeightTwoGroups-d_rtrl",
    "Stacked-es_d_rtrl",
)

SCRIPT = """
import sys, warnings
import catalogue, drivers
import jax
import jax.numpy as jnp
import braintrace
from catalogue import BY_NAME
from catalogue import BATCH

case = catalogue.BY_NAME["IndRNN"]
for algorithm, options in (("d_rtrl", {"chunk_size": 4}), ("es_d_rtrl", {"window": 3})):
    learner = drivers.build_learner(case, algorithm)
    drivers.sequence_gradient(learner, case, *case.sequences(2, 6), **options)
learner.etrace_evolve(case.sequences(2, 6)[0])

warnings.simplefilter("ignore", braintrace.ApproximationWarning)
for argument in sys.argv[1:]:
    name, algorithm = argument.split("-")
    entry = BY_NAME[name]
    x = jnp.ones(entry.shape)
    learner = braintrace.compile(entry.module(), algorithm, x, batch_size=BATCH)
    print(learner.graph)
    print(jax.tree.structure(learner.functional().state()))
    compiled = learner.algorithm.compiled
    states = learner.algorithm.states_of_step
    values = [state.value for state in states.values()]
    inputs = compiled.inputs(states, values, (x,))

    def loss(inputs, traces, compiled=compiled):
        outputs, _, _ = compiled.single_step(inputs, traces)
        return sum(leaf.sum() for leaf in jax.tree.leaves(outputs))

    step = jax.jit(jax.grad(loss))
    print(step.lower(inputs, learner.algorithm.traces.value).as_text())
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What each of two processes prints, and the compiled programs that lie there after it."""
    folder = tmp_path_factory.mktemp("programs")
    search = [places.SEARCHED, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run(hash_seed):
        finished = subprocess.run(
            [sys.executable, "-c", SCRIPT, *COMPILED],
            env={**environment, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout, {path.name for path in folder.glob("*-cache")}

    return run("1"), run("6")  # under which small numbers and names hash to other orders


@pytest.mark.core
def test_graph_trace_keys_and_program_do_not_depend_on_the_process(processes):
    (first, _), (second, _) = processes
    assert first.count("stablehlo.dot_general") > 0
    assert "w@" in first or "gates@" in first
    assert first == second


@pytest.mark.core
def test_a_second_process_compiles_nothing(processes):
    (_, after_first), (_, after_second) = processes
    assert any("sequence" in name for name in after_first)
    assert after_second == after_first
