"""Count what scaling is computed from: ``python -m benchmarks.scaling.counted --out FILE``.

Messages are counted in programs for eight simulated devices, everything else by
`braintrace.plan`, which needs no device.
"""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import braintrace

from ..collectives import Message, sent
from . import cases
from .cases import CASES, UPDATES, Case, Network
from .times import ACTIVITY, PARTS

DEVICES = (1, 4, 8, 16, 64, 256, 1024)
OF_A_HOST = 8
SMALL, SMALL_EVERY = ((32, 8), (64, 8), (96, 8), (64, 16)), 10
"""Units and samples of small networks, and the steps of their updates."""

SMALL_BATCH = 8
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
FIELDS = ("parameters", "traces", "records", "arguments", "results", "total", "flops")
Counts = dict[str, Any]


def compiled_for(
    network: Network, rule: str, every: int, parts: tuple[int, int], batch: int = SMALL_BATCH
) -> tuple[braintrace.Learner, Any]:
    """Return a learner on a mesh of simulated devices, and its stream as compiled.

    Its length is one update, or a few where these come after every step.
    """
    learner = cases.learner_of(network, rule, batch)
    count = math.prod(parts)
    mesh = Mesh(np.asarray(jax.devices()[:count]).reshape(parts), ("data", "model"))
    braintrace.shard(learner, mesh, model="model")
    steps = every if every > 1 else 4
    xs = jax.ShapeDtypeStruct((steps, batch, network.inputs), jnp.float32)

    def step_fn(x: Any) -> Any:
        return jnp.mean(learner(x) ** 2)

    lowered = learner.lower(
        "etrace_online", xs, step_fn=step_fn, optimizer=cases.adam(), every=every
    )
    return learner, lowered.compile()


def messages_of(
    network: Network, rule: str, every: int, parts: tuple[int, int], batch: int = SMALL_BATCH
) -> Counts:
    """Return how many messages a mesh of simulated devices sends, and the bytes of an update.

    What is sent once a call, and not at every step, counts for an update where a call has one.
    Along ``model``, where most messages collect, one that adds up counts twice.
    """
    learner, compiled = compiled_for(network, rule, every, parts, batch)
    is_sum = parts[0] > 1
    found = [message if is_sum else _as_collected(message) for message in sent(compiled)]
    of_steps = [message for message in found if message.is_by_step]
    of_updates = [m for m in found if not m.is_by_step] if every > 1 else []
    size = every * sum(m.size for m in of_steps) + sum(m.size for m in of_updates)
    return {
        "by step": len(of_steps),
        "by update": len(of_updates),
        "bytes": size,
        "activity": ACTIVITY * network.units * batch * every,
        "parameters": sum(
            w.nbytes for w in jax.tree.leaves(learner.parts.parameters_for_optimizer())
        )
        - network.readout,
        "readout": network.readout,
    }


def _as_collected(message: Message) -> Message:
    times = 2 if message.kind == "all-reduce" else 1
    return dataclasses.replace(message, size=times * message.size)


def factors(sizes: Sequence[Counts]) -> Counts:
    """Return messages with their bytes as multiples of those of `PARTS`.

    Some bytes are none of these, and are left out: losses, outputs.

    Parameters
    ----------
    sizes
        What `messages_of` finds for the sizes of a network.
    """
    equations = [[*(found[part] for part in PARTS), 1.0] for found in sizes]
    solved = np.linalg.lstsq(equations, [found["bytes"] for found in sizes])[0]
    counts = {key: sizes[-1][key] for key in ("by step", "by update")}
    factors = {
        f"of {part}": round(float(n), 3) + 0.0 for part, n in zip(PARTS, solved, strict=False)
    }
    return {**counts, **factors}


def messages_of_sizes(
    network: Network, rule: str, every: int, parts: tuple[int, int]
) -> list[Counts]:
    """Return the messages of a network in several sizes."""
    return [messages_of(network.small(units), rule, every, parts, batch) for units, batch in SMALL]


def all_messages() -> Iterator[Counts]:
    """Yield the messages of every kind of network, rule and number of steps of an update."""
    kinds = {(case.network.kind, case.rule): case.network for case in CASES}
    for (_, rule), network in kinds.items():
        yield from messages_of_kind(network, rule)


def messages_of_kind(network: Network, rule: str) -> Iterator[Counts]:
    """Yield the messages of a kind of network and a rule."""
    whole = list(whole_along_model(network.small(SMALL[0][0]), rule))
    for every in (1, SMALL_EVERY):
        found = {}
        for axis, parts in {"data": (8, 1), "model": (1, 8)}.items():
            found[axis] = factors(messages_of_sizes(network, rule, every, parts))
        yield {"kind": network.kind, "rule": rule, "every": every, "whole": whole, **found}


def whole_along_model(network: Network, rule: str) -> tuple[str, ...]:
    """Return what of a network is not divided along ``model``."""
    learner = cases.learner_of(network, rule, SMALL_BATCH)
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, -1), ("data", "model"))
    braintrace.shard(learner, mesh, model="model")
    return learner.report().whole


def meshes_of(case: Case) -> Iterator[tuple[str, str, int, dict[str, int]]]:
    """Yield the way to scale, what is divided, the number of samples, and the mesh."""
    for devices in DEVICES:
        over_data = {"data": devices, "model": 1}
        yield "weak", "samples", case.each * devices, over_data
        if case.by_model:
            yield "strong", "units", case.together, {"data": 1, "model": devices}
            continue
        yield "strong", "samples", case.together, over_data
        if devices >= OF_A_HOST:
            over_both = {"data": devices // OF_A_HOST, "model": OF_A_HOST}
            yield "weak", "both", case.each * devices, over_both
            yield "strong", "both", case.together, over_both


def all_plans(case: Case) -> Iterator[Counts]:
    """Yield what a device does for each mesh; the same samples of a device are planned once."""
    known: dict[tuple[int, int, int], Mapping[str, int]] = {}
    for way, divided, batch, mesh in meshes_of(case):
        for every in UPDATES:
            each, model = batch // mesh["data"], mesh["model"]
            if each * mesh["data"] != batch:
                continue
            key = (each, model, every)
            if key not in known:
                alone = {"data": 1, "model": model}
                plan = cases.plan_of(case.network, case.rule, each, every, alone)
                known[key] = {field: getattr(plan, field) for field in FIELDS}
            about = {"way": way, "divided": divided, "every": every, "samples": each}
            yield {**about, **mesh, **known[key]}


def count() -> Counts:
    """Return everything that is counted."""
    return {"messages": list(all_messages()), "cases": list(map(planned, CASES))}


def planned(case: Case) -> Counts:
    """Return what a case is, and what a device does in it."""
    plans = list(all_plans(case))
    return {
        "name": case.name,
        "rule": case.rule,
        "each": case.each,
        "together": case.together,
        **dataclasses.asdict(case.network),
        "parameters": next(plan["parameters"] for plan in plans if plan["model"] == 1),
        "readout": case.network.readout,
        "plans": plans,
    }


def main() -> None:
    """Count, and write what is found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling.counted", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    options.out.write_text(json.dumps(count()))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    main()
