"""Comparison of learning rules with backpropagation through time, on a model and its data."""

from .check import GradientCheck as GradientCheck
from .check import gradient_check as gradient_check
from .compare import compare_rules as compare_rules
from .table import ComparedRule as ComparedRule
from .table import RuleComparison as RuleComparison
