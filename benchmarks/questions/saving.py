"""Save and restore.

An LSTM with its traces and the moments of Adam is saved and restored, and compared with orbax alone
on the same arrays, without checks. A save replaces the previous one. Times are per megabyte.
"""

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace._optional import optional_import

from ..case import Case, Subject, Target
from ..networks import NETWORKS
from ..subjects import Task, learner_of

SAVE, RESTORE = "save", "restore"
PLAIN_SAVE, PLAIN_RESTORE = "orbax alone, save", "orbax alone, restore"
TARGETS = (
    Target(SAVE, PLAIN_SAVE, 2.0),
    Target(RESTORE, PLAIN_RESTORE, 2.5),  # it reads first what there is, to refuse what differs
)


class Saved:
    """A learner in two folders: in one by the library, in the other by orbax alone."""

    def __init__(self, task: Task) -> None:
        self.orbax: Any = optional_import("orbax.checkpoint", "checkpoint")
        self.learner = learner_of(task, "d_rtrl")
        self.learner.init_optimizer(optax.adam(1e-3))
        self.pure = self.learner.functional()
        self.folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.tree = arrays_of(self.pure.state())
        self.megabytes = max(1, round(sum(leaf.nbytes for leaf in self.tree.values()) / 1e6))

    def save(self) -> None:
        braintrace.save(self.folder / "own", self.learner)

    def restore(self) -> dict[str, Any]:
        braintrace.restore(self.folder / "own", self.learner)
        return arrays_of(self.pure.state())

    def save_plain(self) -> None:
        with self.orbax.Checkpointer(self.orbax.PyTreeCheckpointHandler()) as checkpointer:
            arguments = self.orbax.args.PyTreeSave(self.tree)
            checkpointer.save(self.folder / "plain", args=arguments, force=True)

    def restore_plain(self) -> dict[str, Any]:
        of_numpy = {name: self.orbax.RestoreArgs(restore_type=np.ndarray) for name in self.tree}
        with self.orbax.Checkpointer(self.orbax.PyTreeCheckpointHandler()) as checkpointer:
            arguments = self.orbax.args.PyTreeRestore(restore_args=of_numpy)
            found = checkpointer.restore(self.folder / "plain", args=arguments)
        return {name: jnp.asarray(leaf) for name, leaf in found.items()}

    def subject(self, run: Callable[[], Any], before: Callable[[], Any]) -> Subject:
        """Time a function after one call of another; the tests compare the restored arrays."""
        before()

        def found(result: dict[str, Any] | None) -> dict[str, Any]:
            return self.restore() if result is None else result

        return Subject(run, work=self.megabytes, rule="saved", found=found)


def arrays_of(state: Any) -> dict[str, Any]:
    """Return the arrays of a learner's state by name, random keys as numbers."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        if array.size:
            found[jax.tree_util.keystr(path)] = array
    return found


def case(hidden: int, batch: int, quick: bool = False) -> Case:
    """Return the case of one size: both ways to save, and to restore."""
    task = Task(NETWORKS["lstm"](hidden=hidden), 2, batch)
    saved = functools.cache(lambda: Saved(task))
    return Case(
        f"saving/lstm,H={hidden},B={batch}",
        {
            SAVE: lambda: saved().subject(saved().save, lambda: None),
            PLAIN_SAVE: lambda: saved().subject(saved().save_plain, lambda: None),
            RESTORE: lambda: saved().subject(saved().restore, saved().save),
            PLAIN_RESTORE: lambda: saved().subject(saved().restore_plain, saved().save_plain),
        },
        TARGETS,
        {"megabytes": lambda: float(saved().megabytes)},
        quick=quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return a network of a few megabytes, and one of more than a hundred."""
    return [case(64, 16, quick=True), case(512, 32)]
