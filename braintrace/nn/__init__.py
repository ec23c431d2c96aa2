"""Layers, cells, neurons and synapses, written with the ETP operations.

A layer that `brainstate.nn` also has takes the same arguments and has the same parameters under the
same names. Its products are marked, so that its weights learn online if it feeds a hidden state. To
migrate a model, replace ``brainstate.nn.X`` by ``braintrace.nn.X``. Layers of `brainstate.nn` that
have no product (activations, dropout, pooling, padding, normalisation) have the same names here.
"""

from typing import Any as _Any

import brainstate as _brainstate

from . import surrogate as surrogate
from ._cells import CFNCell as CFNCell
from ._cells import IndRNN as IndRNN
from ._cells import LeakyRNN as LeakyRNN
from ._cells import MiniGRU as MiniGRU
from ._cells import MiniLSTM as MiniLSTM
from ._cells import MinimalRNNCell as MinimalRNNCell
from ._cells import ValinaRNNCell as ValinaRNNCell
from ._connections import AllToAll as AllToAll
from ._connections import Embedding as Embedding
from ._connections import LoRA as LoRA
from ._connections import OneToOne as OneToOne
from ._connections import SparseLinear as SparseLinear
from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._conv import ScaledWSConv1d as ScaledWSConv1d
from ._conv import ScaledWSConv2d as ScaledWSConv2d
from ._conv import ScaledWSConv3d as ScaledWSConv3d
from ._diagonal import LRUCell as LRUCell
from ._diagonal import RTUCell as RTUCell
from ._gated import GRUCell as GRUCell
from ._gated import LSTMCell as LSTMCell
from ._gated import MGUCell as MGUCell
from ._gated import URLSTMCell as URLSTMCell
from ._linear import FeedbackLinear as FeedbackLinear
from ._linear import GroupedLinear as GroupedLinear
from ._linear import Linear as Linear
from ._linear import ScaledWSLinear as ScaledWSLinear
from ._linear import SignedWLinear as SignedWLinear
from ._neurons import ALIF as ALIF
from ._neurons import GIF as GIF
from ._neurons import LIF as LIF
from ._neurons import Leaky as Leaky
from ._readouts import LeakyRateReadout as LeakyRateReadout
from ._readouts import LeakySpikeReadout as LeakySpikeReadout
from ._synapses import COBA as COBA
from ._synapses import CUBA as CUBA
from ._synapses import Alpha as Alpha
from ._synapses import DualExpon as DualExpon
from ._synapses import Expon as Expon
from ._synapses import Projection as Projection

__all__ = sorted(name for name in globals() if not name.startswith("_"))

_WITHOUT_PRODUCT = frozenset({
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d", "AdaptiveMaxPool3d", "AlphaDropout", "AvgPool1d", "AvgPool2d",
    "AvgPool3d", "BatchNorm0d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "CELU",
    "CircularPad1d", "CircularPad2d", "CircularPad3d", "ConstantPad1d", "ConstantPad2d",
    "ConstantPad3d", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropoutFixed", "ELU",
    "FeatureAlphaDropout", "Flatten", "GELU", "GLU", "GroupNorm", "Hardshrink", "Hardsigmoid",
    "Hardswish", "Hardtanh", "Identity", "LPPool1d", "LPPool2d", "LPPool3d", "LayerNorm",
    "LeakyReLU", "LogSigmoid", "LogSoftmax", "MaxPool1d", "MaxPool2d", "MaxPool3d",
    "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d", "Mish", "PReLU", "RMSNorm", "RReLU", "ReLU",
    "ReLU6", "ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "ReplicationPad1d",
    "ReplicationPad2d", "ReplicationPad3d", "SELU", "Sequential", "SiLU", "Sigmoid", "Softmax",
    "Softmax2d", "Softmin", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    "Threshold", "Unflatten", "ZeroPad1d", "ZeroPad2d", "ZeroPad3d",
})  # fmt: skip
"""Names of layers of `brainstate.nn` that mix no inputs by a weight, so they need no mark."""


def __getattr__(name: str) -> _Any:
    if name in _WITHOUT_PRODUCT:
        return getattr(_brainstate.nn, name)
    raise AttributeError(f"module 'braintrace.nn' has no attribute '{name}'")
