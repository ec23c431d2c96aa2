"""Dataflow: what each element of a program is computed from, in any lattice."""

from .constants import Constants as Constants
from .flow import LONGEST_WALK as LONGEST_WALK
from .flow import Question as Question
from .flow import flows_from as flows_from
from .flow import flows_of_outputs as flows_of_outputs
from .flow import flows_to as flows_to
from .lattices import MIXED as MIXED
from .lattices import NONE as NONE
from .lattices import Flow as Flow
from .lattices import Labels as Labels
from .lattices import Lattice as Lattice
from .lattices import Sets as Sets
from .lattices import everything as everything
from .lattices import joined as joined
from .lattices import merge as merge
from .lattices import spread as spread
from .primitives import CONSTANT as CONSTANT
from .primitives import ELEMENTWISE as ELEMENTWISE
from .primitives import REDUCTIONS as REDUCTIONS
