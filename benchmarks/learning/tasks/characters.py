"""The sources of Python's standard library, character by character: which one comes next?"""

import sysconfig
from pathlib import Path

import jax
import numpy as np

from .draws import of_windows, windows_in_time
from .task import Task

SYMBOLS = "abcdefghijklmnopqrstuvwxyz \n_.,()=:'\"#0"
"""The symbols: letters without case, 0 for any digit; all others share one more symbol."""

TOTAL, LENGTH, WASHOUT, HELD_OUT = 400_000, 64, 8, 128


def next_characters() -> Task:
    """Say the next character; the text differs a little from one version of Python to another."""
    text = load_text(TOTAL)
    starts = windows_in_time(len(text), LENGTH, WASHOUT, 1)
    for split in ("validation", "test"):
        chosen = np.linspace(0, len(starts[split]) - 1, HELD_OUT).astype(int)
        starts[split] = starts[split][chosen]
    count = len(SYMBOLS) + 1
    targets = np.roll(text, -1)
    draws = of_windows(
        text,
        targets,
        starts,
        LENGTH,
        WASHOUT,
        encode=lambda symbols: jax.nn.one_hot(symbols, count),
    )
    batch = draws[1]("test")
    usual = np.bincount(text[: starts["train"][-1]]).argmax()
    weights = np.asarray(batch.weights)
    return Task(
        *draws,
        outputs=count,
        counted=float(LENGTH - WASHOUT),
        chance=round(float(np.average(np.asarray(batch.targets) == usual, weights=weights)), 3),
        threshold=0.4,
        truncations=(8, 32),
        batch=16,
        updates=500,
    )


def load_text(total: int) -> np.ndarray:
    """Return symbols ``(total,)``, file after file in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if "-packages" not in str(p))
    np.random.default_rng(0).shuffle(paths)
    parts, found = [], 0
    for path in paths:
        parts.append(encoded(path.read_bytes()))
        found += len(parts[-1])
        if found >= total:
            return np.concatenate(parts)[:total]
    raise FileNotFoundError(f"{root} has {found:,} characters of sources, expected {total:,}.")


def encoded(text: bytes) -> np.ndarray:
    table = np.full(256, len(SYMBOLS), np.int32)
    for place, symbol in enumerate(SYMBOLS):
        table[[ord(symbol), ord(symbol.upper())]] = place
    table[ord("0") : ord("9") + 1] = SYMBOLS.index("0")
    return table[np.frombuffer(text, np.uint8)]
