"""Model catalogue: networks as users write them.

Each entry makes a brainstate module or a plain function. What the compiler says of it is stored in
``tests/verdicts``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

BATCH, STEPS, INPUTS, H, OUTPUTS = 2, 6, 3, 4, 2


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    make: a brainstate module, or a function of `braintrace.from_function`.
    shape: of an input of one sample.
    is_exact: whether `D_RTRL` equals BPTT.
    options: of `braintrace.compile`.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...] = (INPUTS,)
    is_exact: bool = False
    options: tuple[tuple[str, Any], ...] = (("batch_size", BATCH),)

    def build(self) -> Any:
        brainstate.random.seed(7)
        with brainstate.environ.context(precision=64):
            return self.make()

    def inputs(self) -> np.ndarray:
        draws = np.random.default_rng(1).standard_normal((STEPS, BATCH, *self.shape))
        return draws.astype(np.float32).astype(float)


ENTRIES: list[Entry] = []


def add(name: str, make: Callable[[], Any], **options: Any) -> None:
    ENTRIES.append(Entry(name, make, **options))


def model(**options: Any) -> Callable[[type], type]:
    """Add the decorated module under its name."""

    def decorate(module: type) -> type:
        add(module.__name__, module, **options)
        return module

    return decorate


class Cell(brainstate.nn.Module):
    """A module whose parameters and hidden states are declared by name and shape.

    weights: shapes by name, or pytrees of shapes.
    states_of: shapes of one sample by name.
    gain: scale of matrices.
    """

    weights: dict[str, Any] = {}
    states_of: dict[str, tuple[int, ...]] = {"h": (H,)}
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)

        def draw(shape: tuple[int, ...]) -> jax.Array:
            scale = self.gain / np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 0.5
            return jnp.asarray(scale * random.standard_normal(shape), float)

        for name, shapes in self.weights.items():
            is_shape = lambda value: isinstance(value, tuple)  # noqa: E731
            value = jax.tree.map(draw, shapes, is_leaf=is_shape)
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        lead = () if batch_size is None else (batch_size,)
        for name, shape in self.states_of.items():
            setattr(self, name, brainstate.HiddenState(start((*lead, *shape))))


def start(shape: tuple[int, ...]) -> jax.Array:
    """Return an initial state that is not zero, so that the first step counts."""
    return jnp.linspace(-0.3, 0.5, int(np.prod(shape))).reshape(shape)


@jax.custom_jvp
def spike(v: Any) -> Any:
    """Heaviside step with a smooth surrogate derivative."""
    return (v >= 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + 2 * jnp.abs(v)) ** 2
