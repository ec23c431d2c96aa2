"""Mutants that no test can notice, since nothing that is promised changes: why, by name."""

EQUIVALENT = {
    "_planning/plan.py:<module>:constant:1": "which shorter chunks a plan tries is not promised",
    "_learner/split.py:split_step:arithmetic:2": "what nothing needs is in no program",
    "_learner/stages.py:_levels:constant:0": "a byte more or less is kept for products",
    "_learner/stages.py:_levels:comparison:5": "a byte more or less is kept for products",
    "_learner/function_key.py:<module>:constant:0": "how much a cache keeps is not promised",
}
