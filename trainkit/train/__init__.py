"""The training loop and what it leaves behind: optimizers, checkpoints, runs, monitors, reports."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
