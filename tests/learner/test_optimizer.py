"""An optimizer in `etrace_online` is the same optimizer written out by its user."""

import dataclasses
import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
import saiunit as u
from assertions import assert_same_bits
from drivers import build_learner, new_learner, snapshot, weights_of
from rules import OF_SOME_MODELS, OTHERS

import braintrace

BATCH, LENGTH = 2, 7
LEAKY, ALIF = (catalogue.BY_NAME[n] for n in ("Leaky", "ALIFLateThreshold"))


def leaving_out_biases(parameters):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum, clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "adam with a schedule": optax.adam(optax.cosine_decay_schedule(0.05, 5)),
    "adamw without biases": optax.adamw(0.01, weight_decay=0.1, mask=leaving_out_biases),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.02),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}


class Stream:
    """A learner, its data, and the optimizer as its user writes it out."""

    def __init__(self, case, optimizer, algorithm="d_rtrl", dtype=np.float32, which=0):
        self.case, self.optimizer = case, optimizer
        self.learner = new_learner(case, algorithm, batch=BATCH, dtype=dtype, which=which)
        self.sequences = tuple(map(np.asarray, case.sequences(BATCH, LENGTH, dtype)))
        self.weights = weights_of(self.learner.algorithm.model)
        self.state = brainstate.State(self.optimizer.init(self.values()))

    def values(self):
        return {path: state.value for path, state in self.weights.items()}

    def step_fn(self, x, y):
        return self.case.loss(self.learner(x), y)

    def with_loss(self, x, y):
        loss = self.step_fn(x, y)
        return loss, loss

    def write(self, gradients, loss=None):
        extra = {} if loss is None else {"value": loss}
        changes, self.state.value = optax.with_extra_args_support(self.optimizer).update(
            gradients, self.state.value, self.values(), **extra
        )
        for path, value in optax.apply_updates(self.values(), changes).items():
            self.weights[path].value = value

    def by_hand(self, sequences=None, **options):
        """The update written out by a user of ``update_fn``."""
        losses, _ = self.learner.etrace_online(
            *(sequences or self.sequences),
            step_fn=self.with_loss,
            update_fn=self.write,
            has_aux=True,
            **options,
        )
        return losses

    def by_itself(self, sequences=None, **options):
        return self.learner.etrace_online(
            *(sequences or self.sequences),
            step_fn=self.step_fn,
            optimizer=self.optimizer,
            **options,
        )


@pytest.mark.parametrize("name", ["sgd", "adam with a schedule", "adamw without biases"])
@pytest.mark.core
def test_every_optimizer_as_written_out(name):
    """Bit by bit, over two calls: the state goes on."""
    found, expected = (Stream(ALIF, OPTIMIZERS[name], which=which) for which in range(2))
    for _ in range(2):
        assert_same_bits(found.by_itself(), expected.by_hand())
    assert_same_bits(snapshot(found.learner), snapshot(expected.learner))
    assert_same_bits(found.learner.optimizer_state, expected.state.value)


ROWS = [(ALIF, rule.name) for rule in OTHERS] + [
    (catalogue.BY_NAME[rule.case], rule.name) for rule in OF_SOME_MODELS
]


def close(rtol, atol=0.0):
    def compare(found, expected):
        compared = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
        jax.tree.map(compared, found, expected)

    return compare


@pytest.mark.parametrize("every", [2])
def test_an_update_for_every_block_is_that_of_the_mean_gradient(float64, every):
    """Written out: gradients of single steps are added up, and the optimizer gets their mean."""
    found, expected = (
        Stream(LEAKY, optax.sgd(0.1, momentum=0.9), dtype=np.float64, which=which)
        for which in range(2)
    )
    total = brainstate.State(jax.tree.map(jnp.zeros_like, expected.values()))

    def add(gradients):
        total.value = jax.tree.map(jnp.add, total.value, gradients)

    losses = found.by_itself(every=every)
    for start in range(0, LENGTH, every):
        part = tuple(s[start : start + every] for s in expected.sequences)
        own = expected.learner.etrace_online(*part, step_fn=expected.step_fn, update_fn=add)
        close(1e-12)(losses[start : start + every], own)
        mean = functools.partial(jnp.multiply, 1 / len(own))
        expected.write(jax.tree.map(mean, total.value))
        total.value = jax.tree.map(jnp.zeros_like, total.value)
    close(1e-12)(found.values(), expected.values())
    close(1e-12)(found.learner.optimizer_state, expected.state.value)


