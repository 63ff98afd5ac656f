"""Fewer trainable numbers: low-rank adapters, their variants, ranks and merging."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
