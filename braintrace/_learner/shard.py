"""Sharding of a learner over a mesh of devices."""

from __future__ import annotations

from jax.sharding import AxisType, Mesh

from .._brainstate import is_watched
from .._errors import NotCompiledError, OptionError
from .._sharding import Division
from .._sharding.division import check_axes
from .learner import Learner


def shard(
    learner: Learner, mesh: Mesh, data: str | None = "data", model: str | None = None
) -> None:
    """Shard a learner's arrays over the devices of a mesh.

    Samples are sharded over one axis of the mesh, outputs of ETP operations over another: hidden
    states by their units, parameters by their outputs, traces by both. Arrays without these axes
    are replicated. All calls work as before with the same results, and states and traces keep their
    placement, also after `reset_state` and `restore`. Arguments may be on any devices.

    Parameters
    ----------
    learner
        The learner, possibly in the middle of a sequence.
    mesh
        The devices, along axes of any kind (``Auto`` or ``Explicit``). They may belong to several
        processes; all of these must then call the same methods.
    data
        Axis of the mesh over which samples are sharded; ``None``: samples are replicated.
    model
        Axis of the mesh over which outputs are sharded; ``None``: outputs are replicated. Some
        arrays remain replicated, and ``learner.report()`` names them: units whose number is not a
        multiple of the number of parts, and sparse matrices whose entries are not in the order of
        their outputs, with an equal number for each part. Concatenated gates are sharded by unit:
        their states and traces, not the weight.

    Raises
    ------
    OptionError
        If the mesh has no such axis, if there is no batch, or if a map around the learner already
        shards its arrays.
    ShapeError
        If the batch size is not a multiple of the number of parts.
    NotCompiledError
        If the learner has not been compiled.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 4)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((8, 2)), batch_size=8)
    >>> mesh = jax.make_mesh((jax.device_count(), 1), ("data", "model"))
    >>> braintrace.shard(learner, mesh, data="data", model="model")
    >>> gradients = learner.etrace_grad(
    ...     jnp.ones((5, 8, 2)), step_fn=lambda x: (learner(x) ** 2).mean()
    ... )
    """
    check_axes(mesh.axis_names, data, model)
    if AxisType.Explicit in (mesh.axis_types or ()):
        raise OptionError(
            "`mesh` has `Explicit` axes; expected `Auto` ones: "
            "`jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
        )
    if not learner.is_compiled:
        raise NotCompiledError(
            f"`learner` has not been compiled: call `compile_graph` of its "
            f"{type(learner.algorithm).__name__} first."
        )
    if learner.algorithm.traces.is_made_inside or is_watched():
        raise OptionError(
            "`shard` is called inside a transformation, or `learner` was compiled inside one, "
            "where a map adds axes to arrays. Compile the learner outside; shard a stack of "
            "learners through `learner.functional()`, as arrays of JAX."
        )
    learner.divide(Division(mesh, data, model))