def recording():
    """An optimizer that changes nothing, and adds up the losses that it is given."""

    def update(gradients, state, parameters=None, *, value, **_):
        return jax.tree.map(jnp.zeros_like, gradients), state + value

    return optax.GradientTransformationExtraArgs(lambda parameters: jnp.zeros(()), update)


@pytest.mark.parametrize(
    ("every", "mask"),
    [(1, [2.0, 0.0, 0.5, 1.0]), (4, [0.0, 0.0, 0.0, 1.0]), (2, [0.5, 1.0, 0.0, 0.0])],
)
def test_an_optimizer_is_given_the_loss_of_its_gradient(every, mask):
    """The mean of each block, with the weights of its mask."""
    stream, mask = Stream(LEAKY, optax.sgd(0.0)), np.array(mask, np.float32)
    part = tuple(sequence[: len(mask)] for sequence in stream.sequences)
    losses = np.asarray(stream.by_itself(part))
    stream.learner.reset_state()
    stream.optimizer, stream.learner.optimizer_state = recording(), None
    blocks = zip(losses.reshape(-1, every), mask.reshape(-1, every), strict=True)
    expected = sum(np.average(own, weights=weights) for own, weights in blocks if weights.any())
    stream.by_itself(part, every=every, mask=mask)
    np.testing.assert_allclose(stream.learner.optimizer_state, expected, rtol=1e-5)


@pytest.mark.parametrize(("case", "rule"), [(ALIF, "snap")])
def test_blocks_under_every_rule(case, rule):
    """Blocks of ``k`` steps are as many sequence gradients, each from where the last one ended."""
    found, expected = (Stream(case, optax.sgd(0.1), rule, which=which) for which in range(2))
    losses = found.by_itself(every=3)
    for start in (0, 3, 6):
        part = tuple(s[start : start + 3] for s in expected.sequences)
        gradients, own = expected.learner.etrace_grad(
            *part, step_fn=expected.step_fn, return_value=True
        )
        expected.write(gradients)
        np.testing.assert_allclose(losses[start : start + 3], own, rtol=2e-5)
    close(1e-4, 1e-6)(found.values(), expected.values())


@pytest.mark.core
@pytest.mark.parametrize("every", [1, 3])
def test_steps_of_weight_zero_move_nothing(every):
    """Padding, NaN or not, changes neither parameters nor optimizer: as if it were not there."""
    mask = np.array([1.0, 1, 1, 0.5, 0, 1, 0], np.float32)
    mask = mask if every == 1 else np.array([1.0, 0, 0.5, 0, 0, 0, 1], np.float32)
    found = Stream(LEAKY, OPTIMIZERS["adamw without biases"])
    xs, ys = found.sequences
    ys = np.where(mask[:, None, None] == 0, np.nan, ys)
    losses = found.by_itself((xs, ys), mask=mask, every=every)
    assert not np.any(losses[mask == 0])

    expected = Stream(LEAKY, OPTIMIZERS["adamw without biases"], which=1)
    xs, ys = expected.sequences
    for start in range(0, LENGTH, every):
        part = slice(start, start + every)
        if np.any(mask[part]):
            gradients = expected.learner.etrace_grad(
                xs[part], ys[part], step_fn=expected.step_fn, mask=mask[part]
            )
            expected.write(gradients)
        else:
            expected.learner.etrace_evolve(xs[part])
    close(1e-4, 1e-6)(found.values(), expected.values())
    close(1e-4, 1e-6)(found.learner.optimizer_state, expected.state.value)


