"""Sequence gradients do most of a step over time at once: what is in the loop, and is it the same?

The reference takes the gradient step by step through the algorithm's own calls, which share no
code with the cutting of a step.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stacks
from assertions import assert_gradients_close
from drivers import quietly_compiled, summed
from jax.experimental import io_callback

import braintrace
from braintrace._core.chunk.over_time import AT_ONCE, values_over_time
from braintrace._etrace_op import primitive
from braintrace._jaxpr import equal_values, equal_with_derivatives, inlined, program_of

INPUTS, H, STEPS, BATCH = 3, 4, 6, 2
pytestmark = pytest.mark.usefixtures("float64")


class Net(brainstate.nn.Module):
    """A leaky recurrent layer with a learned leak, an embedded input and a wide readout."""

    outputs = 2

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0).normal
        self.w_in = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, H))))
        self.w_rec = brainstate.ParamState(jnp.asarray(draw(size=(H, H)) / 2))
        self.leak = brainstate.ParamState(jnp.asarray(draw(size=H)))
        self.w_out = brainstate.ParamState(jnp.asarray(draw(size=(H, self.outputs))))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.full((batch_size, H), 0.1))

    def recur(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        drive = drive + braintrace.matmul(self.h.value, self.w_rec.value)
        leak = jax.nn.sigmoid(self.leak.value)
        self.h.value = leak * self.h.value + jnp.tanh(drive)
        return self.h.value

    def read(self, h):
        return h @ self.w_out.value

    def update(self, x):
        return self.read(self.recur(x))


class Wide(Net):
    outputs = 400


class Branching(Net):
    """Which readout is used depends on the state."""

    def read(self, h):
        return jax.lax.cond(
            h.sum() > 0, lambda: h @ self.w_out.value, lambda: jnp.zeros((BATCH, 2))
        )


class BranchingRecurrence(Net):
    """Whether the state moves depends on the input."""

    def recur(self, x):
        before = self.h.value
        after = super().recur(x)
        self.h.value = jax.lax.cond(x.sum() > 0, lambda: after, lambda: 0.5 * before)
        return self.h.value


class Looping(Net):
    def read(self, h):
        return jax.lax.scan(
            lambda y, w: (jnp.sin(y) + h @ w, None),
            jnp.zeros((BATCH, 2)),
            (self.w_out.value[None] * jnp.arange(1.0, 4.0)[:, None, None]),
        )[0]


class Embedding(Net):
    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(2).normal
        self.table = brainstate.ParamState(jnp.asarray(draw(size=(5, INPUTS))))

    def update(self, token):
        return super().update(self.table.value[token])


class Normalised(Net):
    """Keeps running statistics of its drive."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.mean = brainstate.ShortTermState(jnp.zeros(H))

    def recur(self, x):
        h = super().recur(x)
        self.mean.value = 0.9 * self.mean.value + 0.1 * jax.lax.stop_gradient(h).mean(0)
        return h - self.mean.value


def squared(output, target):
    return jnp.mean((output - target) ** 2)


def spread(output, target):
    return jnp.mean((output - target.sum()) ** 2)


def noisy(output, target):
    mask = brainstate.random.bernoulli(0.5, output.shape)
    return squared(output * mask, target)


def dropped(output, target):
    """brainstate checks the probability of a dropout, which is an effect."""
    with brainstate.environ.context(fit=True):
        return squared(brainstate.nn.Dropout(0.5)(output), target)


@jax.custom_vjp
def called_back(y):
    return jnp.sin(y)


def _called_back_backward(y, ct):
    host = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return (jax.pure_callback(lambda y, ct: np.cos(y) * ct, host, y, ct),)


called_back.defvjp(lambda y: (jnp.sin(y), y), _called_back_backward)


def unmapped(output, target):
    """A derivative that has no form for many steps at once."""
    return squared(called_back(output), target)


