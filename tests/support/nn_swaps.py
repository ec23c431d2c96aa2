"""Layers that brainstate and `braintrace.nn` both have: pairs with the same parameters."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from matrices import csr

from braintrace import nn

MASK = (np.arange(12).reshape(3, 4) % 4 > 0).astype(np.float32)


SIGNS = np.array([[1.0], [-1.0], [1.0]], np.float32)


KERNEL_MASK = (np.arange(12).reshape(3, 2, 2) % 4 > 0).astype(np.float32)


CONDUCTANCES = {"w_init": np.ones((3, 4)) * u.mS, "b_init": np.ones(4) * u.uA}


BEFORE = {"reset_after": False}


def lora(module, in_features, lora_rank, out_features):
    base = module.Linear(in_features, out_features)
    return module.LoRA(in_features, lora_rank, out_features, base_module=base)


def sparse(module, bias=None):
    matrix = csr((np.arange(12).reshape(3, 4) % 3).astype(float))
    return module.SparseLinear(matrix, bias, in_size=3)


class Words(brainstate.nn.Module):
    """Rows of a table for the largest entry of each input."""

    def __init__(self, module, *arguments, **options):
        super().__init__()
        self.table = module.Embedding(*arguments, **options)
        self.in_size, self.out_size = (3,), self.table.out_size

    def update(self, x):
        return self.table(jnp.argmax(u.get_mantissa(x), axis=-1))


def words(*arguments, **options):
    return lambda module: Words(module, *arguments, **options)


def swap(name, *args, shape=(3,), ours=None, unit=1.0, label="", **options):
    """One layer of `brainstate.nn`, and what ours needs on top of its arguments."""
    return pytest.param(name, args, options, ours or {}, shape, unit, id=label or name)


SWAPS = [
    swap("Linear", 3, 4),
    swap("Linear", 3, 4, b_init=None, w_mask=MASK, label="Linear, masked, no bias"),
    swap("Linear", 3, 4, b_init=0.5, label="Linear, one bias for all"),
    swap("Linear", (2, 3), (2, 4), shape=(2, 3), label="Linear, two axes"),
    swap("Linear", 3, 4, **CONDUCTANCES, unit=u.mV, label="Linear, with units"),
    swap("SignedWLinear", 3, 4),
    swap("SignedWLinear", 3, 4, w_sign=SIGNS, label="SignedWLinear, signs"),
    swap("ScaledWSLinear", 3, 4),
    swap("ScaledWSLinear", 3, 4, ws_gain=False, w_mask=SIGNS, b_init=None,
         label="ScaledWSLinear, no gain"),
    swap(sparse, label="SparseLinear"),
    swap(sparse, np.ones(4), label="SparseLinear, bias"),
    swap("AllToAll", 3, 4),
    swap("AllToAll", 3, 3, include_self=False, b_init=np.ones(3), label="AllToAll, others only"),
    swap("AllToAll", 3, 4, include_self=False, label="AllToAll, others only, wide"),
    swap("AllToAll", 3, 2, include_self=False, w_init=0.3, label="AllToAll, one weight, narrow"),
    swap("AllToAll", 3, 4, include_self=False, w_init=0.3, label="AllToAll, one weight, wide"),
    swap("OneToOne", 3),
    swap("OneToOne", 3, b_init=np.ones(3), label="OneToOne, bias"),
    swap("LoRA", 3, 2, 4),
    swap(lora, 3, 2, 4, label="LoRA on a base"),
    swap(words(3, 4), label="Embedding"),
    swap(words(3, (2, 2), padding_idx=1), label="Embedding, padded, of two axes"),
    swap(words(3, 4, max_norm=0.7, norm_type=1.0), label="Embedding, of a largest norm"),
    swap(words(3, 4, freeze=True), label="Embedding, frozen"),
    swap("Conv1d", (7, 2), 4, 3, 2, b_init=np.ones((1, 4)), shape=(7, 2)),
    swap("Conv1d", (7, 2), 2, 3, padding=(1, 2), w_mask=KERNEL_MASK, shape=(7, 2),
         label="Conv1d, masked"),
    swap("Conv1d", (2, 7), 4, 3, b_init=np.ones((1, 4, 1))[0], channel_first=True, shape=(2, 7),
         label="Conv1d, channel first"),
    swap("Conv2d", (5, 4, 2), 4, (3, 2), (1, 2), rhs_dilation=2, groups=2, shape=(5, 4, 2)),
    swap("Conv2d", (5, 4, 2), 4, 3, lhs_dilation=2, padding=(1, 2), b_init=0.2, shape=(5, 4, 2),
         label="Conv2d, stretched"),
    swap("Conv3d", (3, 4, 2, 2), 3, 2, shape=(3, 4, 2, 2)),
    swap("ScaledWSConv1d", (7, 2), 4, 3, b_init=np.ones((1, 4)), shape=(7, 2)),
    swap("ScaledWSConv2d", (5, 4, 2), 4, 3, groups=2, ws_gain=False, shape=(5, 4, 2)),
    swap("ScaledWSConv3d", (3, 4, 2, 2), 3, 2, 2, shape=(3, 4, 2, 2)),
    swap("ValinaRNNCell", 3, 4),
    swap("ValinaRNNCell", 3, 4, activation="tanh", b_init=None,
         label="ValinaRNNCell, tanh, no bias"),
    swap("GRUCell", 3, 4, ours=BEFORE),
    swap("MGUCell", 3, 4, ours=BEFORE),
    swap("LSTMCell", 3, 4),
    swap("URLSTMCell", 3, 4),
]  # fmt: skip


def pair(name, args, options, ours, dtype):
    """The same layer of both packages with the same parameters, drawn anew."""
    if callable(name):
        layers = name(brainstate.nn, *args), name(nn, *args)
    else:
        layers = (
            getattr(brainstate.nn, name)(*args, **options),
            getattr(nn, name)(*args, **options, **ours),
        )
    theirs, own = (layer.states(brainstate.ParamState) for layer in layers)
    assert list(theirs) == list(own)
    generator = np.random.default_rng(2)
    for path, state in theirs.items():
        assert jax.tree.structure(state.value) == jax.tree.structure(own[path].value)
        draw = jax.tree.map(
            lambda leaf: jax.device_put(generator.standard_normal(np.shape(leaf)).astype(dtype)),
            state.value,
        )
        state.value = own[path].value = draw
    return layers
