"""From token ids to logits and on to text: the transformer, its config, and generation."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
