"""Count what learners send between eight CPU devices; print it, a line of JSON for each case.

Run by `test_sharding.py`, with arguments like those of `sharding_program`. The table of
`docs/_generated/collectives.md` is what this prints for ``table``, with
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import dataclasses
import itertools
import json
import sys

import brainstate
import collectives
import jax
import jax.numpy as jnp
import sharding_program
from sharding_program import (
    MESHES,
    MODELS,
    has_states,
    learner_of,
    loss_of,
    mesh_of,
    share_of,
)

import braintrace


def count(name, parts, rule="d_rtrl", states=1, vmap=False, only=None):
    """Return the messages of the model alone, of the traces' update, of gradients, of a stream."""
    learner, xs = learner_of(name, rule, states, vmap)
    braintrace.shard(learner, mesh_of(parts), model="model")
    functional, loss = learner.functional(), loss_of(learner)
    weights = learner.algorithm.model.states(brainstate.ParamState)

    def descend(gradients):
        for path, weight in weights.items():
            step = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])
            weight.value = step

    def plain(state, xs):
        return functional.predict(state, xs)

    def plain_gradient(state, xs):
        def total(parameters):
            _, outputs = plain(dataclasses.replace(state, parameters=parameters), xs)
            return jnp.mean(outputs**2)

        return jax.grad(total)(state.parameters)

    programs = {
        "model": plain,
        "model backwards": plain_gradient,
        "traces": lambda state, xs: functional.evolve(state, xs),
        "gradient": lambda state, xs: functional.grad(state, xs, step_fn=loss),
        "chunks": lambda state, xs: functional.grad(state, xs, step_fn=loss, chunk_size=2),
        "stream": lambda state, xs: functional.online(state, xs, step_fn=loss, update_fn=descend),
    }
    state = functional.state()
    xs = learner.algorithm.placement.by_sample(xs, axis=1)
    found = {
        what: collectives.messages(jax.jit(program).lower(state, xs).compile())
        for what, program in programs.items()
        if only is None or what in only
    }
    traces = [leaf for leaf in jax.tree.leaves(state.traces) if leaf.ndim > 1]
    arrays = {"traces": traces, "hidden": state.hidden, "parameters": state.parameters}
    case = {"model": name, "mesh": parts, "rule": rule, "states": states, "vmap": vmap}
    bytes_ = {what: in_all_and_on_a_device(tree) for what, tree in arrays.items()}
    return {"case": case, "bytes": bytes_, "messages": found}


def in_all_and_on_a_device(tree):
    leaves = jax.tree.leaves(tree)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return sum(leaf.nbytes for leaf in leaves), own


def show(*case, **options):
    print(json.dumps(count(*case, **options)), flush=True)


def day():
    sharding_program.day()
    show("mixed", (4, 2), states=2, only=("model", "traces", "gradient", "stream"))
    show("lstm", (1, 8), only=("model", "traces", "gradient"))
    show("readout", (4, 2), "es_d_rtrl", only=("gradient",))
    show("gru", (4, 2), "immediate", only=("gradient",))


def table():
    """Print Markdown: what a sequence gradient, the traces' update and a step of a stream send."""
    shown = ("model", "traces", "gradient", "stream")
    print("| model | mesh | bytes of traces on a device |", " | ".join(shown), "|", flush=True)
    print("|---|---|---|" + "---|" * len(shown), flush=True)
    for name, parts in itertools.product(MODELS, MESHES):
        found = count(name, parts, only=shown)
        total, own = found["bytes"]["traces"]
        row = [name, "x".join(map(str, parts)), f"1/{total / own:.3g}"]
        row += [in_words(found["messages"][what]) for what in shown]
        print("|", " | ".join(row), "|", flush=True)


def in_words(found):
    parts = [
        f"{number} {kind}{' a step' if when == 'by step' else ''}"
        for when, kinds in found.items()
        for kind, number in sorted(kinds.items())
    ]
    return ", ".join(parts) or "none"


def night(share):
    rules = ("d_rtrl", "es_d_rtrl", "immediate")
    styles = ((1, False), (2, False), (1, True))
    rows = [
        (name, parts, rule, states, vmap)
        for name, parts, rule, (states, vmap) in itertools.product(MODELS, MESHES, rules, styles)
        if has_states(name, states)
    ]
    for row in share_of(rows, share):
        show(*row)


if __name__ == "__main__":
    {"day": day, "night": night, "table": table}[sys.argv[1]](*sys.argv[2:])
