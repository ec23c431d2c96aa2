"""Pictures of compiled models, of traces and of comparisons, drawn by matplotlib."""

from .draw_comparison import draw_comparison as draw_comparison
from .draw_model import draw_model as draw_model
from .draw_traces import draw_traces as draw_traces
from .parts import in_bytes as in_bytes
