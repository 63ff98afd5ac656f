"""Training: the loop, optimizers, objectives, checkpoints, sharding, run folders and monitors."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