def guarded(output, target):
    """A branch whose derivative is not finite where it is not taken."""
    size = jnp.abs(output).sum()
    return jax.lax.cond(target.sum() > 0, lambda: jnp.log(size), lambda: squared(output, target))


def printed(output, target):
    jax.debug.callback(lambda _: None, output.sum())
    return squared(output, target)


def cumulative(output, target):
    return jnp.sort(jnp.cumsum(output, axis=-1), axis=-1).sum() * target.sum()


def inputs_of(net):
    rng = np.random.default_rng(1)
    if net is Embedding:
        xs = rng.integers(0, 5, size=(STEPS, BATCH))
    else:
        xs = rng.normal(size=(STEPS, BATCH, INPUTS))
    return jnp.asarray(xs), jnp.asarray(rng.normal(size=(STEPS, BATCH, Net.outputs)))


@functools.cache
def compiled(net, algorithm):
    brainstate.random.seed(3)
    return quietly_compiled(net(), algorithm, inputs_of(net)[0][0], batch_size=BATCH)


def learner_of(net, algorithm="d_rtrl"):
    """A learner that begins; the tests of a net share it, and what is compiled for it."""
    learner = compiled(net, algorithm)
    learner.reset_state(BATCH)
    return learner


def step_by_step(learner, net, loss):
    """The sum of the gradients of every step, the states and the traces after them."""
    xs, targets = inputs_of(net)
    weights = learner.algorithm.model.states(brainstate.ParamState)
    brainstate.random.seed(5)

    @brainstate.transform.jit
    def gradient(x, target):
        return brainstate.transform.grad(lambda: loss(learner(x), target), weights)()

    found = [gradient(x, target) for x, target in zip(xs, targets, strict=True)]
    return summed(found), what_is_left(learner)


def what_is_left(learner):
    model = learner.algorithm.model
    states = {path: s.value for path, s in model.states(brainstate.ShortTermState).items()}
    return states, learner.algorithm.traces.value


def at_once(learner, net, loss, chunk_size):
    xs, targets = inputs_of(net)
    learner.reset_state(BATCH)
    brainstate.random.seed(5)
    found = learner.etrace_grad(
        xs,
        targets,
        step_fn=lambda x, target: loss(learner(x), target),
        reduction="sum",
        chunk_size=chunk_size,
    )
    return found, what_is_left(learner)


STEP_BY_STEP = [
    (Branching, squared),
    (Net, guarded),
    (Net, unmapped),
    (Wide, spread),
]
SPLIT = [
    (Net, squared),
    (BranchingRecurrence, squared),
    (Looping, squared),
    (Embedding, squared),
    (Normalised, squared),
    (Net, noisy),
    (Net, dropped),
    (Net, cumulative),
    (Net, printed),
    *((net, squared) for net in stacks.STACKS),
]


def name_of(case):
    return "-".join(part.__name__ for part in case)


@pytest.mark.parametrize(
    ("case", "algorithm", "chunk_sizes"),
    [
        ((Net, squared), "d_rtrl", [3]),
        ((Normalised, squared), "d_rtrl", [3]),
        ((Net, printed), "es_d_rtrl", [6]),
        ((stacks.Branched, squared), "es_d_rtrl", [6]),
        ((Net, unmapped), "d_rtrl", [3]),
    ],
)
def test_the_same_gradient_states_and_traces(case, algorithm, chunk_sizes):
    net, _ = case
    learner = learner_of(net, algorithm)
    expected, (states, traces) = step_by_step(learner, *case)
    for chunk_size in chunk_sizes:
        found, (states_now, traces_now) = at_once(learner, *case, chunk_size)
        assert_gradients_close(found, expected, 1e-10)
        for now, before in ((states_now, states), (traces_now, traces)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), now, before)


