"""Data: reading, checking, splitting, mixing, tokenizing, packing and loading examples."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