def test_the_users_function_is_called_where_the_mask_counts():
    own = Stream(LEAKY, optax.sgd(0.0))
    calls = brainstate.State(jnp.zeros((), int))

    def update_fn(gradients, aux):
        calls.value = calls.value + jnp.size(aux)

    def step_fn(x, y):
        return own.step_fn(x, y), jnp.ones(())

    call = {"step_fn": step_fn, "update_fn": update_fn, "has_aux": True}
    own.learner.etrace_online(*own.sequences, **call, mask=np.arange(LENGTH) % 2)
    assert calls.value == 3
    _, aux = own.learner.etrace_online(*own.sequences, **call, every=3)
    assert calls.value == 3 + LENGTH and aux.shape == (LENGTH,)


@pytest.mark.parametrize("every", [1, 4])
def test_samples_start_anew_within_blocks_and_after_them(every):
    flags = np.zeros((LENGTH, BATCH), bool)
    flags[2, 1] = True
    found, expected = (Stream(LEAKY, optax.sgd(0.1), which=which) for which in range(2))
    found.by_itself(every=every, reset=flags)
    if every == 1:
        expected.by_hand(reset=flags)
    else:
        for start in (0, 4):
            part = slice(start, start + 4)
            xs, ys = expected.sequences
            expected.write(
                expected.learner.etrace_grad(
                    xs[part], ys[part], step_fn=expected.step_fn, reset=flags[part]
                )
            )
    close(1e-4, 1e-6)(snapshot(found.learner), snapshot(expected.learner))


class Momentum:
    """Descent with momentum, as brainstate's optimizers are written."""

    def __init__(self, weights):
        self.weights = weights
        zeros = {path: jax.tree.map(jnp.zeros_like, w.value) for path, w in weights.items()}
        self.kept = brainstate.State(zeros)

    def update(self, grads):
        self.kept.value = jax.tree.map(lambda m, g: 0.9 * m + g, self.kept.value, grads)
        for path, weight in self.weights.items():
            change = self.kept.value[path]
            weight.value = jax.tree.map(lambda w, m: w - 0.1 * m, weight.value, change)


def test_optimizers_with_states_of_their_own():
    """Their States move on as a whole, and are part of the learner's state."""
    sgd = optax.sgd(0.1, momentum=0.9)
    found, expected = (Stream(LEAKY, sgd, which=which) for which in range(2))
    found.optimizer = momentum = Momentum(found.weights)
    np.testing.assert_allclose(found.by_itself(), expected.by_hand(), rtol=1e-6)
    close(1e-4, 1e-6)(found.values(), expected.values())
    assert found.learner.optimizer_state == {("kept",): momentum.kept.value}
    pure = found.learner.functional()
    start = pure.state()
    assert ("kept", "w_in") in start.optimizer
    call = {"step_fn": found.step_fn, "optimizer": momentum}
    after, losses = pure.online(start, *found.sequences, **call)
    np.testing.assert_allclose(losses, found.by_itself(), rtol=1e-6)
    close(1e-4, 1e-6)(after, pure.state())
    with pytest.raises(braintrace.OptionError, match="Momentum"):
        found.learner.init_optimizer(sgd)


def test_an_optimizer_of_braintools():
    braintools = pytest.importorskip("braintools")
    found, expected = (Stream(LEAKY, optax.adam(0.05), which=which) for which in range(2))
    found.optimizer = braintools.optim.Adam(0.05)
    found.optimizer.register_trainable_weights(found.weights)
    np.testing.assert_allclose(found.by_itself(), expected.by_hand(), rtol=1e-6)
    assert found.learner.optimizer_state[("step_count",)] == LENGTH


