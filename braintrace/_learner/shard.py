"""Sharding of a learner over a mesh of devices."""

from jax.sharding import AxisType, Mesh

from .._errors import OptionError
from ..sharding import DataAxis
from .learner import Learner


def shard(learner: Learner, mesh: Mesh, data: str = "data") -> None:
    """Shard a learner's arrays over the devices of a mesh.

    Samples are sharded over one axis of the mesh: states, traces and arguments along their batch
    axis. Parameters that you have placed on the mesh keep their sharding; all other arrays are
    replicated. All calls work as before with the same results, and arrays keep their placement,
    also after `reset_state` and `restore`. Arguments may be on any devices.

    Parameters
    ----------
    learner
        The learner, possibly in the middle of a sequence.
    mesh
        The devices, along ``Auto`` axes. They may belong to several processes; all of these must
        then call the same methods.
    data
        Axis of the mesh over which samples are sharded.

    Raises
    ------
    OptionError
        If the mesh has no such axis, or an ``Explicit`` one, or if there is no batch.
    ShapeError
        If the batch size is not a multiple of the number of parts.
    NotCompiledError
        If the learner has not been compiled.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 4)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((8, 2)), batch_size=8)
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    >>> braintrace.shard(learner, mesh)
    >>> gradients = learner.etrace_grad(
    ...     jnp.ones((5, 8, 2)), step_fn=lambda x: (learner(x) ** 2).mean()
    ... )
    """
    if AxisType.Explicit in (mesh.axis_types or ()):
        raise OptionError(
            "`mesh` has `Explicit` axes; expected `Auto` ones: "
            "`jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
        )
    if data not in mesh.axis_names:
        raise OptionError(
            f"`data` is {data!r}, and the mesh has the axes {mesh.axis_names}: expected one of "
            "these."
        )
    learner.divide(DataAxis(mesh, data))
    learner.place()
