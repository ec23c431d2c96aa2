"""The names by which algorithms are asked for: each class announces its own."""

import inspect
from collections.abc import Iterator

from .._arguments import shown
from .._errors import OptionError
from .algorithm import ETraceAlgorithm


def algorithms_by_name() -> dict[str, type[ETraceAlgorithm]]:
    """Return every algorithm that has been defined, in this package or elsewhere, by its names.

    Of a class that has been defined anew, as in a notebook, the last one counts.

    Raises
    ------
    OptionError
        If two different classes announce the same name, or ``names`` are no tuple of them.
    """
    found: dict[str, type[ETraceAlgorithm]] = {}
    for algorithm in _subclasses(ETraceAlgorithm):  # type: ignore[type-abstract]
        for name in _names(algorithm):
            other = found.setdefault(name, algorithm)
            if _full_name(other) != _full_name(algorithm):
                raise OptionError(
                    f"`{_full_name(other)}` and `{_full_name(algorithm)}` both announce the name "
                    f"'{name}'. Change `names` of one of them, or give `compile` the class."
                )
            found[name] = algorithm
    return found


def _names(algorithm: type[ETraceAlgorithm]) -> list[str]:
    names = vars(algorithm).get("names", ())
    if isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names):
        return [name.lower() for name in names]
    raise OptionError(
        f"`names` of `{_full_name(algorithm)}` is {shown(names)}; expected a tuple of strings."
    )


def _subclasses(of: type[ETraceAlgorithm]) -> Iterator[type[ETraceAlgorithm]]:
    for algorithm in of.__subclasses__():
        if not inspect.isabstract(algorithm):
            yield algorithm
        yield from _subclasses(algorithm)


def _full_name(algorithm: type) -> str:
    return f"{algorithm.__module__}.{algorithm.__qualname__}"
