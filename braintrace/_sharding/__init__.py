"""Where the arrays of a learner lie on a mesh of devices.

`division` is what the user says: a mesh, and which of its axes divide samples and outputs.
`layout` works out which axes of States and traces that divides, by `parts`. `placement` puts arrays
there. All of it are pure functions of a compiled model, the specifications of its traces, and the
mesh; whoever runs the model asks for the placement of what goes in and of what comes out.
`processes` puts and reads arrays where several processes have the devices.
"""

from .division import Division as Division
from .layout import Layout as Layout
from .layout import layout_of as layout_of
from .placement import Placement as Placement
from .placement import automatic_axes as automatic_axes
from .placement import placement_of as placement_of
from .processes import on_host as on_host
from .processes import put as put
