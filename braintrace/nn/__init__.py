"""Layers, cells, neurons and synapses, written with the ETP operations.

A layer that `brainstate.nn` also has takes the same arguments and has the same parameters under the
same names. Its products are marked, so that its weights learn online if it feeds a hidden state. To
migrate a model, replace ``brainstate.nn.X`` by ``braintrace.nn.X``. Every other layer of
`brainstate.nn` has its name here as well, and is marked by `braintrace.mark`. The exception is
`Delay`, which has arguments of its own.
"""

import functools as _functools
from typing import Any as _Any

import brainstate as _brainstate

from .._etrace_op.mark import mark as _mark
from . import surrogate
from ._cells import CFNCell, IndRNN, LeakyRNN, MiniGRU, MiniLSTM, MinimalRNNCell, ValinaRNNCell
from ._connections import AllToAll, Embedding, LoRA, Projection, SparseLinear
from ._conv import Conv1d, Conv2d, Conv3d, ScaledWSConv1d, ScaledWSConv2d, ScaledWSConv3d
from ._delays import Delay, DelayedLinear
from ._gated import GRUCell, LRUCell, LSTMCell, MGUCell, RTUCell
from ._linear import FeedbackLinear, GroupedLinear, Linear, ScaledWSLinear
from ._neurons import ALIF, GIF, LIF, Leaky
from ._nir import from_nir, to_nir
from ._synapses import COBA, CUBA, Alpha, DualExpon, Expon, LeakyRateReadout, LeakySpikeReadout

OneToOne = _mark(_brainstate.nn.OneToOne)
SignedWLinear = _mark(_brainstate.nn.SignedWLinear)
URLSTMCell = _mark(_brainstate.nn.URLSTMCell)

__all__ = [
    "ALIF", "COBA", "CUBA", "GIF", "LIF", "AllToAll", "Alpha", "CFNCell", "Conv1d", "Conv2d",
    "Conv3d", "Delay", "DelayedLinear", "DualExpon", "Embedding", "Expon", "FeedbackLinear",
    "GRUCell", "GroupedLinear", "IndRNN", "LRUCell", "LSTMCell", "Leaky", "LeakyRNN",
    "LeakyRateReadout", "LeakySpikeReadout", "Linear", "LoRA", "MGUCell", "MiniGRU", "MiniLSTM",
    "MinimalRNNCell", "OneToOne", "Projection", "RTUCell", "ScaledWSConv1d", "ScaledWSConv2d",
    "ScaledWSConv3d", "ScaledWSLinear", "SignedWLinear", "SparseLinear", "URLSTMCell",
    "ValinaRNNCell", "from_nir", "surrogate", "to_nir",
]  # fmt: skip


@_functools.cache
def __getattr__(name: str) -> _Any:
    layer = getattr(_brainstate.nn, name, None)
    if not isinstance(layer, type) or not issubclass(layer, _brainstate.nn.Module):
        raise AttributeError(f"module 'braintrace.nn' has no attribute '{name}'")
    # The parts of a Sequential have marks of their own.
    return layer if layer is _brainstate.nn.Sequential else _mark(layer)
