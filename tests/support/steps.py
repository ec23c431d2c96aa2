"""One step of each model of the catalogue, written once for the library and for the oracles.

`step(ops, params, states, x) -> output` uses, beside jax.numpy,

    ops.matmul(name, x, weight, bias=None)    a marked matrix product
    ops.element_wise(name, weight, fn)        a marked element-wise operation
    ops.new_state(name, value)                the new value of a hidden state, for later readers
    ops.mixing(value)                         a value that mixes the positions of a state
    ops.feedback(x, weight, feedback)         a product whose gradient goes to x by another matrix

`cases.py` lends the library's operations, `oracles.PlainOps` the plain ones. Arrays are
(batch, features), or (features,) for a single sample.
"""

import jax
import jax.numpy as jnp
import numpy as np
from marks import spike, spike_reverse_only

# --- every state-to-state path is position by position ------------------------------------


def leaky(ops, params, states, x):
    h = ops.new_state("h", 0.8 * states["h"] + ops.matmul("w_in", x, params["w_in"]))
    return h @ params["w_out"]


def leaky_with_bias(ops, params, states, x):
    layer = params["layer"]
    y = ops.matmul("layer", x, layer["weight"], layer["bias"])
    h = ops.new_state("h", 0.8 * states["h"] + jnp.tanh(y))
    return h @ params["w_out"] + params["b_out"]


def leaky_with_masked_weight(ops, params, states, x):
    weight = params["w_in"]
    checkerboard = jnp.indices(weight.shape).sum(0) % 2 == 0
    masked = jnp.abs(weight) * checkerboard.astype(weight.dtype)
    h = ops.new_state("h", 0.8 * states["h"] + ops.matmul("w_in", x, masked))
    return h @ params["w_out"]


def leaky_with_bypass(ops, params, states, x):
    y = ops.matmul("w_in", x, params["w_in"])
    h = ops.new_state("h", 0.8 * states["h"] + jnp.tanh(y))
    return h @ params["w_out"] + jnp.sin(y) @ params["w_bypass"]


def leaky_pair_with_tied_weight(ops, params, states, x):
    left, right = x[..., :3], x[..., 3:]
    h = 0.8 * states["h"] + jnp.tanh(ops.matmul("forward", left, params["w"]))
    k = 0.6 * states["k"] + jnp.tanh(ops.matmul("backward", right, params["w"].T))
    h, k = ops.new_state("h", h), ops.new_state("k", k)
    return h @ params["w_out"] + k @ params["w_out_k"]


def independent_rnn(ops, params, states, x):
    recurrent = ops.element_wise("w_rec", params["w_rec"])
    drive = ops.matmul("w_in", x, params["w_in"], params["b_in"])
    h = ops.new_state("h", jnp.tanh(drive + recurrent * states["h"]))
    return h @ params["w_out"]


def learnt_leak(ops, params, states, x):
    leak = ops.element_wise("leak", params["leak"], jax.nn.sigmoid)
    drive = ops.matmul("w_in", x, params["w_in"])
    h = ops.new_state("h", leak * states["h"] + (1 - leak) * jnp.tanh(drive))
    return h @ params["w_out"]


def rotation(ops, params, states, x):
    """A complex diagonal linear recurrence as two real states."""
    re, im = states["re"], states["im"]
    cos = 0.9 * ops.element_wise("cos", params["angle"], jnp.cos)
    sin = 0.9 * ops.element_wise("sin", params["angle"], jnp.sin)
    new_re = cos * re - sin * im + ops.matmul("w_re", x, params["w_re"])
    new_im = sin * re + cos * im + ops.matmul("w_im", x, params["w_im"])
    re, im = ops.new_state("re", new_re), ops.new_state("im", new_im)
    return re @ params["w_out"] + jnp.tanh(im) @ params["w_out_im"]


def lif(ops, params, states, x):
    drive = ops.matmul("w_in", x, params["w_in"])
    reset = spike(states["V"] - 1)
    V = ops.new_state("V", 0.8 * states["V"] + drive - reset)
    return spike(V - 1) @ params["w_out"]


