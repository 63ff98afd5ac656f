"""From text to token ids and back: byte-level BPE, chat templates, rendered conversations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