def products_in_loops(net, loss):
    """The number of products with weights in each loop of the sequence gradient."""
    xs, targets = inputs_of(net)
    learner = learner_of(net)
    counts = []

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            total += equation.primitive.name in ("dot_general", "etp_mm")
            bodies = [p for p in equation.params.values() if hasattr(p, "eqns")]
            bodies += equation.params.get("branches", ())
            inside = sum(count(getattr(body, "jaxpr", body)) for body in bodies)
            if equation.primitive.name == "scan":
                counts.append(inside)
            else:
                total += inside
        return total

    def run(xs, targets):
        return learner.etrace_grad(
            xs, targets, step_fn=lambda x, t: loss(learner(x), t), chunk_size=STEPS
        )

    jaxpr, _ = brainstate.transform.make_jaxpr(run)(xs, targets)
    count(jaxpr.jaxpr)
    return counts


@pytest.mark.core
@pytest.mark.parametrize("case", [SPLIT[0], (Embedding, squared), (Net, dropped)], ids=name_of)
def test_only_the_recurrent_product_is_in_the_loop(case):
    assert sorted(products_in_loops(*case)) == [0, 0, 1]


def test_what_layers_do_besides_they_do_in_turn():
    learner = learner_of(stacks.Watched)
    stacks.seen.clear()
    at_once(learner, stacks.Watched, squared, STEPS)
    jax.effects_barrier()
    assert [int(number) for number in stacks.seen] == [0, 1] * STEPS


@pytest.mark.parametrize("case", STEP_BY_STEP, ids=name_of)
def test_what_cannot_be_mapped_over_time_stays_in_the_loop(case):
    assert max(products_in_loops(*case)) > 2


def rooted(output, target):
    """A loss whose derivative is infinite where the target, a factor of it, is zero."""
    return jnp.sqrt(target.sum() * jnp.sum(output**2))


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0, 1], [0] * 3 + [1] * 3], ids=str)
@pytest.mark.parametrize("net", [Net, Wide], ids=lambda net: net.__name__)
def test_masked_steps_have_a_derivative_of_zero(net, mask):
    """Whether losses are differentiated at once or, for a wide readout, one by one."""
    xs, targets = inputs_of(net)
    mask = jnp.asarray(mask, jnp.float64)
    counted = jnp.abs(targets)
    found = []
    for values in (jnp.ones_like(targets), jnp.zeros_like(targets)):
        padded = jnp.where(mask[:, None, None] == 0, values, counted)
        learner = learner_of(net)
        step = {"step_fn": lambda x, y, run=learner: (rooted(run(x), y), y), "has_aux": True}
        gradients, losses, aux = learner.etrace_grad(
            xs, padded, mask=mask, return_value=True, chunk_size=3, **step
        )
        np.testing.assert_array_equal(aux, padded)
        np.testing.assert_array_equal(losses == 0, mask == 0)
        found.append(gradients)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_an_effect_with_a_derivative_runs_once():
    calls = []

    def note(value):
        calls.append(value)
        return np.asarray(value)

    @jax.custom_vjp
    def noted(y):
        return io_callback(note, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    noted.defvjp(lambda y: (noted(y), None), lambda _, ct: (ct,))
    learner = learner_of(Net)
    found, _ = at_once(learner, Net, lambda y, target: squared(noted(y), target), STEPS)
    jax.effects_barrier()
    assert len(calls) == STEPS
    expected, _ = at_once(learner, Net, squared, 3)
    assert_gradients_close(found, expected, 1e-10)


def test_results_that_no_equation_makes():
    """A slice of the sequences, and a State as it was before the step."""
    xs, targets = inputs_of(Net)
    learner = learner_of(Net)
    count = brainstate.ShortTermState(jnp.zeros(()))

    def step(x, target, number):
        before = count.value
        count.value = number
        return squared(learner(x), target) + before, (number, before)

    numbers = jnp.arange(1.0, STEPS + 1)
    _, losses, (same, before) = learner.etrace_grad(
        xs, targets, numbers, step_fn=step, has_aux=True, return_value=True, reduction="sum"
    )
    np.testing.assert_array_equal(same, numbers)
    np.testing.assert_array_equal(before, numbers - 1)
    assert (losses > before).all()


def values_of(function, *arguments):
    """Which equations of a function have equal values: the index of the first for each."""
    program = program_of(jax.make_jaxpr(function)(*arguments))
    equal = equal_values(program)
    made = [equation.outvars[0] for equation in program.equations]
    return [made.index(equal[var]) if equal[var] in made else None for var in made]


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=["x", "weight", "both"])
def test_products_over_time_where_samples_lie(mapped, monkeypatch):
    """What several devices do, whatever changes from step to step."""
    monkeypatch.setattr(primitive, "runs_on_several_devices", lambda: True)
    draw = np.random.default_rng(4).normal
    shapes = (BATCH, INPUTS), (INPUTS, H)
    lead = [() if axis is None else (STEPS,) for axis in mapped]
    x, w = (draw(size=steps + shape) for steps, shape in zip(lead, shapes, strict=True))
    found = jax.vmap(braintrace.matmul, mapped)(x, w)
    np.testing.assert_allclose(found, jax.vmap(jnp.matmul, mapped)(x, w), rtol=1e-5)


