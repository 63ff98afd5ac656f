"""Preferences and rewards: DPO and its relatives, KTO, reward models, PPO, GRPO and rollouts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
