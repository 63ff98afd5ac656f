"""Serving: continuous batching, constrained decoding and an OpenAI-compatible server."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
