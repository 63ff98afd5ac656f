"""Tokenizers: text to token ids and back, byte-level BPE, chat templates and rendered conversations."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
