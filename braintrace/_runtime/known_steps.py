"""Compiled steps of a model, by the shapes of its States and its attributes."""

from typing import TypeAlias

from .compiled_step import CompiledStep
from .environment.attributes import Attributes
from .states.initial_values import Shapes
from .states.lru_cache import LRUCache

MOST_STEPS = 32
"""Maximum number of compiled steps that are kept: batches have a few sizes."""

_Key: TypeAlias = tuple[Shapes, Attributes]


class KnownSteps:
    """The most recently used compiled steps; copies of a model share this object.

    Attributes
    ----------
    found_alike
        How often a changed model was analysed, and its step was a known one.
    """

    def __init__(self) -> None:
        self.found_alike = 0
        self._steps: LRUCache[_Key, CompiledStep] = LRUCache(MOST_STEPS)

    def find(self, shapes: Shapes, now: Attributes) -> CompiledStep | None:
        """Return the step for shapes and attributes; ``None`` if there is none."""
        for key in list(self._steps):
            if key[0] == shapes and not key[1].changed(now):
                return self._steps[key]
        return None

    def of(self, shapes: Shapes) -> list[CompiledStep]:
        """Return the steps for shapes, each once."""
        steps = [step for known, step in self._steps.items() if known[0] == shapes]
        return list({id(step.graph): step for step in steps}.values())

    def that_does(self, shapes: Shapes, step: CompiledStep) -> CompiledStep | None:
        """Return a known step that does the same as a new one, in the environment of that one."""
        for known in self.of(shapes):
            if known.fingerprint.value == step.fingerprint.value:
                self.found_alike += 1
                return known.read_in(step.environment)
        return None

    def add(
        self, shapes: Shapes, before: Attributes, after: Attributes, step: CompiledStep
    ) -> None:
        """Add a step for the attributes before and after the model was traced.

        The model itself wrote what differs between them (a counter, a memo): each step that was
        right before is so after.
        """
        self._steps[shapes, before] = step
        if before.changed(after):
            for (own, attributes), known in list(self._steps.items()):
                if not attributes.changed(before):
                    self._steps[own, after] = known
