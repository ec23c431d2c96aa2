"""Faults that are made from the syntax of the library: one small change to one place each.

A mutant is named ``file:function:kind:number``, the number counting the places of its kind in the
function, so that changes elsewhere leave its name as it is.
"""

import ast
import collections
import dataclasses
import difflib
import hashlib
import pathlib

PACKAGES = (
    *("_compiler", "_core", "_rules", "_etrace_op", "_learner", "_sharding", "_saving"),
    *("_planning", "nn"),
)
MINIMUM = 20

COMPARISONS = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
CHECKS = ("strict", "stacklevel")
"""Options that notice faults of this library, or only change where a warning points."""

FOR_PEOPLE = ("__repr__", "__str__", "_repr_html_", "_repr_pretty_")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file.

    name: see above.
    file: in `braintrace/`.
    start, end: which part of the file's text is replaced.
    new: by what.
    """

    name: str
    file: str
    start: int
    end: int
    new: str

    @property
    def package(self):
        return self.file.split("/")[0]

    @property
    def function(self):
        """File and function, as the map of tests names them."""
        return ":".join(self.name.split(":")[:2])

    def changed(self, text):
        return text[: self.start] + self.new + text[self.end :]

    def diff(self, text):
        """The lines that differ."""
        lines = difflib.unified_diff(text.split("\n"), self.changed(text).split("\n"), n=0)
        return "\n".join(line for line in [*lines][2:])


def mutants_of(file, text):
    """All mutants of one file, in the order of its text."""
    return _Places(file, text).found


class _Places(ast.NodeVisitor):
    """Walks over what runs: no docstrings, annotations, decorators, or words for people."""

    def __init__(self, file, text):
        self.file, self.text, self.found = file, text, []
        self._functions, self._counts = [], collections.Counter()
        starts, total = [], 0
        for line in text.split("\n"):
            starts.append(total)
            total += len(line) + 1
        self._starts, self._lines = starts, text.split("\n")
        self.visit(ast.parse(text))

    # where

    def _at(self, line, column):
        """The index in the text; columns of nodes count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _start(self, node):
        return self._at(node.lineno, node.col_offset)

    def _end(self, node):
        return self._at(node.end_lineno, node.end_col_offset)

    def _source(self, node):
        return self.text[self._start(node) : self._end(node)]

    def _add(self, kind, start, end, new):
        function = ".".join(self._functions) or "<module>"
        number = self._counts[function, kind]
        self._counts[function, kind] += 1
        name = f"{self.file}:{function}:{kind}:{number}"
        self.found.append(Mutant(name, self.file, start, end, new))

    def _replace(self, kind, node, new):
        self._add(kind, self._start(node), self._end(node), new)

    def _swap(self, kind, left, right, operators):
        """Exchange the operator between two nodes."""
        old, new = operators
        start, end = self._end(left), self._start(right)
        between = self.text[start:end]
        if between.count(old) == 1 and "#" not in between:
            at = start + between.index(old)
            self._add(kind, at, at + len(old), new)

    # what is left out

    def visit_FunctionDef(self, node):
        if node.name in FOR_PEOPLE or any(
            "overload" in ast.unparse(d) for d in node.decorator_list
        ):
            return
        self._functions.append(node.name)
        for value in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(value)
        self._body(node.body)
        self._functions.pop()

    def visit_ClassDef(self, node):
        self._functions.append(node.name)
        self._body(node.body)
        self._functions.pop()

    def visit_Module(self, node):
        self._body(node.body)

    def _body(self, statements):
        for statement in statements:
            self.visit(statement)

    def visit_AnnAssign(self, node):
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self.visit(node.value)

    def visit_If(self, node):
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._condition(node)
            self.generic_visit(node)

    def visit_Raise(self, node):
        self._replace("statement", node, "pass")

    def visit_Assert(self, node):
        """Most of them tell a type checker something."""

    def visit_JoinedStr(self, node):
        """Words."""

    def visit_keyword(self, node):
        if node.arg not in CHECKS:
            self.visit(node.value)

    # what is changed

    def visit_Compare(self, node):
        if len(node.ops) == 1:
            operators = COMPARISONS[type(node.ops[0])]
            self._swap("comparison", node.left, node.comparators[0], operators)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        is_type = isinstance(node.op, ast.BitOr) and not self._functions
        if type(node.op) in ARITHMETIC and not is_type and not _is_text(node):
            self._swap("arithmetic", node.left, node.right, ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        if type(node.op) in ARITHMETIC:
            old, new = (f"{sign}=" for sign in ARITHMETIC[type(node.op)])
            self._swap("arithmetic", node.target, node.value, (old, new))
        self._replace("statement", node, "pass")
        self.visit(node.value)

    def visit_BoolOp(self, node):
        operators = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._swap("boolean", node.values[0], node.values[1], operators)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            changed = node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0
            self._replace("constant", node, repr(changed))

    def visit_Return(self, node):
        value = node.value
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            return
        source = self._source(value)
        if _is_boolean(value):
            self._replace("return", value, f"not ({source})")
        elif isinstance(value, ast.Tuple) and value.elts:
            self._replace("return", value, f"({source})[0]")
        elif isinstance(value, ast.BinOp) and type(value.op) in (ast.Add, ast.Sub, ast.Mult):
            self._replace("return", value, f"-({source})")
        else:
            self._replace("return", value, "None")
        self.visit(value)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and "warn" not in ast.unparse(node.value.func):
            self._replace("statement", node, "pass")
            self.visit(node.value)
        elif not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Assign(self, node):
        if all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self._replace("statement", node, "pass")
        self.visit(node.value)

    def visit_IfExp(self, node):
        self._condition(node)
        self.generic_visit(node)

    def _condition(self, node):
        self._replace("condition", node.test, f"not ({self._source(node.test)})")


def _is_text(node):
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        or (isinstance(side, ast.BinOp) and _is_text(side))
        for side in (node.left, node.right)
    )


def _is_boolean(node):
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    is_truth = isinstance(node, ast.Constant) and isinstance(node.value, bool)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("any", "all", "bool", "isinstance")
    return is_not or is_truth or isinstance(node, ast.Compare | ast.BoolOp)


# --- a sample -----------------------------------------------------------------------------------


def every_mutant(root, packages=PACKAGES):
    """{package: its mutants}."""
    found = {}
    for package in packages:
        files = sorted((root / package).rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"no package {package} in {root}")
        names = [(file.relative_to(root).as_posix(), file.read_text()) for file in files]
        found[package] = [m for name, text in names for m in mutants_of(name, text)]
    return found


def sample(mutants, number, seed, minimum=MINIMUM):
    """Some mutants of each package, more of a larger one.

    Each has a place of its own in the order of a seed: changes elsewhere do not exchange it.

    mutants: {package: its mutants}.
    """

    def place(mutant):
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    total = sum(map(len, mutants.values()))
    least = min(minimum, -(-number // len(mutants)))
    free = max(0, number - least * len(mutants))
    return [
        mutant
        for own in mutants.values()
        for mutant in sorted(own, key=place)[: least + -(-free * len(own) // total)]
    ]


def text_of(root: pathlib.Path, mutant: Mutant) -> str:
    """The text of the file that a mutant changes."""
    return (root / mutant.file).read_text()
