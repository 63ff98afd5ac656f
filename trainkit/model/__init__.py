"""The model: its config, the transformer, text generation and fast decoding."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
