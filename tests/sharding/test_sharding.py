"""A learner that is divided over a mesh gives what one device gives, and stays divided."""

import contextlib
import functools
from collections import Counter

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from catalogue import BY_NAME, INPUTS
from drivers import build_learner

import braintrace

WHOLE = ("by_source",)
"""Models that are not divided along ``model``: entries by their inputs."""
ALL_UNITS = {"recurrent": 1, "masked": 1, "by_target": 1, "padded": 1, "mixed": 2, "gru": 1}
"""How many operations read all units, in arrays of their own: joined to inputs, they are there."""
GATED = ("gru", "lstm")
"""Models with a weight and a bias of several gates, which lie whole, and so do their gradients."""
SUMS = {"lora": 2, "readout": 1}
"""Sums over units: a factor of a low-rank product meets all outputs, in both kinds of products."""
GATHERED_TWICE = ("by_target", "padded")
"""Sparse products whose inputs XLA gathers for them and for traces, where both axes divide."""


def check_messages(case, bytes, messages):
    """Nothing is exchanged or permuted, traces stay, and gradients are summed once a sequence."""
    everything = sum((Counter(k) for found in messages.values() for k in found.values()), Counter())
    assert everything["all-to-all"] == everything["collective-permute"] == 0, (case, messages)
    check_bytes(case, bytes)
    (data, model), name = case["mesh"], case["model"]
    # Traces gather all units once, for all weights that read them: as the inputs of a chunk.
    reads = (model > 1) * ALL_UNITS.get(name, 0)
    gathered = min(reads, 1) if case["rule"] != "immediate" else reads
    if "traces" in messages and case["rule"] == "d_rtrl":
        update = Counter(messages["traces"]["once"]) - Counter(messages["model"]["once"])
        assert update <= Counter({"all-gather": gathered}), (case, messages)
        assert messages["traces"]["by step"] == messages["model"]["by step"], (case, messages)
    gradient, of_gates = messages["gradient"], 2 * (name in GATED and model > 1)
    sums = (data > 1) + (model > 1) * SUMS.get(name, 0)
    assert "all-reduce" not in gradient["by step"], (case, messages)
    assert gradient["once"].get("all-reduce", 0) <= sums, (case, messages)
    assert gradient["once"].get("all-gather", 0) <= gathered + of_gates, (case, messages)
    if "stream" in messages:  # traces have what the model has gathered
        again = name in GATHERED_TWICE and min(data, model) > 1
        most = messages["model"]["by step"].get("all-gather", 0) + again + of_gates
        assert messages["stream"]["by step"].get("all-gather", 0) <= most, (case, messages)


def check_bytes(case, bytes):
    """Every device has its share of states and traces, under every rule of the parameters too."""
    (data, model), name = case["mesh"], case["model"]
    along_model = 1 if name in WHOLE else model
    parts = {"hidden": data * along_model}
    if case["rule"] == "d_rtrl":
        parts["traces"] = data * along_model
    if name not in (*GATED, "lora", "readout"):
        parts["parameters"] = along_model
    for what, count in parts.items():
        in_all, on_a_device = bytes[what]
        assert in_all == on_a_device * count, (case, what, bytes)


def learner():
    model = braintrace.nn.IndRNN(2, 4)
    return braintrace.compile(model, "d_rtrl", np.ones((8, 2), np.float32), batch_size=8)


def mesh(*names):
    return jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape([1] * len(names)), names)


@pytest.mark.parametrize("model", ["IndRNN", "two coupled states"])
def test_an_explicit_mesh_of_one_device_changes_no_number(model):
    """Also before it is known to the learner, and with traces that are packed in pairs."""
    kinds = {"axis_types": (jax.sharding.AxisType.Explicit,)}
    explicit = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], **kinds)
    inputs = 2 if model == "IndRNN" else INPUTS
    xs = np.linspace(-1.0, 1.0, 3 * 8 * inputs, dtype=np.float32).reshape(3, 8, inputs)

    def made():
        if model == "IndRNN":
            return learner()
        return build_learner(BY_NAME["Rotation"], batch=8)

    def gradients(own):
        core = own.functional()
        loss = functools.partial(core.grad, step_fn=lambda x: jnp.mean(own(x) ** 2))
        return jax.jit(lambda state: loss(state, xs)[1])(core.state())

    brainstate.random.seed(0)
    expected = gradients(made())
    brainstate.random.seed(0)
    divided = made()
    with jax.set_mesh(explicit):
        assert_gradients_close(gradients(divided), expected, 1e-6, "in the context")
        braintrace.shard(divided, explicit)
        assert_gradients_close(gradients(divided), expected, 1e-6, "sharded")


