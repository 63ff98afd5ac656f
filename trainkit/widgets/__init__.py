"""The run on a page: the training panel, explorers, chat comparison, labeling, run browser."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
