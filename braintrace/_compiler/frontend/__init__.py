"""From a model to one flat program of its step."""
