"""What a run has found: one JSON file."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

FOLDER = Path(__file__).parent.parent / "results" / "learning"
DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides what a run finds; runs with the same settings find the same.

    Attributes
    ----------
    table
        ``"core"`` or ``"wide"``.
    task, cell, way
        Names.
    units, batch, updates
        Hidden units, samples of an update, and updates.
    length, features, outputs
        Of the task: time steps of a sample, and sizes of one step.
    optimizer
        ``"adam"`` or ``"rmsprop"``.
    window
        Steps that truncated backpropagation goes back; ``None`` for all other ways.
    rates
        The learning rates.
    seeds
        Of initial parameters and samples.
    chance, threshold
        Of the task: the score of who does not look at the inputs, and the score that
        `Record.updates_to_threshold` is about.
    source
        Of the task: the paper or the data that it comes from.
    """

    table: str
    task: str
    cell: str
    way: str
    units: int
    batch: int
    updates: int
    length: int
    features: int
    outputs: int
    optimizer: str
    window: int | None
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    chance: float
    threshold: float
    source: str

    @property
    def name(self) -> str:
        """The name of the run, and of its file."""
        return f"{self.task}--{self.cell}--{self.way}".replace(" ", "-")


@dataclasses.dataclass(frozen=True)
class Curves:
    """Scores on the validation set while learning.

    Attributes
    ----------
    updates
        After how many updates.
    scores
        By rate, seed and point; ``None`` where parameters or score are not finite.
    """

    updates: tuple[int, ...]
    scores: tuple[tuple[tuple[float | None, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Cosine of the angle between a way's gradient and that of backpropagation through time.

    On one fixed batch, at the parameters that the best rate's first seed has after so many updates;
    ``None`` where one of them is not finite, or zero. ``recurrent`` is of the cell's parameters
    alone: every way has the exact gradient of the readout.
    """

    updates: tuple[int, ...]
    values: tuple[float | None, ...]
    recurrent: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Price:
    """What one gradient of one lane takes, compiled alone.

    Attributes
    ----------
    seconds_per_step
        Of the gradient of a batch of whole samples, over their steps: the shortest of some calls.
    trace_bytes
        What is kept between steps besides parameters and hidden states; zero for backpropagation,
        which keeps the past instead.
    peak_bytes
        Working memory of the compiled gradient.
    seconds_per_lone_step
        Of the same, one step after the other: each goes on from the traces of the last, as where
        there is an update at every step. ``None`` for backpropagation, outside of the core table,
        and until somebody asks for prices.
    lone_peak_bytes
        Working memory of that.
    """

    seconds_per_step: float
    trace_bytes: int
    peak_bytes: int | None
    seconds_per_lone_step: float | None = None
    lone_peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run has found.

    Attributes
    ----------
    settings, machine
        What was asked for, and what it ran on (with the versions).
    refused
        Why the library refuses the rule on this network (the first line of its error); all that
        follows is then ``None`` or empty.
    curves
        Of all rates and seeds.
    best_rate
        The rate with the best mean score over all seeds at the last point of validation.
    test
        Score on the test set by seed, at the best rate, at the end of learning.
    updates_to_threshold
        By seed, at the best rate: the first point whose score reaches the threshold, or ``None``.
    cosine, price
        See there.
    failed
        ``[rate, seed]`` of the lanes that ended in a number that is not finite.
    seconds
        What the run took: ``compile``, ``train``, and ``all``.
    """

    settings: Settings
    machine: dict[str, Any]
    refused: str | None = None
    curves: Curves | None = None
    best_rate: float | None = None
    test: tuple[float | None, ...] = ()
    updates_to_threshold: tuple[int | None, ...] = ()
    cosine: Cosine | None = None
    price: Price | None = None
    failed: tuple[tuple[float, int], ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


class Asked(Protocol):
    """What was asked for, in a frozen dataclass of plain values."""

    @property
    def name(self) -> str:
        """The name of the run, and of its file."""

    @property
    def task(self) -> str:
        """What is learned."""

    @property
    def cell(self) -> str:
        """What learns."""


class Found(Protocol):
    """What was found, in a dataclass of plain values."""

    @property
    def settings(self) -> Asked:
        """What was asked for."""

    @property
    def seconds(self) -> dict[str, float]:
        """What the run took."""


def path_of(folder: Path, settings: Asked) -> Path:
    """Return where the record of a run is kept."""
    return folder / f"{settings.name}.json"


def write(folder: Path, record: Found) -> Path:
    """Write a record: all of it, or nothing."""
    path = path_of(folder, record.settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(_kept(record), allow_nan=False) + "\n")
    draft.replace(path)
    return path


def _kept(found: Any) -> Any:
    """Return a dataclass as its file has it."""
    return plain(dataclasses.asdict(found))


def plain(value: Any) -> Any:
    """Return a value with numbers of few digits, and ``None`` for those that are not finite."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def read(path: Path) -> Record:
    """Return the record of a file."""
    found = json.loads(path.read_text())
    parts = {"settings": Settings, "curves": Curves, "cosine": Cosine, "price": Price}
    for key, part in parts.items():
        if found[key] is not None:
            found[key] = part(**{name: tuples(entry) for name, entry in found[key].items()})
    for key in ("test", "updates_to_threshold", "failed"):
        found[key] = tuples(found[key])
    return Record(**found)


def tuples(value: Any) -> Any:
    """Return lists within lists as tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def read_all(folder: Path = FOLDER) -> Iterator[Record]:
    """Yield the records of a folder by name; the files of other questions are left out."""
    for path in sorted(folder.glob("*--*--*.json")):
        yield read(path)


def of(folder: Path, settings: Settings) -> Record:
    """Return the record of a run that is done."""
    return read(path_of(folder, settings))


def is_done(folder: Path, settings: Asked) -> bool:
    """Whether there is a record of a run with just these settings."""
    path = path_of(folder, settings)
    return path.exists() and json.loads(path.read_text())["settings"] == _kept(settings)
