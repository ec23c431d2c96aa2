"""Layers with structured weights: sparse, all-to-all, one-to-one, low-rank, rows of a table."""

import math
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from brainstate.nn import init

from .._errors import OptionError
from .._etrace_op.einsum import embedding
from .._etrace_op.lora import lora_matmul
from .._etrace_op.sparse import sparse_matmul, sparse_pattern
from ._linear import affine, row, signed, signs_of


class SparseLinear(brainstate.nn.SparseLinear):
    """Layer with a sparse weight matrix whose entries learn online.

    Only existing connections have weights and traces. With signs, a weight is the magnitude of the
    entry times its sign.

    Parameters
    ----------
    spar_mat : sparse matrix ``(in, out)``
        CSR, CSC or COO of `saiunit.sparse`, or a format of ``brainevent`` (see `sparse_matmul`).
        Its data are the initial weights.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default None.
    in_size : int or tuple of int, optional
        Shape of one input.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.
    w_sign : array or None, optional
        1 or -1 for each input ``(in,)``, as in Dale's law, or for each entry ``(in, out)``. Updates
        never change these signs. Default None: weights of any sign.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import saiunit
    >>> import braintrace
    >>> matrix = saiunit.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> braintrace.nn.SparseLinear(matrix)(jnp.ones(2))
    Array([3., 2.], dtype=float32)
    >>> braintrace.nn.SparseLinear(matrix, w_sign=[1, -1])(jnp.ones(2))
    Array([-3.,  2.], dtype=float32)
    """

    def __init__(
        self,
        spar_mat: Any,
        b_init: Any = None,
        in_size: Any = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
        w_sign: Any = None,
    ) -> None:
        super().__init__(spar_mat, b_init, in_size, name, param_type)
        self.w_sign = None if w_sign is None else self._signs_of_entries(w_sign)

    def _signs_of_entries(self, w_sign: Any) -> np.ndarray:
        pattern = sparse_pattern(self.spar_mat)
        signs = signs_of(w_sign, pattern.shape)
        rows, columns = (
            np.minimum(places, size - 1)  # padding is outside
            for places, size in zip((pattern.rows, pattern.columns), pattern.shape, strict=True)
        )
        entries: np.ndarray = np.broadcast_to(signs, pattern.shape)[rows, columns]
        return entries.reshape(-1, *self.spar_mat.data.shape[1:])

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        bias = row(params.get("bias"), self.spar_mat.shape[-1])
        weight = signed(params["weight"], self.w_sign)
        return sparse_matmul(x, weight, sparse_mat=self.spar_mat, bias=bias)


