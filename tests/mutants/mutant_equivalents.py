"""Mutants that no test can notice, since nothing that is promised changes: why, by name."""

EQUIVALENT = {
    "_planning/plan.py:<module>:constant:1": "which shorter chunks a plan tries is not promised",
    "_planning/plan.py:<module>:constant:5": "how many more devices a plan tries is not promised",
    "_compiler/groups/diagonals.py:_pairs:constant:0": "a row without any pair is dropped",
    "_compiler/readouts/linear_readouts.py:_is_read_late:comparison:0": (
        "values that nobody reads are left out"
    ),
    "_compiler/flat_state/jacobian_sparsity.py:_of_first_sample:constant:0": (
        "all samples have one structure"
    ),
    "_etrace_op/checks/example.py:<module>:constant:0": "any number does that tells two sums apart",
    "_etrace_op/checks/example.py:_random:constant:3": "any random numbers do",
    "_etrace_op/sums.py:<module>:constant:0": "which of two forms adds up is not promised",
    "_etrace_op/input_derivative.py:derivative_by_unit_vectors:constant:0": (
        "nothing reads a second sample"
    ),
    "_etrace_op/sparse/matmul.py:_input_derivative:constant:2": (
        "nothing is added where nothing is left"
    ),
    "_etrace_op/sparse/product_forms.py:_pays:boolean:0": (
        "which of two forms adds up is not promised"
    ),
    "_etrace_op/sparse/pattern.py:SparsePattern.by_block:arithmetic:0": (
        "how many entries are sorted together is not promised"
    ),
    "_etrace_op/sparse/sddmm.py:_of_parts:constant:1": "sums do not depend on the size of pieces",
    "_etrace_op/sparse/sddmm.py:<module>:constant:2": (
        "which of two forms adds up is not promised"
    ),
    "_etrace_op/sparse/sddmm.py:<module>:arithmetic:4": "sums do not depend on the size of blocks",
    "_core/jacobian/jacobians.py:_factors:statement:0": "the same operands are computed once more",
    "_core/chunk/split.py:split_step:arithmetic:0": "the same values are computed once more",
    "_core/chunk/split.py:split_step:constant:2": "a byte more or less is kept for products",
    "_rules/full/rank_one.py:balance:constant:3": "what is divided by is not used for a zero norm",
    "_rules/full/neighbour_entries.py:<module>:constant:1": (
        "from how many numbers on a pattern is not exact is not promised"
    ),
    "_saving/checksums.py:<module>:constant:2": "sums do not depend on the size of blocks",
    "_saving/store.py:last:constant:0": "any number below zero says that there is none",
    "_sharding/parts.py:<module>:constant:0": "any number below zero is no axis",
    "_core/chunk/separate.py:_sum_of_dots:comparison:1": "either product of a sum may be the first",
    "_learner/state/optimizer.py:Noticed:constant:2": "any time long before the first check does",
    "_core/chunk/split.py:_loops:arithmetic:2": "what nothing needs is in no program",
    "_core/chunk/find_loops.py:_levels:constant:0": "a byte more or less is kept for products",
    "_core/chunk/find_loops.py:_levels:comparison:5": "a byte more or less is kept for products",
}
