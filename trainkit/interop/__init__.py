"""Other formats and other loops: Hugging Face, PEFT, GGUF, the hub, TRL, LLaMA-Factory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
