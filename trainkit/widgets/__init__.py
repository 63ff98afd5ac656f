"""The run on a page: the training panel, explorers, chat comparison, labeling, run browser."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
