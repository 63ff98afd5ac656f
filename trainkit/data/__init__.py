"""From files to batches: reading, checking, splitting, mixing, tokenizing, packing, loading."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
