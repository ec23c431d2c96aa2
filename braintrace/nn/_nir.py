"""Networks in the Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._errors import CompilationError, OptionError, optional_import
from .._etrace_op.conv import conv
from . import surrogate
from ._delays import Delay
from ._linear import Linear

Spike = Callable[[Any], Any]


def from_nir(graph: Any, *, dt: float = 1e-4, spk_fun: Spike = surrogate.arctan) -> NIRModel:
    r"""Return a model that runs a graph of the Neuromorphic Intermediate Representation (NIR).

    Weights of linear and convolution nodes learn, neurons keep their constants. Differential
    equations are solved by the Euler method, as in snnTorch and norse:

    .. math::
        I &\leftarrow I + \frac{dt}{\tau_{syn}} (w_{in} x - I) \\
        v &\leftarrow v + \frac{dt}{\tau} (v_{leak} - v + R I), \qquad z = \Theta(v - \vartheta)

    The state is the potential before the reset, which happens at the start of the next step. A
    potential starts at :math:`v_{leak}`, or at :math:`v_{reset}` if that is above the threshold.

    Parameters
    ----------
    graph : nir.NIRGraph
        The network, for example from ``nir.read``. Nodes: Linear, Affine, Conv1d, Conv2d, Flatten,
        SumPool2d, LIF, CubaLIF, LI, IF, Threshold, Delay. An edge that closes a cycle carries the
        neurons' output of the step before.
    dt : float, optional
        The time step, in the unit of the graph's time constants. snnTorch writes them for the
        default of 0.1 ms. norse 1.1 writes time constants times its ``dt``: give its square.
    spk_fun : callable, optional
        Heaviside function with a surrogate gradient.

    Returns
    -------
    NIRModel
        A module whose ``update`` is one step, for inputs with the graph's shapes (channels first)
        after an optional batch axis. It returns the output, or a tuple of several outputs.

    Raises
    ------
    OptionError
        For a node of a different kind.
    CompilationError
        For a cycle without neurons and delays.

    References
    ----------
    .. [1] J. E. Pedersen et al., "Neuromorphic intermediate representation: a unified instruction
       set for interoperable brain-inspired computing", Nature Communications 15, 2024.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp, nir, numpy as np
    >>> ones = np.ones(3)
    >>> neurons = nir.LIF(tau=1e-2 * ones, r=ones, v_leak=0 * ones, v_threshold=0.1 * ones)
    >>> graph = nir.NIRGraph.from_list(nir.Linear(np.ones((3, 2))), neurons)  # or nir.read(path)
    >>> model = braintrace.nn.from_nir(graph, dt=1e-3)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((8, 2)), batch_size=8)
    >>> print(learner(jnp.ones((8, 2)))[0])
    [1. 1. 1.]
    >>> trained = braintrace.nn.to_nir(model)
    """
    layers: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        kind = type(node).__name__
        if kind not in LAYERS:
            raise OptionError(
                f"The node {name!r} of the graph is a `nir.{kind}`; expected one of "
                f"{', '.join(LAYERS)}."
            )
        if (make := LAYERS[kind]) is not None:
            layers[name] = make(node, dt, spk_fun)
    return NIRModel(graph, layers)


def to_nir(model: NIRModel) -> Any:
    """Return the NIR graph of a model with its current weights.

    Parameters
    ----------
    model : NIRModel
        A model that `from_nir` has returned. Its weights may have changed since.

    Returns
    -------
    nir.NIRGraph
        For ``nir.write``, or for another library. All numbers but changed weights are as in the
        graph that was read.

    Raises
    ------
    MissingPackageError
        If the package ``nir`` is not installed.
    OptionError
        For another model.

    Examples
    --------
    >>> import braintrace, nir, numpy as np
    >>> model = braintrace.nn.from_nir(nir.NIRGraph.from_list(nir.Linear(np.ones((3, 2)))))
    >>> braintrace.nn.to_nir(model).nodes["linear"].weight.shape
    (3, 2)
    """
    nir = optional_import("nir", "nir")
    if not isinstance(model, NIRModel):
        raise OptionError(
            f"`model` is {shown(model)}; expected a model that `from_nir` has returned. Write the "
            "network as a `nir.NIRGraph`, and train the model of that graph."
        )
    nodes = {name: copy.copy(node) for name, node in model.graph.nodes.items()}
    for name, layer in model.layers.items():
        if isinstance(layer, Linear | _Conv):
            value, node = layer.weight.value, nodes[name]
            weight = value["weight"].T if isinstance(layer, Linear) else value["weight"]
            node.weight = np.asarray(weight, node.weight.dtype)
            if "bias" in value:
                node.bias = np.asarray(value["bias"], node.bias.dtype)
    edges, metadata = list(model.graph.edges), dict(model.graph.metadata)
    return nir.NIRGraph(nodes, edges, metadata, type_check=False)


class NIRModel(brainstate.nn.Module):
    """A network of the Neuromorphic Intermediate Representation; see `from_nir`.

    Attributes
    ----------
    graph : nir.NIRGraph
        The graph that was read.
    layers : dict
        A module for every node but inputs and outputs, by the name of the node.
    """

    def __init__(self, graph: Any, layers: dict[str, Any]) -> None:
        super().__init__()
        self.graph, self.layers = graph, layers
        self.early = [name for name, each in layers.items() if getattr(each, "is_early", False)]
        self.order, self.late = _order(graph, layers, self.early)

    def update(self, *inputs: Any) -> Any:
        """Run one step; with several inputs and outputs, in the order of the graph's nodes."""
        values: dict[str, Any] = {name: self.layers[name].output() for name in self.early}
        values.update(zip(self.graph.inputs, inputs, strict=True))
        before = {source: self.layers[source].output() for source, _ in self.late}

        def arriving(name: str) -> Any:
            edges = [edge for edge in map(tuple, self.graph.edges) if edge[1] == name]
            return sum((before if edge in self.late else values)[edge[0]] for edge in edges)

        for name in self.order:
            if name not in values:
                x = arriving(name)
                values[name] = self.layers[name](x) if name in self.layers else x
        for name in self.early:
            self.layers[name](arriving(name))
        outputs = tuple(values[name] for name in self.graph.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _order(
    graph: Any, layers: dict[str, Any], early: Iterable[str]
) -> tuple[list[str], set[tuple[str, str]]]:
    """Return the nodes in an order of evaluation, and the edges that carry the step before.

    If no node is ready, the first one that an input has reached starts a cycle: edges from the
    neurons that lead back to it are late.
    """
    order = [*graph.inputs, *early]
    rest, late = [name for name in graph.nodes if name not in order], set[tuple[str, str]]()

    def waits_for(target: str) -> list[str]:
        edges = (edge for edge in map(tuple, graph.edges) if edge[1] == target)
        return [edge[0] for edge in edges if edge[0] in rest and edge not in late]

    while rest:
        ready = [name for name in rest if not waits_for(name)]
        if ready:
            order += ready
            rest = [name for name in rest if name not in ready]
            continue
        start = next((t for s, t in graph.edges if s in order and t in rest), rest[0])
        behind, known = [start], len(late)
        for target in behind:
            for source in waits_for(target):
                if isinstance(layers.get(source), _Neuron):
                    late.add((source, target))
                elif source not in behind:
                    behind.append(source)
        if len(late) == known:
            raise CompilationError(
                f"The graph has a cycle through {start!r} without neurons and delays, so its nodes "
                "have no order: add a `nir.Delay`."
            )
    return order, late


# --- nodes


class _Conv(brainstate.nn.Module):
    def __init__(self, node: Any, *_: Any) -> None:
        super().__init__()
        value = {"weight": jnp.asarray(node.weight), "bias": jnp.asarray(node.bias)}
        self.weight, self.shape = brainstate.ParamState(value), _shape(node.input_type)
        axes = np.ndim(node.weight) - 2
        is_named = isinstance(node.padding, str)
        pairs = [(int(p), int(p)) for p in np.broadcast_to(0 if is_named else node.padding, axes)]
        self.options = {
            "strides": np.broadcast_to(node.stride, axes).tolist(),
            "rhs_dilation": np.broadcast_to(node.dilation, axes).tolist(),
            "padding": node.padding.upper() if is_named else pairs,
            "feature_group_count": int(node.groups),
        }

    def update(self, x: Any) -> Any:
        lead = x.shape[: x.ndim - len(self.shape)]
        samples, value = x.reshape(-1, *self.shape), self.weight.value
        y = conv(samples, value["weight"], value["bias"], **self.options)
        return y.reshape(*lead, *y.shape[1:])


class _Neuron(brainstate.nn.Module):
    """LIF, CubaLIF, LI and IF."""

    def __init__(self, node: Any, dt: float, spk_fun: Spike) -> None:
        super().__init__()
        self.shape, self.spk_fun, self.r = _shape(node.input_type), spk_fun, node.r
        tau = getattr(node, "tau", getattr(node, "tau_mem", None))
        self.rate = dt if tau is None else dt / tau
        self.v_leak = getattr(node, "v_leak", None)
        self.threshold = getattr(node, "v_threshold", None)
        self.v_reset = getattr(node, "v_reset", None)
        self.has_synapse = hasattr(node, "tau_syn")
        if self.has_synapse:
            self.synapse_rate, self.w_in = dt / node.tau_syn, node.w_in

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        zeros = _zeros(self.shape, batch_size)
        V = zeros if self.v_leak is None else zeros + self.v_leak
        self.V = brainstate.HiddenState(self._after_reset(V))
        if self.has_synapse:
            self.I = brainstate.HiddenState(zeros)

    def _after_reset(self, potential: Any) -> Any:
        if self.threshold is None:
            return potential
        return jnp.where(potential > self.threshold, self.v_reset, potential)

    def output(self) -> Any:
        V = self.V.value
        return V if self.threshold is None else _spikes(V - self.threshold, self.spk_fun)

    def update(self, x: Any) -> Any:
        V = self._after_reset(self.V.value)
        if self.has_synapse:
            self.I.value += self.synapse_rate * (self.w_in * x - self.I.value)
            x = self.I.value
        leak = 0 if self.v_leak is None else self.v_leak - V
        self.V.value = V + self.rate * (leak + self.r * x)
        return self.output()


class _Delay(Delay):
    def __init__(self, node: Any, dt: float, *_: Any) -> None:
        steps = np.round(np.asarray(node.delay) / dt).astype(int)
        super().__init__(steps.shape, steps)
        self.is_early = bool((steps > 0).all())

    def output(self) -> Any:
        line, axis = self.line.value, -1 - self.steps.ndim
        index = np.broadcast_to(self.steps - 1, (*line.shape[:axis], 1, *self.steps.shape))
        return jnp.take_along_axis(line, index, axis).squeeze(axis)


class _Function(brainstate.nn.Module):
    """A node without parameters and states."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.update = function


def _linear(node: Any, *_: Any) -> Linear:
    bias = getattr(node, "bias", None)
    if node.weight.ndim != 2:
        raise OptionError(f"`weight` of a node has shape {node.weight.shape}; expected two axes.")
    outputs, inputs = node.weight.shape
    b_init = None if bias is None else jnp.asarray(bias)
    return Linear(inputs, outputs, w_init=jnp.asarray(node.weight.T), b_init=b_init)


def _flatten(node: Any, *_: Any) -> _Function:
    before, after = _shape(node.input_type), _shape(node.output_type)
    return _Function(lambda x: x.reshape(*x.shape[: x.ndim - len(before)], *after))


def _sum_pool(node: Any, *_: Any) -> _Function:
    kernel, strides, padding = (
        tuple(np.broadcast_to(value, 2).tolist())
        for value in (node.kernel_size, node.stride, node.padding)
    )

    def pool(x: Any) -> Any:
        ones = (1,) * (x.ndim - 2)
        pairs = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
        zero = np.zeros((), x.dtype)[()]
        return jax.lax.reduce_window(x, zero, jax.lax.add, ones + kernel, ones + strides, pairs)

    return _Function(pool)


def _threshold(node: Any, dt: float, spk_fun: Spike) -> _Function:
    return _Function(lambda x: _spikes(x - node.threshold, spk_fun))


def _spikes(above: Any, spk_fun: Spike) -> Any:
    # A state at the threshold is no spike in NIR.
    spikes = spk_fun(above)
    return spikes + jax.lax.stop_gradient((above > 0) - spikes)


def _shape(types: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in next(iter(types.values())))


def _zeros(shape: tuple[int, ...], batch_size: int | None) -> Any:
    return jnp.zeros(shape if batch_size is None else (batch_size, *shape))


LAYERS: dict[str, Any] = {
    "Input": None,
    "Output": None,
    "Linear": _linear,
    "Affine": _linear,
    "Conv1d": _Conv,
    "Conv2d": _Conv,
    "Flatten": _flatten,
    "SumPool2d": _sum_pool,
    "LIF": _Neuron,
    "CubaLIF": _Neuron,
    "LI": _Neuron,
    "IF": _Neuron,
    "Threshold": _threshold,
    "Delay": _Delay,
}
"""What makes the module of each kind of node; inputs and outputs have none."""
