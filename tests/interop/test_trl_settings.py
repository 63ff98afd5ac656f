"Our settings of each method in TRL's words, and those that TRL does not have."

import json

from support.snapshots import compare

from trainkit.align.dpo import DPOConfig
from trainkit.align.rl import RLConfig
from trainkit.config import ConfigError
from trainkit.interop.trl import DPO_LOSSES, SETTINGS, check_trl_config
from trainkit.train.config import TrainConfig


def told(function, *args, **knobs):
    try:
        return json.dumps(function(*args, **knobs), default=str)
    except (ValueError, ConfigError) as error:
        return f"{type(error).__name__} {error}"


def test_each_setting_is_told_to_trl():
    lines = []
    for knobs in (
        {},
        dict(loss_type=["ipo", "sft"], loss_weights=[1, 0.5], beta=0.3),
        dict(loss_type=["orpo"]),
        dict(loss_type=["sigmoid"], reference_free=True),
        dict(loss_type=["robust"], label_smoothing=0.2),
        dict(loss_type=["discopop"], discopop_tau=0.3),
        dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3, ld_alpha=0.2),
    ):
        lines.append(f"dpo {knobs}: {told(lambda k=knobs: SETTINGS['dpo'](DPOConfig(**k)))}\n")
    kto = DPOConfig(loss_type=["kto"], beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    lines.append(f"kto: {told(SETTINGS['kto'], kto)}\n")
    lines += [f"reward {center}: {told(SETTINGS['reward'], center)}\n" for center in (0.0, 0.01)]
    lines.append(f"sft: {told(SETTINGS['sft'], None)}\n")
    for kind in ("grpo", "rloo"):
        for knobs in (
            {},
            dict(beta=0.0),
            dict(beta=0.1),
            dict(beta=0.1, kl_in_reward=True),
            dict(beta=0.1, kl_in_reward=False),
            dict(beta=0.1, kl_in_reward=False, kl_estimator="k2"),
            dict(beta=0.1, kl_in_reward=False, kl_estimator="k3"),
            dict(entropy_coef=0.1),
            dict(num_generations=4, num_prompts=3, temperature=0.5, top_k=5, top_p=0.9),
            dict(epsilon=0.1, num_iterations=2, max_completion_length=7),
        ):
            text = told(lambda kind=kind, k=knobs: SETTINGS[kind](RLConfig(kind, **k)))
            lines.append(f"{kind} {knobs}: {text}\n")
    for knobs in (
        {},
        dict(optimizer_in_backward=True, max_grad_norm=0.0),
        dict(offload_optimizer=True),
        dict(z_loss=1e-4),
        dict(on_nan="skip"),
    ):
        lines.append(f"train {knobs}: {told(lambda k=knobs: check_trl_config(TrainConfig(**k)))}\n")
    lines.append(f"losses: {', '.join(DPO_LOSSES)}\n")
    compare("".join(lines), "trl_settings.txt")
