"""Tasks by name; data are read when a task is asked for."""

import functools
import importlib

from .task import SPLITS as SPLITS
from .task import Batch as Batch
from .task import Split as Split
from .task import Task as Task

_CORE = {
    "digits by rows": "digits.by_rows",
    "copy with lag": "working_memory.copy_with_lag",
    "adding problem": "working_memory.adding_problem",
    "delayed XOR": "working_memory.delayed_xor",
    "JapaneseVowels": "recordings.japanese_vowels",
}
_WIDE = {
    "evidence accumulation": "working_memory.evidence_accumulation",
    "characters": "characters.next_characters",
    "Lorenz": "chaos.lorenz",
}
CORE, WIDE = tuple(_CORE), tuple(_WIDE)
ALL = CORE + WIDE
STORED = (
    *CORE,
    *("digits by pixels", "BasicMotions", "GunPoint", "evidence accumulation"),
    *("delayed match-to-sample", "real series", "characters", "Mackey-Glass", "Lorenz"),
    "memory chain",
)
"""Tasks of the stored rows, in the order of tables; some of them are no longer run."""


@functools.cache
def load(name: str) -> Task:
    module, function = (_CORE | _WIDE)[name].split(".")
    task: Task = getattr(importlib.import_module(f".{module}", __name__), function)()
    return task