def test_functions_of_the_state_learn_alike():
    """Also over a stack of learners, each with an optimizer of its own."""
    own = Stream(LEAKY, optax.adam(0.05))
    pure = own.learner.functional()
    call = {"step_fn": own.step_fn, "optimizer": own.optimizer}
    with pytest.raises(braintrace.OptionError, match="init_optimizer"):
        pure.online(pure.state(), *own.sequences, **call)
    own.learner.init_optimizer(own.optimizer)
    start = pure.state()
    assert {("0", "count"), ("0", "mu", "w_in")} <= start.optimizer.keys()
    run = lambda state: pure.online(state, *own.sequences, **call)  # noqa: E731
    found, losses = run(start)
    doubled = {path: 2 * value for path, value in start.parameters.items()}
    stack = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), start, dataclasses.replace(start, parameters=doubled)
    )
    mapped = jax.jit(jax.vmap(run))(stack)
    close(1e-4, 1e-6)(jax.tree.map(lambda leaf: leaf[0], mapped), (found, losses))
    close(1e-5)(own.by_itself(), losses)
    close(1e-4, 1e-6)(pure.state(), found)


def test_inside_a_compiled_function():
    outside, inside = (Stream(LEAKY, optax.adam(0.05), which=which) for which in range(2))
    expected = outside.by_itself()
    jitted = brainstate.transform.jit(lambda: inside.by_itself())
    with pytest.raises(braintrace.OptionError, match=r"learner\.init_optimizer\(optimizer\)"):
        jitted()
    inside.learner.init_optimizer(inside.optimizer)
    np.testing.assert_allclose(jitted(), expected, rtol=1e-5)
    close(1e-4, 1e-6)(inside.learner.optimizer_state, outside.learner.optimizer_state)


