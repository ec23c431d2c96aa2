"""Recurrent cells with real-valued states."""
