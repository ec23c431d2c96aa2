"""Pictures of compiled models and of comparisons, drawn by matplotlib."""

from .draw_comparison import draw_comparison as draw_comparison
from .draw_model import draw_model as draw_model
from .parts import in_bytes as in_bytes