def alif(ops, params, states, x):
    """LIF with an adaptive threshold; the adaptation reads the membrane of the same step."""
    drive = ops.matmul("w_in", x, params["w_in"])
    fired = spike(states["V"] - 1 - 0.3 * states["a"])
    V = ops.new_state("V", 0.8 * states["V"] + drive - fired)
    a = ops.new_state("a", 0.9 * states["a"] + fired + 0.1 * V)
    return spike_reverse_only(V - 1 - 0.3 * a) @ params["w_out"]


def synapse(ops, params, states, x):
    """A linear conductance that drives a linear membrane in the same step."""
    g = ops.new_state("g", 0.7 * states["g"] + ops.matmul("w_in", x, params["w_in"]))
    V = ops.new_state("V", 0.9 * states["V"] + 0.5 * g)
    return V @ params["w_out"]


def synapse_read_out(ops, params, states, x):
    """The same, with both states read out and the membrane's leak driven by the synapse."""
    g = 0.7 * states["g"] + jnp.tanh(ops.matmul("w_in", x, params["w_in"]))
    g = ops.new_state("g", g)
    V = ops.new_state("V", 0.9 * states["V"] + 0.5 * g * (1.5 - states["V"]))
    return V @ params["w_out"] + jnp.sin(g) @ params["w_out_g"]


# --- recurrent ----------------------------------------------------------------------------


def tanh_rnn(ops, params, states, x):
    drive = ops.matmul("w_in", x, params["w_in"], params["bias"])
    h = ops.new_state("h", jnp.tanh(drive + ops.matmul("w_rec", states["h"], params["w_rec"])))
    return h @ params["w_out"]


def leaky_rnn(ops, params, states, x):
    drive = ops.matmul("w_in", x, params["w_in"], params["bias"])
    recurrent = ops.matmul("w_rec", jnp.tanh(states["h"]), params["w_rec"])
    h = ops.new_state("h", 0.8 * states["h"] + 0.2 * (drive + recurrent))
    return jnp.tanh(h) @ params["w_out"]


def plain_input_rnn(ops, params, states, x):
    """Marked recurrent weight, plain input weight (the model of the introduction)."""
    recurrent = ops.matmul("w_rec", states["h"], params["w_rec"])
    return ops.new_state("h", jnp.tanh(x @ params["w_in"] + recurrent))


def plain_recurrent_rnn(ops, params, states, x):
    """Marked input weight, plain recurrent weight: mixing that no trace can follow."""
    drive = ops.matmul("w_in", x, params["w_in"])
    recurrent = ops.mixing(states["h"] @ params["w_rec"])
    h = ops.new_state("h", 0.8 * states["h"] + 0.2 * jnp.tanh(drive + recurrent))
    return h @ params["w_out"]


def plain_encoder(ops, params, states, x):
    """A plain layer before the marked weight, and a plain way into the state beside it."""
    encoded = jnp.tanh(x @ params["w_encode"])
    drive = ops.matmul("w_in", encoded, params["w_in"]) + x @ params["w_skip"]
    h = ops.new_state("h", 0.8 * states["h"] + jnp.tanh(drive))
    return h @ params["w_out"]


def gru(ops, params, states, x):
    """Reset before the product: `w_r` reaches the state only through `w_h`."""
    h = states["h"]
    both = jnp.concatenate([x, h], axis=-1)
    z = jax.nn.sigmoid(ops.matmul("w_z", both, params["w_z"]))
    r = jax.nn.sigmoid(ops.matmul("w_r", both, params["w_r"]))
    reset = jnp.concatenate([x, r * h], axis=-1)
    candidate = jnp.tanh(ops.matmul("w_h", reset, params["w_h"]))
    h = ops.new_state("h", (1 - z) * h + z * candidate)
    return h @ params["w_out"]


def gru_reset_after(ops, params, states, x):
    h = states["h"]
    both = jnp.concatenate([x, h], axis=-1)
    z, r = jnp.split(jax.nn.sigmoid(ops.matmul("w_gates", both, params["w_gates"])), 2, axis=-1)
    recurrent = ops.matmul("w_rec", h, params["w_rec"], params["b_rec"])
    candidate = jnp.tanh(ops.matmul("w_in", x, params["w_in"]) + r * recurrent)
    h = ops.new_state("h", (1 - z) * h + z * candidate)
    return h @ params["w_out"]


