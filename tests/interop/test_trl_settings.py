"Our settings of each method in TRL's words, and those that TRL does not have."

import json
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.snapshots import compare
from torch import nn

from trainkit.align.dpo import DPOConfig
from trainkit.align.rl import RLConfig
from trainkit.config import ConfigError
from trainkit.interop import hf_bridge
from trainkit.interop.hf_bridge import _check_twin
from trainkit.interop.trl import DPO_LOSSES, SETTINGS, TRL_KINDS, TRLTrainer, check_trl_config
from trainkit.interop.trl import _pair, _reward_row, trl_kind
from trainkit.lora.inject import add_lora
from trainkit.lora.inject import LoRAConfig
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.recipes.config import method_config
from trainkit.train.config import TrainConfig, TrainingError


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


SHAPE = dict(vocab_size=40, d_model=32, n_heads=2, n_layers=1, d_ff=32, max_seq_len=16)


def adapted(*names, shape=SHAPE, **changes):
    model = Transformer(ModelConfig(**shape))
    layer = next(name for name, _ in model.named_modules() if name.endswith("q_proj"))
    for name in names:
        add_lora(model, LoRAConfig(**{"r": 2, "target_modules": [layer]} | changes), name)
    return model


def test_models_that_other_libraries_cannot_train_are_refused(monkeypatch):
    "Two adapters, a matrix that is three here, an adapter taken out of its base."
    monkeypatch.setattr(hf_bridge, "check_peft", lambda: None)
    _check_twin(adapted())
    _check_twin(adapted("one"))
    with pytest.raises(ValueError, match="the model has the adapters one, two: the engine trl"):
        _check_twin(adapted("one", "two"))
    with pytest.raises(ValueError, match="init_lora_weights = 'pissa' starts from the base's own"):
        _check_twin(adapted("one", init_lora_weights="pissa"))
    gpt2 = SHAPE | dict(activation="gelu_tanh", norm="layernorm", position="learned", bias="all")
    _check_twin(adapted(shape=gpt2))
    with pytest.raises(ValueError, match="one matrix where our GPT-2 has three"):
        _check_twin(adapted("one", shape=gpt2))


