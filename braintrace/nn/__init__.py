"""Layers, cells, neurons and synapses, written with the ETP operations.

A layer that `brainstate.nn` also has takes the same arguments and has the same parameters under the
same names. Its products are marked, so that its weights learn online if it feeds a hidden state. To
migrate a model, replace ``brainstate.nn.X`` by ``braintrace.nn.X``.
"""

from . import surrogate as surrogate
from ._connections import AllToAll as AllToAll
from ._connections import LoRA as LoRA
from ._connections import OneToOne as OneToOne
from ._connections import SparseLinear as SparseLinear
from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._conv import ScaledWSConv1d as ScaledWSConv1d
from ._conv import ScaledWSConv2d as ScaledWSConv2d
from ._conv import ScaledWSConv3d as ScaledWSConv3d
from ._diagonal_cells import LRUCell as LRUCell
from ._diagonal_cells import RTUCell as RTUCell
from ._embedding import Embedding as Embedding
from ._gated_cells import GRUCell as GRUCell
from ._gated_cells import LSTMCell as LSTMCell
from ._gated_cells import MGUCell as MGUCell
from ._gated_cells import URLSTMCell as URLSTMCell
from ._linear import FeedbackLinear as FeedbackLinear
from ._linear import GroupedLinear as GroupedLinear
from ._linear import Linear as Linear
from ._linear import ScaledWSLinear as ScaledWSLinear
from ._linear import SignedWLinear as SignedWLinear
from ._minimal_cells import CFNCell as CFNCell
from ._minimal_cells import MiniGRU as MiniGRU
from ._minimal_cells import MiniLSTM as MiniLSTM
from ._neurons import ALIF as ALIF
from ._neurons import GIF as GIF
from ._neurons import LIF as LIF
from ._projection import Projection as Projection
from ._rate_cells import IndRNN as IndRNN
from ._rate_cells import LeakyRNN as LeakyRNN
from ._rate_cells import MinimalRNNCell as MinimalRNNCell
from ._rate_cells import ValinaRNNCell as ValinaRNNCell
from ._readouts import LeakyRateReadout as LeakyRateReadout
from ._readouts import LeakySpikeReadout as LeakySpikeReadout
from ._synapses import COBA as COBA
from ._synapses import CUBA as CUBA
from ._synapses import Alpha as Alpha
from ._synapses import DualExpon as DualExpon
from ._synapses import Expon as Expon