class AllToAll(brainstate.nn.AllToAll):
    """Connections from every unit to every unit, optionally without self-connections.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    w_init : callable, array or float, optional
        Weight ``(in, out)``, or one number for all connections. Default ``KaimingNormal()``.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default None.
    include_self : bool, optional
        Whether unit i feeds unit i. Default True.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Notes
    -----
    With one number for all connections the output still has ``out`` entries;
    `brainstate.nn.AllToAll` returns a single entry to broadcast.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.AllToAll(3, 3, w_init=jnp.ones((3, 3)), include_self=False)
    >>> layer(jnp.array([1.0, 2.0, 4.0]))
    Array([6., 5., 3.], dtype=float32)
    """

    def update(self, pre_val: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        weight = saiunit.math.broadcast_to(params["weight"], (self.in_size[-1], self.out_size[-1]))
        if not self.include_self:
            weight = weight * jnp.asarray(1 - np.eye(*weight.shape), weight.dtype)
        return affine(pre_val, weight, params)


class LoRA(brainstate.nn.LoRA):
    """Low-rank adaptation: ``y = x @ lora_a @ lora_b``, plus a base module's output.

    The product [1]_ has no scale, neither a factor ``alpha`` nor a division by the rank. For a
    scale, use `lora_matmul`.

    Parameters
    ----------
    in_features, lora_rank, out_features : int
        Sizes of ``lora_a`` ``(in, rank)`` and ``lora_b`` ``(rank, out)``.
    base_module : callable, optional
        The module that is adapted. Its weights learn as the module defines.
    kernel_init : callable, optional
        Initial value of both factors. Default ``LecunNormal()``.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.
    in_size : int or tuple of int, optional
        Shape of one input, if it has more than one axis.
    lora_b_init : callable or array, optional
        Initial value of ``lora_b``. Default None: use ``kernel_init``. With ``ZeroInit()`` the
        layer initially equals its base module.

    References
    ----------
    .. [1] E. J. Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.LoRA(3, 1, 2)(jnp.ones((5, 3))).shape
    (5, 2)

    Freeze a trained layer (only a ``ParamState`` learns) and adapt it:

    >>> import brainstate
    >>> base = braintrace.nn.Linear(3, 2, w_init=jnp.ones((3, 2)))
    >>> base.weight = brainstate.LongTermState(base.weight.value)
    >>> zero = brainstate.nn.init.ZeroInit()
    >>> layer = braintrace.nn.LoRA(3, 1, 2, base_module=base, lora_b_init=zero)
    >>> layer(jnp.ones(3))
    Array([3., 3.], dtype=float32)
    >>> list(layer.states(brainstate.ParamState))
    [('weight',)]
    """

    def __init__(self, *args: Any, lora_b_init: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if lora_b_init is not None:
            factors = self.weight.value
            lora_b = init.param(lora_b_init, factors["lora_b"].shape, allow_none=False)
            self.weight.value = {**factors, "lora_b": lora_b}

    def __call__(self, x: Any) -> Any:
        return self.update(x)

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        y = lora_matmul(x, params["lora_a"], params["lora_b"])
        return y if self.base_module is None else y + self.base_module(x)


class Embedding(brainstate.nn.Embedding):
    """Table whose rows learn online: ``y = weight[indices]``.

    Parameters
    ----------
    num_embeddings : int
        Number of rows.
    embedding_size : int or tuple of int
        Shape of a row.
    embedding_init : callable or array, optional
        The table ``(num_embeddings, *embedding_size)``. Default ``LecunUniform()``. May carry a
        unit.
    padding_idx : int, optional
        A row that does not learn; it is initialised with zeros.
    max_norm : float, optional
        Largest norm of a looked-up row, in the unit of the table. Longer rows are scaled down by a
        factor that counts as a constant. The table itself does not change.
    norm_type : float, optional
        Order of this norm. Default 2.
    scale_grad_by_freq : bool, optional
        Not accepted: the frequency of an index in a batch is unknown to a single sample.
    freeze : bool, optional
        Whether to keep the whole table constant. Default False.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Notes
    -----
    An index out of range gives NaN; `brainstate.nn.Embedding` gives the nearest row. For the size
    of the traces of a table see `braintrace.embedding`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> table = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    >>> braintrace.nn.Embedding(3, 2, table)(jnp.array([2, 0]))
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: Any,
        embedding_init: Any = init.LecunUniform(),  # noqa: B008
        padding_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Zeros at `padding_idx` are set here: brainstate's have no unit.
        super().__init__(num_embeddings, embedding_size, embedding_init, None, *args, **kwargs)
        if self.scale_grad_by_freq:
            raise OptionError(
                "`scale_grad_by_freq` must be False: the frequency of an index in a batch is not a "
                "property of one sample."
            )
        if padding_idx is not None:
            weight, axes = self.weight.value, tuple(range(1, 1 + len(self.embedding_size)))
            is_padding = np.expand_dims(np.arange(num_embeddings) == padding_idx, axes)
            self.weight.value = saiunit.math.where(
                is_padding, saiunit.math.zeros_like(weight), weight
            )
        self.padding_idx = padding_idx

    def update(self, indices: Any) -> Any:
        """Return rows ``(..., *embedding_size)`` for integers of any shape."""
        weight = self.weight.value
        fixed = jax.lax.stop_gradient(weight) if self.freeze else weight
        rows = embedding(indices, fixed)
        result = rows if self.max_norm is None else self._shortened(rows)
        if self.padding_idx is None:
            return result
        is_padding = self._over_rows(jnp.asarray(indices) == self.padding_idx)
        return saiunit.math.where(is_padding, jax.lax.stop_gradient(rows), result)

    def _shortened(self, rows: Any) -> Any:
        """Scale rows down to a norm of at most ``max_norm``."""
        values = saiunit.get_mantissa(rows)
        lead = values.shape[: values.ndim - len(self.embedding_size)]
        flat = values.reshape(*lead, math.prod(self.embedding_size))
        norms = jnp.linalg.norm(flat, ord=self.norm_type, axis=-1)
        scale = jnp.minimum(1, self.max_norm / (norms + 1e-8))
        scale = self._over_rows(scale.astype(values.dtype))
        return rows + jax.lax.stop_gradient(rows * scale - rows)

    def _over_rows(self, values: Any) -> Any:
        """Return one number for each index, with the axes of a row."""
        return values.reshape(*values.shape, *(1,) * len(self.embedding_size))


class Projection(brainstate.nn.Module):
    r"""Projection of several populations to one synapse, which adds their inputs.

    .. math:: g \leftarrow f(g, \sum_p W_p(x_p))

    with a weight layer :math:`W_p` for each population and the step f of the synapse. Each weight
    has its own traces; the populations share the state of the synapse.

    Parameters
    ----------
    weights : dict of str to module
        The weight layer of each population by its name: `Linear`, `SparseLinear`, `SignedWLinear`,
        … Their outputs must have one shape.
    synapse : module
        The synapse that receives the sum: `Expon`, `Alpha`, `DualExpon`, …
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> from braintrace import nn
    >>> weights = {
    ...     "input": nn.Linear(3, 2, w_init=jnp.ones((3, 2)), b_init=None),
    ...     "recurrent": nn.Linear(2, 2, w_init=jnp.ones((2, 2)), b_init=None, w_sign=[1, -1]),
    ... }
    >>> projection = nn.Projection(weights, nn.Expon(2, g_initializer=0.0))
    >>> _ = brainstate.nn.init_all_states(projection)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     projection({"input": jnp.ones(3), "recurrent": jnp.ones(2)})
    Array([3., 3.], dtype=float32)
    """

    def __init__(self, weights: Any, synapse: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.weights = dict(weights)
        self.synapse = synapse

    def update(self, inputs: Any) -> Any:
        """Advance the synapse by one step and return its output.

        Parameters
        ----------
        inputs
            A dict with the input from each population, ``(..., its size)``.
        """
        names = {**self.weights, **inputs}  # none is missing, and none unknown
        total, *rest = (self.weights[name](inputs[name]) for name in names)
        for y in rest:
            total = total + y
        return self.synapse(total)
