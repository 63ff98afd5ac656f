"""The training loop and what it leaves behind: optimizers, objectives, checkpoints, runs, monitors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
