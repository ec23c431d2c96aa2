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
    algorithm: Any, batch_size: int | None = None, *, where: Any = None, **kwargs: Any
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
        algorithm.traces.carried.finish()
    if where is not None or is_watched():  # traces of other keys cannot be made inside
        up_to_date(algorithm)
    if where is not None:
        _reset_samples(algorithm, batch_size, where, kwargs)
        return
    if algorithm.samples_of_model is not None and batch_size is not None:
        algorithm.samples_of_model = batch_size
    with in_words(lambda: f"`reset_state` runs `init_state` of `{type(algorithm.model).__name__}`"):
        states, compiled = algorithm.found_states(algorithm.model), algorithm.compiled_model
        size = algorithm.samples_of_model
        values = compiled.initial_values(algorithm.model, states, batch_size, kwargs, size)
    algorithm._compiled = compiled.moved_to(
        algorithm.model, algorithm.analysed, states, values, batch_size
    )
    if _has_like_traces(algorithm, compiled.step):
        _reset_traces(algorithm)
    else:
        algorithm.begin_traces()
    algorithm.place_states()


def _reset_samples(
    algorithm: Any, batch_size: int | None, where: Any, options: dict[str, Any]
) -> None:
    states = algorithm.states_of_model
    flags = check_where(where, algorithm.graph, values_by_path(short_term(states)), batch_size)
    fresh = algorithm.initial_values(states, **options)
    reset_samples(algorithm.compiled, states, algorithm.store(states), fresh, flags)
    algorithm.place_states()


def _has_like_traces(algorithm: Any, before: CompiledStep) -> bool:
    """Test whether traces, their packed form and filters have the same names as before."""
    now = algorithm.compiled
    filters = {leaf.name for leaf in now.graph.traced.filters}
    return bool(
        jax.tree.structure(now.trace_specs) == jax.tree.structure(before.trace_specs)
        and pairs_of(now.trace_specs) == pairs_of(before.trace_specs)
        and filters == algorithm.filters.keys()
    )


def _reset_traces(algorithm: Any) -> None:
    for leaf in algorithm.compiled.graph.traced.filters:
        algorithm.filters[leaf.name].value = start_of_filter(leaf)
    if outliving(algorithm.compiled.trace_specs):
        with contextlib.suppress(LostTracesError):  # a lost random stream is reset
            fresh = pack(
                algorithm.traces_after_reset(algorithm.traces.value), algorithm.traces.pairs
            )
            algorithm.traces.carried.store(fresh)
            return
    algorithm.leave_starting_traces()