def lstm_fused(ops, params, states, x):
    both = jnp.concatenate([x, states["h"]], axis=-1)
    gates = ops.matmul("gates", both, params["gates"]["weight"], params["gates"]["bias"])
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * states["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    c = ops.new_state("c", c)
    h = ops.new_state("h", jax.nn.sigmoid(o) * jnp.tanh(c))
    return h @ params["w_out"]


def lstm_separate(ops, params, states, x):
    both = jnp.concatenate([x, states["h"]], axis=-1)
    i = jax.nn.sigmoid(ops.matmul("w_i", both, params["w_i"]))
    f = jax.nn.sigmoid(ops.matmul("w_f", both, params["w_f"]))
    g = jnp.tanh(ops.matmul("w_g", both, params["w_g"]))
    o = jax.nn.sigmoid(ops.matmul("w_o", both, params["w_o"]))
    c = ops.new_state("c", f * states["c"] + i * g)
    h = ops.new_state("h", o * jnp.tanh(c))
    return h @ params["w_out"]


def lif_recurrent(ops, params, states, x):
    fired = spike(states["V"] - 1)
    drive = ops.matmul("w_in", x, params["w_in"]) + ops.matmul("w_rec", fired, params["w_rec"])
    V = ops.new_state("V", 0.8 * states["V"] + drive - fired)
    return spike(V - 1) @ params["w_out"]


def alif_late_threshold(ops, params, states, x):
    """The output reads a state as it was before the step."""
    drive = ops.matmul("w_in", x, params["w_in"])
    fired = spike(states["V"] - 1 - 0.3 * states["a"])
    V = ops.new_state("V", 0.8 * states["V"] + drive - fired)
    z = spike(V - 1 - 0.3 * states["a"])
    ops.new_state("a", 0.9 * states["a"] + z)
    return z @ params["w_out"]


def two_layers(ops, params, states, x):
    """The upper layer, of another size, reads the lower one in the same step."""
    drive = ops.matmul("lower.w", x, params["lower.w"])
    lower = ops.new_state("lower.h", 0.8 * states["lower.h"] + jnp.tanh(drive))
    drive = ops.matmul("upper.w", lower, params["upper.w"])
    upper = ops.new_state("upper.h", 0.6 * states["upper.h"] + jnp.tanh(drive))
    return upper @ params["w_out"] + lower @ params["w_out_lower"]


def two_layers_plain_link(ops, params, states, x):
    """The layers are linked by a plain weight, which has no trace of its own."""
    drive = ops.matmul("w_in", x, params["w_in"])
    lower = ops.new_state("lower", 0.8 * states["lower"] + jnp.tanh(drive))
    link = ops.mixing(lower @ params["w_link"])
    gain = ops.element_wise("gain", params["gain"])
    upper = ops.new_state("upper", 0.6 * states["upper"] + jnp.tanh(gain * link))
    return upper @ params["w_out"]


def layer_norm_rnn(ops, params, states, x):
    """An element of y reaches its own position directly, and every one through mean and scale."""
    y = ops.matmul("w_in", x, params["w_in"]) + ops.matmul("w_rec", states["h"], params["w_rec"])
    mean = ops.mixing(jnp.mean(y, axis=-1, keepdims=True))
    variance = ops.mixing(jnp.mean((y - mean) ** 2, axis=-1, keepdims=True))
    normed = (y - mean) / jnp.sqrt(variance + 0.1)
    h = ops.new_state("h", 0.8 * states["h"] + jnp.tanh(normed))
    return h @ params["w_out"]


def leaky_rnn_with_feedback(ops, params, states, x):
    recurrent = ops.matmul("w_rec", states["h"], params["w_rec"])
    drive = ops.matmul("w_in", x, params["w_in"]) + recurrent
    h = ops.new_state("h", 0.75 * states["h"] + jnp.tanh(drive) / 4)
    weight = params["w_out"]
    return ops.feedback(h, weight, np.cos(np.arange(weight.size)).reshape(weight.shape))
