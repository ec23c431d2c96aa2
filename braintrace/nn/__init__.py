"""Layers, cells, neurons and synapses, written with the ETP operations.

A layer that `brainstate.nn` also has takes the same arguments and has the same parameters under the
same names. Its products are marked, so that its weights learn online if it feeds a hidden state. To
migrate a model, replace ``brainstate.nn.X`` by ``braintrace.nn.X``. Every other layer of
`brainstate.nn` has its name here as well, and is marked by `braintrace.mark`.
"""

from typing import Any as _Any

import brainstate as _brainstate

from .._etrace_op import mark as _mark
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
from ._linear import FeedbackLinear as FeedbackLinear
from ._linear import GroupedLinear as GroupedLinear
from ._linear import Linear as Linear
from ._linear import ScaledWSLinear as ScaledWSLinear
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

OneToOne = _mark(_brainstate.nn.OneToOne)
SignedWLinear = _mark(_brainstate.nn.SignedWLinear)
URLSTMCell = _mark(_brainstate.nn.URLSTMCell)

__all__ = sorted(name for name in globals() if not name.startswith("_"))


def __getattr__(name: str) -> _Any:
    layer = getattr(_brainstate.nn, name, None)
    if not isinstance(layer, type) or not issubclass(layer, _brainstate.nn.Module):
        raise AttributeError(f"module 'braintrace.nn' has no attribute '{name}'")
    if layer is not _brainstate.nn.Sequential:  # its parts have marks of their own
        layer = _mark(layer)
        layer.__module__ = __name__
    globals()[name] = layer
    return layer
