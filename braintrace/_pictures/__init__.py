"""Pictures of compiled models and of traces, drawn by matplotlib."""

from .draw_model import draw_model as draw_model
from .draw_traces import draw_traces as draw_traces
