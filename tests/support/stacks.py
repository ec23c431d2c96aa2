"""Stacks of recurrent layers: what their loops over time can be cut into, and what not."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

INPUTS, H, OUTPUTS = 3, 4, 2


class Layer(brainstate.nn.Module):
    """A layer with a learned leak, whose drive has one weight for its input and its State."""

    def __init__(self, seed, inputs=INPUTS):
        super().__init__()
        draw = np.random.default_rng(seed).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(inputs + H, H)) / 2))
        self.b = brainstate.ParamState(jnp.asarray(draw(size=H)))
        self.leak = brainstate.ParamState(jnp.asarray(draw(size=H)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.full((batch_size, H), 0.1))

    def drive(self, x, h):
        return braintrace.matmul(jnp.concatenate([x, h], -1), self.w.value, self.b.value)

    def update(self, x):
        h = self.h.value
        leak = jax.nn.sigmoid(self.leak.value)
        self.h.value = leak * h + jnp.tanh(self.drive(x, h))
        return self.h.value


class Reset(Layer):
    """A layer whose State enters the product behind a gate of the step itself."""

    def drive(self, x, h):
        return super().drive(x, jnp.tanh(h * x.sum(-1, keepdims=True)))


class Diagonal(Layer):
    """A layer without products between its States."""

    def drive(self, x, h):
        return braintrace.matmul(x, self.w.value[: x.shape[-1]], self.b.value) + h


class Branching(Layer):
    """A layer that takes one of two products."""

    def drive(self, x, h):
        return jax.lax.cond(
            jax.lax.stop_gradient(x).sum() > 0,
            lambda: super(Branching, self).drive(x, h),
            lambda: super(Branching, self).drive(-x, h),
        )


class Stack(brainstate.nn.Module):
    """Two layers and a readout."""

    kinds = (Layer, Layer)

    def __init__(self):
        super().__init__()
        sizes = [INPUTS] + [H] * (len(self.kinds) - 1)
        pairs = zip(self.kinds, sizes, strict=True)
        self.layers = [kind(seed, size) for seed, (kind, size) in enumerate(pairs)]
        draw = np.random.default_rng(9).normal
        self.w_out = brainstate.ParamState(jnp.asarray(draw(size=(H, OUTPUTS))))

    def between(self, number, h):
        """Return what the next layer gets of a layer's State."""
        return h

    def update(self, x):
        for number, layer in enumerate(self.layers):
            x = self.between(number, layer(x))
        return x @ self.w_out.value


class Three(Stack):
    """Three layers; each gets what the others below it give, the first one's State as well."""

    kinds = (Reset, Layer, Diagonal)

    def between(self, number, h):
        return h + self.layers[0].h.value


class Diagonals(Stack):
    kinds = (Diagonal, Diagonal, Diagonal)


class Branched(Stack):
    kinds = (Branching, Layer)


class Feedback(Stack):
    """The lower layer reads what the upper one has held: one circle."""

    def update(self, x):
        return super().update(x + 0.1 * jax.lax.stop_gradient(self.layers[1].h.value)[:, :INPUTS])


class Delayed(Stack):
    """The upper layer reads what the lower one has held before the step."""

    def update(self, x):
        before = self.layers[0].h.value
        self.layers[0](x)
        return self.layers[1](before) @ self.w_out.value


class Dropped(Stack):
    """Inputs and States are dropped at random."""

    def between(self, number, h):
        return h * brainstate.random.bernoulli(0.5, h.shape)

    def update(self, x):
        return super().update(x * brainstate.random.bernoulli(0.7, x.shape))


class Watched(Stack):
    """What the layers hold is told to the host, in turn."""

    def between(self, number, h):
        jax.debug.callback(seen.append, number + 0 * jax.lax.stop_gradient(h).sum(), ordered=True)
        return h


seen = []
"""What `Watched` has told."""


class Noting(Stack):
    """States that no step reads, one of them of a product, another one of the steps' number."""

    def init_state(self, batch_size=None, **_):
        self.lower = brainstate.ShortTermState(jnp.zeros((batch_size, H)))
        self.read = brainstate.ShortTermState(jnp.zeros((batch_size, OUTPUTS)))
        self.last = brainstate.ShortTermState(jnp.zeros((batch_size, INPUTS)))
        self.count = brainstate.ShortTermState(jnp.zeros(()))

    def between(self, number, h):
        if number == 0:
            self.lower.value = jax.lax.stop_gradient(jnp.sin(h))
        return h / (1 + self.count.value)

    def update(self, x):
        self.count.value = self.count.value + 1
        output = super().update(x)
        self.read.value = jax.lax.stop_gradient(output)
        change = x - self.last.value
        self.last.value = x
        return output + change.sum()


class Filtered(Stack):
    """The input is filtered before the first product; what the layers give is smoothed."""

    def init_state(self, batch_size=None, **_):
        self.smooth = brainstate.ShortTermState(jnp.zeros((batch_size, INPUTS)))
        self.mean = brainstate.ShortTermState(jnp.zeros((batch_size, OUTPUTS)))

    def update(self, x):
        self.smooth.value = 0.5 * self.smooth.value + x
        output = super().update(self.smooth.value)
        self.mean.value = 0.9 * self.mean.value + 0.1 * jax.lax.stop_gradient(output)
        return output - self.mean.value


class Nested(Stack):
    """Products in functions of their own, in a loop inside a step and in a branch."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(7).normal
        self.mix = brainstate.ParamState(jnp.asarray(draw(size=(H, H)) / 2))

    def between(self, number, h):
        mix = jax.lax.stop_gradient(self.mix.value)
        if number == 0:
            h = jax.jit(lambda h: jnp.tanh(h @ mix))(h)
            return jax.lax.scan(lambda h, _: (jnp.sin(h @ mix), None), h, length=2)[0]
        return h @ self.mix.value


STACKS = [
    Stack,
    Three,
    Diagonals,
    Branched,
    Feedback,
    Delayed,
    Dropped,
    Watched,
    Noting,
    Filtered,
    Nested,
]
