"""Alignment: DPO and related losses, KTO, reward models, PPO, GRPO, rollouts and distillation."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