def test_a_jit_after_a_stream_on_an_explicit_mesh_changes_no_number():
    """The stream leaves the number of skipped updates on the mesh, and the reset nothing else."""
    kinds = {"axis_types": (jax.sharding.AxisType.Explicit,)}
    explicit = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], **kinds)
    over_mesh = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec())
    xs = two_features()

    def losses(xs):
        brainstate.random.seed(0)
        own = learner()
        run = functools.partial(
            own.etrace_online,
            step_fn=lambda x: jnp.mean(own(x) ** 2),
            update_fn=lambda gradients: None,
        )
        first = run(xs)
        own.reset_state()
        return first, brainstate.transform.jit(run)(xs)

    found = losses(jax.device_put(xs, over_mesh))
    assert_gradients_close(found, losses(xs), 1e-6, "after a stream")


def two_features():
    return jax.device_put(np.linspace(-1.0, 1.0, 3 * 8 * 2, dtype=np.float32).reshape(3, 8, 2))


def learned_in_a_jit(cell, every, xs, place):
    """Losses, gradients and weights of a learner whose weights and inputs `place` may move."""
    brainstate.random.seed(0)
    model = cell(2, 4)
    own = braintrace.compile(model, "d_rtrl", np.asarray(xs)[0], batch_size=8)
    weights = own.param_states
    for weight in weights.values():
        weight.value = place(weight.value)

    def descend(gradients):
        for path, weight in weights.items():
            step = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])
            weight.value = step

    @brainstate.transform.jit
    def learn(xs):
        loss = {"step_fn": lambda x: jnp.mean(own(x) ** 2)}
        losses = own.etrace_online(xs, update_fn=descend, every=every, **loss)
        return losses, own.etrace_grad(xs, **loss), [w.value for w in weights.values()]

    return learn(place(xs))


@functools.cache
def learned_without_a_mesh(cell, every):
    """The same where nothing is moved, in the default context."""
    return learned_in_a_jit(cell, every, two_features(), lambda value: value)


@pytest.mark.rows("True-1-IndRNN", "False-1-IndRNN", "False-3-LSTMCell")
@pytest.mark.parametrize("cell", [braintrace.nn.IndRNN, braintrace.nn.LSTMCell])
@pytest.mark.parametrize(("has_context", "every"), [(True, 1), (False, 1), (False, 3)])
def test_a_jit_around_methods_on_an_explicit_mesh_changes_no_number(cell, has_context, every):
    """Both trace functions of the user, in which the values of States are tracers."""
    kinds = {"axis_types": (jax.sharding.AxisType.Explicit,)}
    explicit = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], **kinds)

    def place(value):
        sharding = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec())
        return value if has_context else jax.device_put(value, sharding)

    expected, xs = learned_without_a_mesh(cell, every), two_features()
    with jax.set_mesh(explicit) if has_context else contextlib.nullcontext():
        found = learned_in_a_jit(cell, every, xs, place)
    assert_gradients_close(found, expected, 1e-6, "a jit on an explicit mesh")


class MeanOfRows(brainstate.nn.Module):
    """One sample, whose operation has an axis as of a batch."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jax.device_put(np.linspace(-0.5, 0.5, 8).reshape(2, 4)))

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value).mean(0)
        return jnp.tanh(self.h.value)


def test_a_model_without_a_batch_axis_on_a_mesh_changes_no_number():
    xs = two_features()

    def gradients(is_on_mesh):
        model = MeanOfRows()
        model.init_state()
        own = braintrace.compile(model, "d_rtrl", xs[0])
        if is_on_mesh:
            braintrace.shard(own, mesh("data", "units"), model="units")
        return own.etrace_grad(xs, step_fn=lambda x: jnp.mean(own(x) ** 2), chunk_size=2)

    assert_gradients_close(gradients(True), gradients(False), 1e-6, "on a mesh")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (lambda: (learner(), mesh("a", "b")), {}, "`data` is 'data', .* axes 'a', 'b'"),
        (lambda: (learner(), mesh("data")), {"model": "m"}, "`model` is 'm', .* axes 'data'"),
        (lambda: (learner(), mesh("data")), {"model": "data"}, "both 'data'"),
        (lambda: (learner(), "cpu"), {}, "`mesh` is 'cpu'"),
        (lambda: (learner().algorithm, mesh("data")), {}, "`learner` is .*D_RTRL"),
    ],
)
def test_wrong_arguments(arguments, options, words):
    with pytest.raises(braintrace.OptionError, match=words):
        braintrace.shard(*arguments(), **options)


def test_a_learner_that_is_not_compiled():
    algorithm = braintrace.D_RTRL(braintrace.nn.IndRNN(2, 4))
    with pytest.raises(braintrace.NotCompiledError, match="`compile_graph` of its D_RTRL"):
        braintrace.shard(braintrace.Learner(algorithm), mesh("data"))


def test_inside_a_transformation():
    own = learner()
    with pytest.raises(braintrace.OptionError, match="inside a transformation"):
        jax.jit(lambda x: braintrace.shard(own, mesh("data")))(1.0)