def test_samples_stay_where_they_are_where_only_the_lowered_program_knows_of_devices(monkeypatch):
    """An array that the user has placed may lie on several devices, without `braintrace.shard`."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    x, w = jnp.ones((BATCH, INPUTS)), jnp.ones((INPUTS, H))
    program = program_of(jax.make_jaxpr(braintrace.matmul)(x, w))
    of_x, of_w = program.in_vars

    def over_time(xs):
        return values_over_time(AT_ONCE, program, program.out_atoms, {of_w: w}, {of_x: xs})

    traced = jax.make_jaxpr(over_time)(jnp.ones((STEPS, BATCH, INPUTS)))
    (cond,) = [e for e in traced.eqns if e.primitive.name == "cond"]
    on_one, on_several = map(str, cond.params["branches"])
    assert f"[{STEPS},{BATCH},{INPUTS}]" in on_one
    assert f"[{BATCH},{STEPS},{INPUTS}]" not in on_one
    assert f"[{BATCH},{STEPS},{INPUTS}]" in on_several


def test_equal_values():
    x = jnp.arange(3.0)
    assert values_of(lambda x: (jnp.sin(x), jax.lax.stop_gradient(jnp.sin(x))), x)[:2] == [0, 0]
    assert values_of(lambda x: (x + 1.0, x + 2.0, x + 1.0), x) == [0, 1, 0]
    assert values_of(lambda x: (x[:2], x[1:], x[:2]), x) == [0, 1, 0]


def test_equal_values_with_equal_derivatives():
    def function(x):
        held = jax.lax.stop_gradient(x)
        return jnp.sin(x), jnp.sin(x), jnp.sin(held), jax.nn.relu(x), jax.nn.relu(x)

    program = program_of(inlined(jax.make_jaxpr(function)(jnp.arange(3.0))))
    equal = equal_with_derivatives(program)
    found = [program.out_atoms.index(equal[atom]) for atom in program.out_atoms]
    assert found == [0, 0, 2, 3, 4]


def surrogate(scale, table):
    @jax.custom_jvp
    def spike(v):
        return jnp.where(v > scale, table, 0.0)

    spike.defjvp(lambda p, t: (spike(*p), t[0]))
    return spike


def test_functions_with_rules_of_their_own_are_equal_by_what_they_compute():
    x, table, other = jnp.arange(3.0), jnp.ones(3), jnp.zeros(3)

    def spikes(x):
        makers = [(0.5, table), (0.5, table), (0.7, table), (0.5, other)]
        return [surrogate(*maker)(x) for maker in makers]

    found = values_of(spikes, x)
    assert found[0] == found[1] == 0
    assert len({found[0], found[2], found[3]}) == 3
