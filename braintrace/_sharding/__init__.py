"""Sharding of a learner's arrays over a mesh of devices.

`division` describes the user's choice: a mesh, and the mesh axes over which samples and outputs are
sharded. `layout` derives the sharded axes of States and traces, with `parts`. `placement` moves
arrays there. All are pure functions of a compiled model, its trace specifications and the mesh; the
caller applies the placement to the inputs and outputs of a program. `processes` moves and reads
arrays if the devices belong to several processes.
"""

from .division import Division as Division
from .layout import Layout as Layout
from .layout import layout_of as layout_of
from .placement import Placement as Placement
from .placement import placement_of as placement_of
from .processes import on_host as on_host
from .processes import put as put
