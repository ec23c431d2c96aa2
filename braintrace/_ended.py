"""Names that have ended, and options of other packages, each with its replacement."""

_PAGE = "see docs/train_save_deploy.md"
_LATE = "`learner.live(...)`; see docs/notebooks/streams.ipynb"

REPLACEMENTS = {
    "BatchedLearner": f"`jax.vmap` over `learner.functional().step`; {_PAGE}",
    "Change": "`learner.report()`, before traces are allocated",
    "InputFilter": "`braintrace.Rule`, a rule of your own; see docs/one_formula.md",
    "Interrupted": "`KeyboardInterrupt`: the learner is in the state after a completed block",
    "Plan": "`learner.report()`, before traces are allocated",
    "ProgressiveValidation": _LATE,
    "RecompilationWarning": "`jax.config.update('jax_log_compiles', True)`",
    "plan": "`learner.report()`, before traces are allocated",
    "plot_traces": f"`imshow` of `learner.eligibility(path)`; {_PAGE}",
    "Learner.algorithm": "`learner` itself, such as `learner.rule`",
    "Learner.export_predict": f"`jax.export` of `learner.functional().predict`; {_PAGE}",
    "Learner.export_step": f"`jax.export` of `learner.functional().online`; {_PAGE}",
    "Learner.forecast": _LATE,
    "Learner.init_forecasts": _LATE,
    "Learner.learn": _LATE,
    "Learner.lower": f"`jax.jit(...).lower` of `learner.functional().grad`; {_PAGE}",
}

OPTIONS = {
    "fast_solve": "leave it out, traces of a chunk of steps are always computed together",
    "loss_output": "return the loss from `step_fn` of `etrace_grad` or `etrace_online`",
    "verbose": "leave it out, and `print(learner.report())`",
    "vjp_method": "write `window=k` for backpropagation through time within k steps",
}


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for a missing name of ``braintrace`` or of ``Learner``."""
    key = name if owner == "braintrace" else f"{owner}.{name}"
    if key in REPLACEMENTS:
        return AttributeError(f"`{key}` has ended: use {REPLACEMENTS[key]}.")
    return AttributeError(f"`{owner}` has no attribute {name!r}.")