@pytest.mark.parametrize("found, refused", [("0.15.9", True), ("0.16.0", False), ("1.0", False)])
def test_a_library_that_peft_refuses_is_named(found, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    monkeypatch.setattr(hf_bridge, "version", lambda name: found)
    with pytest.raises(ImportError, match=f"torchao {found}") if refused else nullcontext():
        hf_bridge.check_peft()


@pytest.mark.parametrize(
    "rows, columns, packs, refused",
    [(32, 64, True, ""), (64, 96, True, "64 x 96"), (48, 64, True, "48 x 64"), (48, 96, False, "")],
)
def test_a_quantized_layer_that_this_processor_cannot_pack(
    rows, columns, packs, refused, monkeypatch
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(hf_bridge, "packs_weights", lambda device: packs)
    layer = SimpleNamespace(out_features=rows, in_features=columns)
    monkeypatch.setattr(hf_bridge, "quantized_layers", lambda model: {"up": layer})
    with pytest.raises(ValueError, match=f"up has {refused}") if refused else nullcontext():
        hf_bridge.check_few_bits(nn.Linear(2, 2), "cpu")


def test_the_trainer_of_a_method_gets_the_settings_of_the_method():
    for method in TRL_KINDS:
        config = method_config({"method": method})
        own = {"dpo": config.dpo, "grpo": config.rl, "rloo": config.rl, "distill": config.distill}
        own = own.get(method)
        kind, settings = trl_kind(config)
        assert kind == TRL_KINDS[method] and settings is own
    kto = method_config({"method": "dpo", "dpo": {"loss_type": ["kto"]}})
    assert trl_kind(kto) == ("kto", kto.dpo)
    both = method_config({"method": "dpo", "dpo": {"loss_type": ["sigmoid", "sft"]}})
    assert trl_kind(both) == ("dpo", both.dpo)
    with pytest.raises(ValueError, match="method = 'ppo': TRL has no trainer for it"):
        trl_kind(method_config({"method": "ppo"}))


def taken(kind, step, length, **changes):
    "A trainer after a step of TRL: what was sent, and whether it stops."
    sent, done = [], []
    knobs = dict(gradient_accumulation_steps=4, logging_steps=3, logging_first_step=True)
    knobs |= dict(eval_strategy="epoch", eval_steps=1, sample_steps=2, save_strategy="steps")
    state = SimpleNamespace(step=0, epoch=0, batch=0, tokens=7, losses=[], metrics={})
    trainer = SimpleNamespace(
        config=SimpleNamespace(**knobs, save_steps=2),
        state=state,
        theirs=SimpleNamespace(state=SimpleNamespace(global_step=step)),
        kind=kind,
        epoch_length=length,
        total_steps=9,
        checkpoint=None,
        epoch=0.5,
        shapes=[(2, 3)],
        bar=SimpleNamespace(update=lambda step: None),
        folder=changes.get("folder"),
        notify=lambda event, **facts: sent.append(facts),
        pause_clock=nullcontext,
        stop_reason=lambda: changes.get("reason"),
        update_best=lambda value: None,
        **{
            name: lambda name=name: done.append(name)
            for name in ("log", "evaluate", "log_samples", "save")
        },
    )
    control = SimpleNamespace(should_training_stop=False)
    logs = dict(loss=0.5, learning_rate=1e-3, epoch=changes.get("epoch", 0.0), num_tokens=99)
    TRLTrainer.after_step(trainer, logs | changes.get("logs", {}), control)
    return trainer, done, control.should_training_stop


@pytest.mark.parametrize(
    "kind, step, length, epoch, place",
    [
        ("sft", 1, 10, 1.5, (1, 5, 7)),
        ("sft", 1, 10, 2 - 1e-9, (2, 0, 7)),
        ("sft", 1, None, 0.5, (0, 0, 7)),
        ("grpo", 3, 10, 0.1, (1, 2, 99)),
        ("rloo", 5, 10, 0.1, (2, 0, 99)),
        ("grpo", 3, None, 0.1, (12, 0, 99)),
    ],
)
def test_the_position_after_a_step_of_another_trainer(kind, step, length, epoch, place):
    trainer, _, _ = taken(kind, step, length, epoch=epoch)
    state = trainer.state
    assert (state.epoch, state.batch, state.tokens) == place
    assert (state.step, state.losses) == (step, [0.5])


@pytest.mark.parametrize(
    "step, folder, due",
    [
        (1, "runs", ["log"]),
        (2, "runs", ["log_samples", "save"]),
        (2, None, ["log_samples"]),
        (3, "runs", ["log"]),
        (5, "runs", ["evaluate"]),
        (9, "runs", ["log", "log_samples"]),
    ],
)
def test_what_is_due_after_a_step_of_another_trainer(step, folder, due):
    logs = dict(grad_norm=2.0, reward=3.0, frac=1, text="none")
    trainer, done, stops = taken("sft", step, 10, epoch=step / 5, folder=folder, logs=logs)
    assert done == due and not stops
    assert trainer.state.metrics == {"reward": [3.0, 1], "frac": [1.0, 1]}
    assert (trainer.grad_norm, trainer.learning_rate, trainer.shapes) == (2.0, 1e-3, [])


def test_a_step_of_another_trainer_can_be_the_last():
    trainer, _, stops = taken("sft", 4, 10, epoch=0.4, reason="asked")
    assert stops and trainer.reason == "asked"
    with pytest.raises(TrainingError, match="the loss is nan, at step 4 of 9"):
        taken("sft", 4, 10, logs=dict(loss=float("nan")))


def test_a_pair_in_the_columns_of_trl():
    row = dict(prompt=[1, 2], chosen=[3], rejected=[4, 5])
    assert _pair(row) == row
    assert _reward_row(row) == dict(
        chosen="", rejected="", chosen_ids=[1, 2, 3], rejected_ids=[1, 2, 4, 5]
    )
    assert _reward_row(row | dict(margin=2))["margin"] == 2.0
    assert _pair(row | dict(chosen_labels=[3], rejected_labels=[4, 5])) == row
    with pytest.raises(ValueError, match="of which only some turns are learned"):
        _pair(row | dict(rejected_labels=[-100, 5]))


def test_the_checkpoint_that_a_run_is_resumed_from(tmp_path):
    "The last complete one by its number; the one that is named; nothing where nothing has to be."
    for number in (9, 10, 11):
        (tmp_path / "trl" / f"checkpoint-{number}").mkdir(parents=True)
    for number in (9, 10):
        (tmp_path / "trl" / f"checkpoint-{number}" / "trainkit.json").write_text("{}")
    trainer, other = SimpleNamespace(folder=tmp_path), SimpleNamespace(folder=tmp_path / "none")
    last = tmp_path / "trl" / "checkpoint-10"
    assert TRLTrainer.find(trainer, None) is TRLTrainer.find(trainer, False) is None
    assert TRLTrainer.find(trainer, True) == TRLTrainer.find(trainer, "auto") == last
    named = last.with_name("checkpoint-9")
    assert TRLTrainer.find(trainer, str(named)) == named
    assert TRLTrainer.find(other, "auto") is None
    for run, resume in ((other, True), (trainer, last.with_name("checkpoint-11"))):
        with pytest.raises(FileNotFoundError, match="has no checkpoint of engine: trl"):
            TRLTrainer.find(run, resume)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    said = []
    own = dict(data="d", model="m")
    trainer = SimpleNamespace(identity=lambda: own, note=said.append)

    def recall(force=False, **identity):
        text = json.dumps(dict(identity=identity, state=dict(step=7)))
        (tmp_path / "trainkit.json").write_text(text)
        return TRLTrainer.recall(trainer, tmp_path, force).step

    assert TRLTrainer.recall(trainer, None, False).step == 0
    assert recall(data="d", model="m", more=1) == 7 and not said
    with pytest.raises(ValueError, match="of another run: model was 'x' and is 'm'. Take the"):
        recall(data="d", model="x")
    assert recall(True, data="d") == 7 and "model was None and is 'm'" in said[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_in_the_classes_of_bitsandbytes(bits, bias, monkeypatch):
    class Layer(nn.Module):
        def __init__(self, *shape, **knobs):
            super().__init__()
            self.shape, self.knobs, self.bias = shape, knobs, "none yet"

    def weight(data, **knobs):
        return data, knobs

    layers = SimpleNamespace(Linear4bit=Layer, Linear8bitLt=Layer)
    layers.Params4bit = layers.Int8Params = weight
    library = ModuleType("bitsandbytes")
    library.nn = layers
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    theirs = nn.ModuleDict({"up": nn.Linear(4, 2, bias=bias)})
    old = theirs["up"]
    ours = SimpleNamespace(in_features=4, out_features=2, bias=old.bias, threshold=6.0)
    if bits == 4:
        facts = dict(quant_type="nf4", nested_absmax=None, compute_dtype="bf16", blocksize=64)
        vars(ours).update(facts)
    hf_bridge._quantize_theirs(theirs, {"down": ours}, lambda name: "up")
    new = theirs["up"]
    assert new.shape == (4, 2, bias) and torch.equal(new.weight[0], old.weight)
    assert new.bias is old.bias if bias else new.bias == "none yet"
    assert getattr(theirs, f"is_loaded_in_{bits}bit") and not new.weight[1]["requires_grad"]
    if bits == 4:
        assert new.knobs["compress_statistics"] is new.weight[1]["compress_statistics"] is False
        assert (new.knobs["quant_type"], new.weight[1]["blocksize"]) == ("nf4", 64)
    else:
        assert new.knobs == dict(has_fp16_weights=False, threshold=6.0)


@pytest.mark.parametrize(
    "knobs",
    [
        dict(environment="guess_number"),
        dict(thinking_budget=0),
        dict(batch_invariant=True),
        dict(sampler_weights="int8"),
        dict(dynamic_sampling=2),
        dict(old_log_probs="sampler"),
    ],
)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_what_trl_has_no_counterpart_for_is_refused(kind, knobs):
    [name] = knobs
    with pytest.raises(ValueError, match=rf"rl\.{name} = .*take engine: trainkit"):
        SETTINGS[kind](RLConfig(kind, **knobs))


def test_the_kl_of_kto_compares_answers_of_one_batch():
    "The same neighbours as in our loss, whichever pairs the batch holds."
    from trainkit.align.dpo import _other_answers
    from trainkit.align.preference_data import collate_pairs
    from trainkit.interop.trl import trl_rows

    pairs = [dict(prompt=[n, n], chosen=[20 + n, 1], rejected=[40 + n]) for n in range(5, 12)]
    rows = trl_rows("kto", pairs)
    which = [5, 0, 3]
    batch = TRLTrainer.collate_singles(None, [rows[2 * i + side] for i in which for side in (0, 1)])
    ours = _other_answers(collate_pairs([pairs[i] for i in which]))
    for side, name in enumerate(("chosen", "rejected")):
        answers = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(
                batch["KL_input_ids"][side::2], batch["KL_completion_mask"][side::2], strict=True
            )
        ]
        expected = zip(ours[f"{name}_input_ids"], ours[f"{name}_attention_mask"], strict=True)
        assert answers == [ids[mask.bool()].tolist() for ids, mask in expected]
