"""GPU programs: bytes and kernels, without a GPU.

XLA compiles for an NVIDIA H200 from its description (`benchmarks/gpu_programs.py`). For a step of
online learning, the table counts the bytes that all kernels read and write, relative to one pass
over the trace. For a sequence gradient, it counts kernels relative to BPTT. Nothing is timed. The
count needs ``pip install "jax[cuda12]"`` and no GPU.
"""

from typing import Any

from ..case import Case, Prepared, Target
from ..gpu_programs import bytes_moved, compile_for_gpu, kernels_started
from ..networks import NETWORKS
from ..subjects import Task, bptt_of, learner_of, step_function, without_states
from . import streaming

STEP, PASS = "bytes that a step moves", "bytes that a pass moves"
OWN, ES_OWN, BPTT = "kernels of D_RTRL", "kernels of ES_D_RTRL", "kernels of BPTT"


def bytes_of_step(task: Task) -> float:
    """Return the bytes of a step with states and traces updated in place."""
    now = [sequence[0] for sequence in task.data]
    run, *values = streaming.pure_step(streaming.Stream(task).step, *now)
    return float(bytes_moved(compile_for_gpu(run, *values, *now, donate=(0,))))


def bytes_of_pass(task: Task) -> float:
    """Return what reading and writing the traces once moves."""
    return float(2 * sum(leaf.nbytes for leaf in streaming.traces_of(task)))


def kernels_of_sequence(task: Task, algorithm: str) -> float:
    """Return the kernels of ``etrace_grad`` from fresh states, the traces after it included."""
    learner = learner_of(task, algorithm)
    step = step_function(learner)

    def gradient(xs: Any, targets: Any) -> Any:
        learner.reset_state(task.batch)
        return learner.etrace_grad(xs, targets, step_fn=step)

    pure, states = without_states(gradient, *task.data)
    values = [state.value for state in states]
    return float(kernels_started(compile_for_gpu(pure, values, *task.data)))


def kernels_of_bptt(task: Task) -> float:
    """Return the kernels of backpropagation through time of the plain network."""
    program = compile_for_gpu(bptt_of(task.network), task.parameters, *task.data)
    return float(kernels_started(program))


def _task(network: str, hidden: int, *others: Any) -> Task:
    """Return a task; the size of the convolution is its own."""
    sizes = {} if network == "conv" else {"hidden": hidden}
    return Task(NETWORKS[network](**sizes), *others)


def step_case(network: str, hidden: int, batch: int, dtype: str = "float32") -> Case:
    """Return the case of one step."""

    def build() -> Prepared:
        task = _task(network, hidden, 4, batch, dtype)
        return Prepared(
            facts={STEP: lambda: bytes_of_step(task), PASS: lambda: bytes_of_pass(task)}
        )

    return Case(
        name=f"gpu_program/step,{network},H={hidden},B={batch},{dtype}",
        parameters={"network": network, "hidden": hidden, "batch": batch, "dtype": dtype},
        build=build,
        targets=(Target(STEP, PASS, streaming.LIMITS["gpu"]),),
    )


def sequence_case(network: str, hidden: int, batch: int, steps: int) -> Case:
    """Return the case of a sequence gradient."""

    def build() -> Prepared:
        task = _task(network, hidden, steps, batch)
        facts = {
            OWN: lambda: kernels_of_sequence(task, "d_rtrl"),
            ES_OWN: lambda: kernels_of_sequence(task, "es_d_rtrl"),
            BPTT: lambda: kernels_of_bptt(task),
        }
        return Prepared(facts=facts)

    return Case(
        name=f"gpu_program/sequence,{network},H={hidden},B={batch},T={steps}",
        parameters={"network": network, "hidden": hidden, "batch": batch, "steps": steps},
        build=build,
        targets=(Target(OWN, BPTT, 1.0), Target(ES_OWN, BPTT, 1.0)),
    )


def cases(platform: str) -> list[Case]:
    """Return steps of several sizes, and a sequence of every network."""
    sizes = [("dense", 1024, batch) for batch in (1, 8, 32, 128)]
    sizes += [("dense", 256, 32), ("dense", 4096, 32), ("alif", 1024, 32)]
    sizes += [(network, 256, 32) for network in ("lstm", "conv", "lora", "element_wise", "sparse")]
    return [
        *(step_case(*size) for size in sizes),
        step_case("dense", 1024, 32, "bfloat16"),
        *(sequence_case(network, 256, 32, 64) for network in NETWORKS),
    ]