@pytest.mark.parametrize(("unit_aware", "every"), [(True, 2), (False, 1)])
def test_units(unit_aware, every):
    """An optimizer computes with numbers in the units of the parameters."""
    model = models.Conductance()
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    scale = 1 if unit_aware else 1 / u.mA**2
    losses = learner.etrace_online(
        jnp.ones((5, 2, 3)),
        step_fn=lambda x: (learner(x) ** 2).mean() * scale,
        optimizer=optax.adam(0.01),
        unit_aware=unit_aware,
        every=every,
    )
    assert u.get_unit(losses) == (u.mA**2 if unit_aware else u.UNITLESS)
    assert model.w.value.unit == u.mS
    updates = -(-5 // every)
    np.testing.assert_allclose(model.w.value.mantissa, 1 - 0.01 * updates, rtol=2e-3)


class Complex(brainstate.nn.Module):
    """A complex parameter, whose loss has its minimum at ``3 + 4i``."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones(2, jnp.complex64))

    def init_state(self, batch_size):
        self.re = brainstate.HiddenState(jnp.zeros((batch_size, 2)))
        self.im = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        drive = braintrace.element_wise(self.w.value)
        self.re.value = 0.1 * self.re.value + x * drive.real
        self.im.value = 0.1 * self.im.value + x * drive.imag
        return self.re.value, self.im.value


def test_complex_parameters_go_downhill():
    model, x = Complex(), jnp.full((1, 2), 0.9)
    learner = braintrace.compile(model, "d_rtrl", x, batch_size=1)

    def step_fn(x):
        re, im = learner(x)
        return jnp.sum((re - 3) ** 2 + (im - 4) ** 2)

    xs = jnp.broadcast_to(x, (100, 1, 2))
    losses = learner.etrace_online(xs, step_fn=step_fn, optimizer=optax.sgd(0.1))
    assert losses[-1] < 1e-3 * losses[0]
    np.testing.assert_allclose(model.w.value, 3 + 4j, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:Weight 'params/decay':braintrace.ApproximationWarning")
def test_optimizers_see_the_pytree_of_a_function_model():
    """Optimizers see parameters and gradients as the model was given them: labels fit."""
    params = {"cell": {"w": jnp.ones((2, 3))}, "decay": jnp.full(3, 0.9), "size": 3}

    def step(params, h, x):
        h = params["decay"] * h + braintrace.matmul(x, params["cell"]["w"])
        return h, jnp.tanh(h)

    model = braintrace.from_function(step, params, jnp.zeros((2, 3)))
    xs = jnp.ones((6, 2, 2))
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    labels = {"cell": {"w": "fast"}, "decay": "still", "size": None}
    parts = {"fast": optax.adam(0.1), "still": optax.set_to_zero()}
    before = model.get_params()
    learner.etrace_online(
        xs,
        step_fn=lambda x: jnp.mean(learner(x) ** 2),
        optimizer=optax.multi_transform(parts, labels),
    )
    after = model.get_params()
    assert_same_bits(after["decay"], before["decay"])
    assert np.all(after["cell"]["w"] < before["cell"]["w"])


# --- the state in the learner -----------------------------------------------------------------


def test_an_optimizer_that_is_made_anew_goes_on():
    """An optimizer of the same parts goes on with the state, and nothing is traced again."""
    own, traced = Stream(LEAKY, optax.sgd(0.0)), []

    def step_fn(x, y):
        traced.append(None)
        return own.step_fn(x, y)

    for call in range(3):
        own.learner.etrace_online(*own.sequences, step_fn=step_fn, optimizer=optax.adam(0.05))
        assert own.learner.optimizer_state[0].count == (call + 1) * LENGTH
        count = count if call else len(traced)  # noqa: F821
    assert len(traced) == count
    own.learner.etrace_online(*own.sequences, step_fn=step_fn, optimizer=optax.adam(0.1))
    assert len(traced) > count


def test_another_optimizer_is_refused_until_told_so():
    own = Stream(LEAKY, optax.adam(0.05))
    own.by_itself()
    before = own.learner.optimizer_state
    with pytest.raises(braintrace.OptionError, match="optimizer_state = None"):
        own.learner.etrace_online(*own.sequences, step_fn=own.step_fn, optimizer=optax.sgd(0.1))
    assert own.learner.optimizer_state is before
    own.learner.optimizer_state = None
    own.learner.etrace_online(*own.sequences, step_fn=own.step_fn, optimizer=optax.sgd(0.1))
    assert jax.tree.leaves(own.learner.optimizer_state) == []


def test_hyperparameters_are_written_between_calls():
    own = Stream(LEAKY, OPTIMIZERS["injected"])
    own.by_itself()
    state = own.learner.optimizer_state
    before = own.values()
    hyperparams = {**state.hyperparams, "learning_rate": 0.0}
    own.learner.optimizer_state = state._replace(hyperparams=hyperparams)
    own.by_itself()
    assert_same_bits(own.values(), before)
    with pytest.raises(braintrace.ShapeError, match="optimizer_state"):
        own.learner.optimizer_state = state.hyperparams


def test_a_state_of_another_optimizer_is_refused():
    own = Stream(LEAKY, optax.adam(0.05))
    other = Stream(LEAKY, optax.sgd(0.05, momentum=0.9), which=1)
    own.by_itself()
    kept = own.learner.functional().state()
    with pytest.raises(braintrace.OptionError, match="init_optimizer"):
        other.learner.functional().restore(kept)
    other.by_itself()
    before = other.learner.functional().state()
    with pytest.raises(braintrace.ShapeError, match="optimizer/0/mu/w_in"):
        other.learner.functional().restore(kept)
    assert_same_bits(other.learner.functional().state(), before)


@pytest.mark.parametrize("changed", [lambda tree: list(tree.values()), lambda tree: None])
def test_updates_of_another_structure_are_refused(changed):
    """By name, and nothing has changed."""
    learner = build_learner(LEAKY, "d_rtrl", batch=BATCH)
    xs, ys = LEAKY.sequences(BATCH, LENGTH)
    odd = optax.GradientTransformation(lambda p: (), lambda g, state, p: (changed(g), state))
    before = jax.device_get(snapshot(learner))
    with pytest.raises(braintrace.ShapeError, match="returns updates of structure"):
        learner.etrace_online(xs, ys, step_fn=lambda x, y: LEAKY.loss(learner(x), y), optimizer=odd)
    assert_same_bits(snapshot(learner), before)
