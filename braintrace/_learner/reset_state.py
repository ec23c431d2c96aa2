"""Start of a new sequence: the method ``reset_state`` of the algorithms."""

import contextlib
from typing import Any

import jax

from .._brainstate import is_watched
from .._core.traces import outliving, pack, pairs_of
from .._errors import LostTracesError, in_words
from .._runtime.compiled_model import up_to_date
from .._runtime.compiled_step import CompiledStep
from .._runtime.model_states import short_term, values_by_path
from .._runtime.resets import check_where, reset_samples
from .._runtime.traces import start_of_filter


def reset_state(
    learner: Any, batch_size: int | None = None, *, where: Any = None, **kwargs: Any
) -> None:
    """Start a new sequence: reset states to their initial values, and traces to zero.

    You can call it in your own loop (also inside ``brainstate.transform.jit``, ``for_loop`` and
    ``cond``), and between calls of a learner.

    Parameters
    ----------
    batch_size
        Argument of the model's ``init_state``; ``None``: the current size of the states. A new
        size compiles the model again.
    where
        Booleans ``(batch,)``: the samples that are reset. Other samples continue. States
        without a batch axis continue unless all flags are set. ``None``: all samples.
    **kwargs
        Other arguments of ``init_state``, which brainstate passes to every module.

    Raises
    ------
    ShapeError
        If ``batch_size`` is ``None`` and ``init_state`` returns other shapes than the states
        have, or if the shape of ``where`` does not fit them.
    OptionError
        For ``where`` together with ``batch_size``; if samples that share an input are reset
        separately (`ES_D_RTRL`).
    """
    if not is_watched():
        learner.traces.carried.finish()
    if where is not None or is_watched():  # traces of other keys cannot be made inside
        up_to_date(learner)
    if where is not None:
        _reset_samples(learner, batch_size, where, kwargs)
        return
    if learner.samples_of_model is not None and batch_size is not None:
        learner.samples_of_model = batch_size
    with in_words(lambda: f"`reset_state` runs `init_state` of `{type(learner.module).__name__}`"):
        states, compiled = learner.found_states(learner.module), learner.compiled_model
        size = learner.samples_of_model
        values = compiled.initial_values(learner.module, states, batch_size, kwargs, size)
    learner._compiled = compiled.moved_to(
        learner.module, learner.analysed, states, values, batch_size
    )
    if _has_like_traces(learner, compiled.step):
        _reset_traces(learner)
    else:
        learner.begin_traces()
    learner.place_states()


def _reset_samples(
    learner: Any, batch_size: int | None, where: Any, options: dict[str, Any]
) -> None:
    states = learner.states_of_model
    flags = check_where(where, learner.graph, values_by_path(short_term(states)), batch_size)
    fresh = learner.initial_values(states, **options)
    reset_samples(learner.compiled, states, learner.store(states), fresh, flags)
    learner.place_states()


def _has_like_traces(learner: Any, before: CompiledStep) -> bool:
    """Test whether traces, their packed form and filters have the same names as before."""
    now = learner.compiled
    filters = {leaf.name for leaf in now.graph.traced.filters}
    return bool(
        jax.tree.structure(now.trace_specs) == jax.tree.structure(before.trace_specs)
        and pairs_of(now.trace_specs) == pairs_of(before.trace_specs)
        and filters == learner.filters.keys()
    )


def _reset_traces(learner: Any) -> None:
    for leaf in learner.compiled.graph.traced.filters:
        learner.filters[leaf.name].value = start_of_filter(leaf)
    if outliving(learner.compiled.trace_specs):
        with contextlib.suppress(LostTracesError):  # a lost random stream is reset
            fresh = pack(learner.traces_after_reset(learner.traces.value), learner.traces.pairs)
            learner.traces.carried.store(fresh)
            return
    learner.leave_starting_traces()
