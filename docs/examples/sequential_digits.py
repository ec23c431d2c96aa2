"""Train a recurrent network online to read handwritten digits.

Each image of scikit-learn's ``load_digits`` (8 x 8 pixels) is a sequence: one row of pixels
per time step, or one pixel with ``--pixels``. Eligibility traces are carried forward in time
next to the hidden states, so the gradient is ready after the last step and the sequence is
never gone through backwards. ``--algorithm bptt`` trains the same network with
backpropagation through time, for comparison.

    python docs/examples/sequential_digits.py
    python docs/examples/sequential_digits.py --model gru --compare
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import braintrace

ALGORITHMS = {"bptt": "BPTT", "es_d_rtrl": "ES_D_RTRL", "d_rtrl": "D_RTRL"}
CLASSES = 10


# --- models ------------------------------------------------------------------------------
#
# A weight inside `braintrace.matmul` learns through an eligibility trace. The readout is an
# ordinary matrix product: it has no memory, so the gradient of the same step is all it needs.


class Layer(brainstate.nn.Module):
    """The weights of a recurrent layer with ``gates`` gates and of its readout."""

    def __init__(self, inputs, hidden, gates=1):
        super().__init__()
        self.hidden = hidden
        glorot = brainstate.nn.init.XavierNormal()
        orthogonal = brainstate.nn.init.Orthogonal()
        recurrent = np.concatenate([orthogonal((hidden, hidden)) for _ in range(gates)], axis=1)
        self.w_in = brainstate.ParamState(glorot((inputs, gates * hidden)))
        self.w_rec = brainstate.ParamState(recurrent)
        self.bias = brainstate.ParamState(jnp.zeros(gates * hidden))
        self.w_out = brainstate.ParamState(glorot((hidden, CLASSES)))
        self.b_out = brainstate.ParamState(jnp.zeros(CLASSES))

    def drive(self, x):
        return braintrace.matmul(x, self.w_in.value, self.bias.value)
