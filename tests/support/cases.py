"""The catalogue of models that the correctness tests run over.

A `Case` describes a model once, in plain terms that the oracles read (`oracles.py`), and builds a
brainstate module of it (`models.py`) that calls the library's ETP operations. Sizes are tiny:
3 inputs, 4 hidden units, 2 outputs. Initial states are not zero, so that the first step counts.
All numbers are exact in single precision, so that float32 results can be held against a float64
oracle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import models
import numpy as np
import pytest
import steps
from models import initial_state, single_precision

INPUTS, HIDDEN, OUTPUTS = 3, 4, 2


@dataclass(frozen=True, eq=False)
class Case:
    """One model.

    step: the step function, see `steps.py`.
    shapes: {parameter: shape, or a dict of shapes for a parameter that holds a dict}.
    states: {state: number of units}; names with dots are paths.
    groups: {group: (state, ...)}, in the order in which a step computes them.
    relations: {operation: (group, ...)}, the groups that its output reaches position by position.
    operands: {operation: (parameter, ...)}, where it is not the one of the same name.
    broadcast: operations of which one output element reaches several positions.
    diagonal: every path from state to state is position by position, so D-RTRL equals BPTT.
    same_step_only: parameters that get nothing but the gradient of the same step.
    costs_accuracy: the compiler has to warn, because something cannot be traced.
    spikes: states that emit spikes when they pass 1.
    module: a hand-written brainstate module, where the generic one would prove less.
    """

    name: str
    step: Callable
    shapes: Mapping
    states: Mapping
    groups: Mapping
    relations: Mapping
    operands: Mapping = field(default_factory=dict)
    broadcast: tuple = ()
    diagonal: bool = False
    same_step_only: tuple = ()
    costs_accuracy: bool = False
    spikes: tuple = ()
    inputs: int = INPUTS
    outputs: int = OUTPUTS
    scale: float = 1.0
    module: Callable | None = None

    def params(self, dtype=np.float32, seed=0):
        """Seeded parameters {name: array}, the same at every call."""
        generator = np.random.default_rng(seed)

        def draw(shape):
            scale = self.scale / np.sqrt(shape[0]) if len(shape) == 2 else 0.5
            return single_precision(scale * generator.standard_normal(shape), dtype)

        return jax.tree.map(draw, dict(self.shapes), is_leaf=lambda s: isinstance(s, tuple))

    def initial_states(self, batch=None, dtype=np.float32):
        """Initial states {name: (batch, units)}, or (units,) where batch is None."""
        return {name: initial_state(units, batch, dtype) for name, units in self.states.items()}

    def sequences(self, batch=None, length=6, dtype=np.float32, seed=1):
        """Seeded inputs (time, batch, inputs) and targets (time, batch, outputs)."""
        generator = np.random.default_rng(seed)
        lead = (length,) if batch is None else (length, batch)
        xs = generator.standard_normal((*lead, self.inputs))
        targets = generator.standard_normal((*lead, self.outputs))
        return single_precision(xs, dtype), single_precision(targets, dtype)

    def build(self, dtype=np.float32, seed=0):
        """A fresh brainstate module of this model, its hidden states not yet initialised."""
        module = self.module or models.GenericModel
        return module(self, self.params(dtype, seed))

    def parameters_of(self, operation):
        """Names of the parameters that an operation learns."""
        return set(self.operands.get(operation, (operation,)))

    @staticmethod
    def loss(output, target):
        """Mean squared error of one step."""
        return ((output - target) ** 2).mean()


H = HIDDEN
W_IN, W_REC, W_BOTH, W_OUT = (INPUTS, H), (H, H), (INPUTS + H, H), (H, OUTPUTS)
ONE_GROUP = {"states": {"h": H}, "groups": {"h": ("h",)}}
MEMBRANE = {"states": {"V": H}, "groups": {"V": ("V",)}, "spikes": ("V",), "scale": 2.5}
ADAPTIVE = {
    "states": {"V": H, "a": H},
    "groups": {"neuron": ("V", "a")},
    "spikes": ("V",),
    "scale": 2.5,
}
LSTM = {"states": {"c": H, "h": H}, "groups": {"cell": ("c", "h")}}
IN_OUT = {"w_in": W_IN, "w_out": W_OUT}


DIAGONAL = [
    Case("leaky", steps.leaky, IN_OUT, **ONE_GROUP, relations={"w_in": ("h",)}, diagonal=True),
    Case(
        "leaky_with_bias",
        steps.leaky_with_bias,
        {"layer": {"weight": W_IN, "bias": (H,)}, "w_out": W_OUT, "b_out": (OUTPUTS,)},
        **ONE_GROUP,
        relations={"layer": ("h",)},
        diagonal=True,
    ),
    Case(
        "leaky_with_masked_weight",
        steps.leaky_with_masked_weight,
        IN_OUT,
        **ONE_GROUP,
        relations={"w_in": ("h",)},
        diagonal=True,
    ),
    Case(
        "leaky_with_bypass",
        steps.leaky_with_bypass,
        {**IN_OUT, "w_bypass": W_OUT},
        **ONE_GROUP,
        relations={"w_in": ("h",)},
        diagonal=True,
    ),
    Case(
        "leaky_pair_with_tied_weight",
        steps.leaky_pair_with_tied_weight,
        {"w": W_IN, "w_out": W_OUT, "w_out_k": (INPUTS, OUTPUTS)},
        states={"h": H, "k": INPUTS},
        groups={"h": ("h",), "k": ("k",)},
        relations={"forward": ("h",), "backward": ("k",)},
        operands={"forward": ("w",), "backward": ("w",)},
        inputs=INPUTS + H,
        diagonal=True,
    ),
    Case(
        "independent_rnn",
        steps.independent_rnn,
        {**IN_OUT, "w_rec": (H,), "b_in": (H,)},
        **ONE_GROUP,
        relations={"w_in": ("h",), "w_rec": ("h",)},
        operands={"w_in": ("w_in", "b_in")},
        broadcast=("w_rec",),
        diagonal=True,
    ),
    Case(
        "learnt_leak",
        steps.learnt_leak,
        {**IN_OUT, "leak": (H,)},
        **ONE_GROUP,
        relations={"w_in": ("h",), "leak": ("h",)},
        broadcast=("leak",),
        diagonal=True,
    ),
    Case(
        "rotation",
        steps.rotation,
        {"w_re": W_IN, "w_im": W_IN, "angle": (H,), "w_out": W_OUT, "w_out_im": W_OUT},
        states={"re": H, "im": H},
        groups={"oscillator": ("re", "im")},
        relations=dict.fromkeys(("w_re", "w_im", "cos", "sin"), ("oscillator",)),
        operands={"cos": ("angle",), "sin": ("angle",)},
        broadcast=("cos", "sin"),
        diagonal=True,
    ),
    Case("lif", steps.lif, IN_OUT, **MEMBRANE, relations={"w_in": ("V",)}, diagonal=True),
    Case(
        "alif",
        steps.alif,
        IN_OUT,
        **ADAPTIVE,
        relations={"w_in": ("neuron",)},
        diagonal=True,
    ),
    Case(
        "alif_late_threshold",  # the output reads the threshold as it was before the step
        steps.alif_late_threshold,
        IN_OUT,
        **ADAPTIVE,
        relations={"w_in": ("neuron",)},
        diagonal=True,
    ),
    Case(
        "synapse",
        steps.synapse,
        IN_OUT,
        states={"g": H, "V": H},
        groups={"neuron": ("g", "V")},
        relations={"w_in": ("neuron",)},
        diagonal=True,
    ),
    Case(
        "synapse_read_out",
        steps.synapse_read_out,
        {**IN_OUT, "w_out_g": W_OUT},
        states={"g": H, "V": H},
        groups={"neuron": ("g", "V")},
        relations={"w_in": ("neuron",)},
        diagonal=True,
    ),
]

RECURRENT = [
    Case(
        "tanh_rnn",
        steps.tanh_rnn,
        {**IN_OUT, "w_rec": W_REC, "bias": (H,)},
        **ONE_GROUP,
        relations={"w_in": ("h",), "w_rec": ("h",)},
        operands={"w_in": ("w_in", "bias")},
    ),
    Case(
        "leaky_rnn",
        steps.leaky_rnn,
        {**IN_OUT, "w_rec": W_REC, "bias": (H,)},
        **ONE_GROUP,
        relations={"w_in": ("h",), "w_rec": ("h",)},
        operands={"w_in": ("w_in", "bias")},
        scale=1.5,
    ),
    Case(
        "plain_input_rnn",
        steps.plain_input_rnn,
        {"w_in": W_IN, "w_rec": W_REC},
        **ONE_GROUP,
        relations={"w_rec": ("h",)},
        same_step_only=("w_in",),
        outputs=HIDDEN,
        module=models.PlainInputRNN,
    ),
    Case(
        "plain_recurrent_rnn",
        steps.plain_recurrent_rnn,
        {**IN_OUT, "w_rec": W_REC},
        **ONE_GROUP,
        relations={"w_in": ("h",)},
        same_step_only=("w_rec",),
        costs_accuracy=True,
        scale=1.5,
    ),
    Case(
        "plain_encoder",
        steps.plain_encoder,
        {**IN_OUT, "w_in": W_REC, "w_encode": W_IN, "w_skip": W_IN},
        **ONE_GROUP,
        relations={"w_in": ("h",)},
        same_step_only=("w_encode", "w_skip"),
    ),
    Case(
        "gru",
        steps.gru,
        {"w_z": W_BOTH, "w_r": W_BOTH, "w_h": W_BOTH, "w_out": W_OUT},
        **ONE_GROUP,
        relations={"w_z": ("h",), "w_r": (), "w_h": ("h",)},
        same_step_only=("w_r",),
        costs_accuracy=True,
    ),
    Case(
        "gru_reset_after",
        steps.gru_reset_after,
        {**IN_OUT, "w_gates": (INPUTS + H, 2 * H), "w_rec": W_REC, "b_rec": (H,)},
        **ONE_GROUP,
        relations=dict.fromkeys(("w_gates", "w_rec", "w_in"), ("h",)),
        operands={"w_rec": ("w_rec", "b_rec")},
    ),
    Case(
        "lstm_fused",
        steps.lstm_fused,
        {"gates": {"weight": (INPUTS + H, 4 * H), "bias": (4 * H,)}, "w_out": W_OUT},
        **LSTM,
        relations={"gates": ("cell",)},
    ),
    Case(
        "lstm_separate",
        steps.lstm_separate,
        {**dict.fromkeys(("w_i", "w_f", "w_g", "w_o"), W_BOTH), "w_out": W_OUT},
        **LSTM,
        relations=dict.fromkeys(("w_i", "w_f", "w_g", "w_o"), ("cell",)),
    ),
    Case(
        "lif_recurrent",
        steps.lif_recurrent,
        {**IN_OUT, "w_rec": W_REC},
        **MEMBRANE,
        relations={"w_in": ("V",), "w_rec": ("V",)},
    ),
    Case(
        "two_layers",
        steps.two_layers,
        {"lower.w": W_IN, "upper.w": (H, 5), "w_out": (5, OUTPUTS), "w_out_lower": W_OUT},
        states={"lower.h": H, "upper.h": 5},
        groups={"lower": ("lower.h",), "upper": ("upper.h",)},
        relations={"lower.w": ("lower",), "upper.w": ("upper",)},
        module=models.TwoLayers,
    ),
    Case(
        "two_layers_plain_link",
        steps.two_layers_plain_link,
        {"w_in": W_IN, "w_link": (H, 5), "gain": (5,), "w_out": (5, OUTPUTS)},
        states={"lower": H, "upper": 5},
        groups={"lower": ("lower",), "upper": ("upper",)},
        relations={"w_in": ("lower",), "gain": ("upper",)},
        broadcast=("gain",),
        same_step_only=("w_link",),
        costs_accuracy=True,  # what the upper layer remembers of the lower one has no trace
    ),
    Case(
        "layer_norm_rnn",
        steps.layer_norm_rnn,
        {**IN_OUT, "w_rec": W_REC},
        **ONE_GROUP,
        relations={"w_in": ("h",), "w_rec": ("h",)},
        costs_accuracy=True,
    ),
]

WITH_FEEDBACK = Case(
    "leaky_rnn_with_feedback",
    steps.leaky_rnn_with_feedback,
    {**IN_OUT, "w_rec": W_REC},
    **ONE_GROUP,
    relations={"w_in": ("h",), "w_rec": ("h",)},
)
"""Not one of all: its gradients are not those of a loss."""

ALL = DIAGONAL + RECURRENT
BY_NAME = {case.name: case for case in [*ALL, WITH_FEEDBACK]}


def each(catalogue, at_night=()):
    """Parametrise a test over cases, named in its output; some of them only with `--nightly`."""
    rows = [pytest.param(case, id=case.name) for case in catalogue]
    rows += [pytest.param(case, id=case.name, marks=pytest.mark.nightly) for case in at_night]
    return pytest.mark.parametrize("case", rows)
