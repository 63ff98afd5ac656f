"""From token ids to logits and on to text: the transformer, its config, and generation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
