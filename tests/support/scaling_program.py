"""Compare what scaling is computed from with programs for simulated devices; print lines of JSON.

Run by `test_scaling.py`. A line has what is predicted and what is found of a network on a mesh.
"""

import itertools
import json

import compilation

from benchmarks.scaling import cases, counted

UNITS, BATCH = 48, 16


def compared(network, rule, every, parts):
    """Return pairs: what is predicted of a device, and what its program does."""
    _, compiled = counted.compiled_for(network, rule, every, parts, BATCH)
    memory = compiled.memory_analysis()
    mesh = dict(zip(("data", "model"), parts, strict=True))
    plan = cases.plan_of(network, rule, BATCH, every, mesh)
    others = 0 if every > 1 else 3 * BATCH // parts[0] * network.inputs * 4  # of a plan: one step
    return {
        "arguments": (plan.arguments + others, memory.argument_size_in_bytes),
        "results": (plan.results, memory.output_size_in_bytes),
    }


def messages(network, rule, every, parts):
    """Return bytes of messages as they follow from those of eight devices and other sizes."""
    known = tuple(8 if count > 1 else 1 for count in parts)
    factors = counted.factors(counted.messages_of_sizes(network, rule, every, known))
    found = counted.messages_of(network, rule, every, parts, BATCH)
    expected = sum(factors[f"of {part}"] * found[part] for part in counted.PARTS)
    return {
        "bytes of messages": (expected, found["bytes"]),
        "messages of a step": (factors["by step"], found["by step"]),
    }


def main():
    kinds = {(case.network.kind, case.rule): case.network.small(UNITS) for case in cases.CASES}
    for ((kind, rule), network), every, devices in itertools.product(
        kinds.items(), (1, counted.SMALL_EVERY), (1, 2, 4, 8)
    ):
        # Along the other axis what XLA sends depends on the size of fused gates, and a plan takes
        # the optimizer's state of a readout for divided.
        over_model = {(1, devices)} if kind == "leaky" else set()
        for parts in {(devices, 1)} | over_model:
            found = compared(network, rule, every, parts)
            if devices > 1:
                found |= messages(network, rule, every, parts)
            about = {"kind": kind, "rule": rule, "every": every, "mesh": parts}
            print(json.dumps(about | {"found": found}), flush=True)


if __name__ == "__main__":
    compilation.compile_in_a_hurry()
    main()
