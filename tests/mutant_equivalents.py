"""Mutants that no test can notice, since nothing that is promised changes: why, by name."""

EQUIVALENT = {
    "_planning/plan.py:<module>:constant:1": "which shorter chunks a plan tries is not promised",
}
