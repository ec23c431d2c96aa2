"""Large sparse network on eight devices.

Every neuron has 100 inputs; synapses and their traces are sharded with their target neurons. One
processor simulates eight devices in a separate process, in float64, where rounding moves no spike:
a stream and a sequence gradient equal the results of one device. "As planned" is the result of
``braintrace.plan`` for the same program. Communication is counted in the compiled programs; with
two states, spikes are sent once for the neurons and once for the traces. Nothing is timed, because
the devices share the cores.
"""

import functools
from collections.abc import Callable
from typing import Any

from .. import processes
from ..case import Case, Prepared, Target
from ..spiking import Net, SpikingTask
from .sparse_nets import LARGE

DEVICES, DOUBLE = 8, 8
TOLERANCE = 1e-9
HELD, ON_ONE = "bytes of synapses and traces on a device", "on one device alone"
SENT, SPIKES = "bytes sent in a step of a stream", "bytes of the spikes"
STREAM, GRADIENT = "memory of a stream, on a device", "memory of a gradient, on a device"
PLANNED, WITH_COLLECTIVES = "as planned", 1.2  # a plan has no buffers of collectives
PEAK = "peak memory of the process, GiB"
METHODS = {STREAM: "etrace_online", GRADIENT: "etrace_grad"}

Row = tuple[str, SpikingTask]
ROWS: tuple[Row, ...] = (
    ("d_rtrl", SpikingTask(Net("ALIF", LARGE, 100), 8, 1)),
    ("es_d_rtrl", SpikingTask(Net("LIF", LARGE, 100), 8, 1)),
)


def prepare(rule: str, task: SpikingTask) -> Prepared:
    """Return what is found out about a net."""
    sizes = map(str, (task.net.neurons, task.net.fan_out, task.steps, task.batch))

    @functools.cache
    def found() -> dict[str, Any]:
        return processes.run_module(
            processes.OWN, "divided_net", rule, task.net.neuron, *sizes, devices=DEVICES
        )

    def stored(name: str) -> float:
        return sum(found()[name]["held"].values())

    facts: dict[str, Callable[[], float]] = {
        HELD: lambda: stored("every"),
        ON_ONE: lambda: stored("one"),
        SENT: lambda: found()["every"]["programs"]["etrace_online"].get("bytes a step", 0.0),
        SPIKES: lambda: float(DOUBLE * task.net.neurons * task.batch),
        PEAK: lambda: found()["peak bytes"] / 2**30,
    }
    for label, method in METHODS.items():
        of_program = functools.partial(lambda m: found()["every"]["programs"][m]["total"], method)
        of_plan = functools.partial(lambda m: found()["plans"][m]["total"], method)
        facts |= {label: of_program, f"{label}, {PLANNED}": of_plan}
    checks = {
        what: functools.partial(lambda what: (found()["deviation"][what], TOLERANCE), what)
        for what in (*METHODS.values(), "state")
    }
    return Prepared(facts=facts, checks=checks)


def case(rule: str, task: SpikingTask) -> Case:
    """Return the case of one net and rule."""
    net = task.net
    return Case(
        name=f"sparse_on_devices/{rule},{net.neuron},N={net.neurons},K={net.fan_out}",
        parameters={
            "rule": rule,
            "network": net.neuron,
            "neurons": net.neurons,
            "synapses": net.entries,
            "steps": task.steps,
            "batch": task.batch,
            "devices": DEVICES,
        },
        build=lambda: prepare(rule, task),
        targets=(
            Target(HELD, ON_ONE, 1 / DEVICES if rule == "d_rtrl" else None, equal=True),
            Target(STREAM, f"{STREAM}, {PLANNED}", WITH_COLLECTIVES),
            Target(GRADIENT, f"{GRADIENT}, {PLANNED}", WITH_COLLECTIVES),
            Target(SENT, SPIKES, 2.01),
            Target(PEAK, None, 12.0),
        ),
    )


def cases(platform: str) -> list[Case]:
    """Return the large nets, on a processor alone."""
    return [case(*row) for row in ROWS] if platform == "cpu" else []
