"""Configs of other systems load whole: each line is accounted for, contradictions are refused.

Old names of knobs lead to the new ones.
"""

import importlib
import json
import math
import re
import warnings

import pytest
import yaml
from support.processes import ROOT, call
from support.processes import shell as trainkit

from trainkit.config import ConfigError, knobs, load_config, save_config
from trainkit.recipes.config_files import Computed
from trainkit.recipes.foreign_settings import CONTEXTS, look_up
from trainkit.recipes.foreign_words import PRECISIONS, Implied, Refused
from trainkit.recipes.config_files import read_python, read_settings
from trainkit.recipes.config import METHODS, RunConfig, method_config
from trainkit.train.config import TrainConfig
from trainkit.recipes.config import PRESETS
from trainkit.recipes.methods import ALIGNED
from trainkit.recipes.converter import convert_config
from trainkit.recipes.foreign_settings import flag_changes

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
MEANT = {  # file -> knobs that it must come to, and what must be refused
    "reasoning_trainer.json": (
        dict(
            method="lora",
            init_from="tiny/base",
            **{
                "lora.r": 8,
                "quant.bits": 4,
                "optim.warmup_ratio": 0.03,
                "data.max_length": 256,
                "name": "first",
                "report_to": ["wandb"],
                "train.mixed_precision": "bf16",
                "train.eval_strategy": "epoch",
                "train.early_stopping_threshold": 0.01,
                "model.gradient_checkpointing": True,
            },
        ),
        [],
    ),
    "orchestrator.yaml": (
        dict(
            method="lora",
            init_from="tiny/base",
            **{
                "optim.learning_rate": 2e-4,
                "train.per_device_train_batch_size": 4,
                "lora.r": 16,
                "lora.lora_alpha": 32,
                "lora.lora_dropout": 0.1,
                "data.num_workers": 2,
                "curriculum.strategy": "length_based",
                "curriculum.steps": 100,
                "report_to": ["tensorboard"],
                "train.eval_steps": 50,
            },
        ),
        ["training.sft.learning_rate", "training.dpo.beta", "training.from_scratch.cpu_offload"],
    ),
    "smolora.py": (
        dict(
            method="lora",
            init_from="tiny/base",
            **{
                "lora.target_modules": ["q_proj", "k_proj", "v_proj"],
                "optim.warmup_steps": 10,
                "data.pin_memory": False,
                "train.gradient_accumulation_steps": 4,
            },
        ),
        ["from_pretrained.trust_remote_code"],
    ),
    "llm_trainer.json": (
        dict(
            method="pretrain",
            **{
                "model.d_model": 64,
                "model.activation": "gelu",
                "model.attention_dropout": 0.1,
                "tokenizer.vocab_size": 2000,
                "model.vocab_size": 0,
                "optim.optim": "adamw_torch",
                "data.dataset_config": "wikitext-2-raw-v1",
                "data.min_length": 10,
                "sft.packing": "first_fit",
                "train.mixed_precision": "bf16",
                "train.output_dir": "checkpoints",
                "train.eval_strategy": "steps",
            },
        ),
        [],
    ),
    "llamafarm.yaml": (
        dict(
            method="qlora",
            init_from="tiny/base",
            **{
                "lora.r": 16,
                "lora.lora_dropout": 0.05,
                "quant.bits": 4,
                "quant.compute_dtype": "bfloat16",
                "train.per_device_train_batch_size": 1,
                "train.gradient_accumulation_steps": 16,
                "train.mixed_precision": "no",
                "optim.warmup_ratio": 0.1,
                "optim.warmup_steps": 0,
                "train.max_steps": -1,
                "train.early_stopping_patience": 3,
                "data.group_by_length": True,
                "train.data_seed": 7,
            },
        ),
        ["optimization.cuda.bf16", "optimization.mps.dtype", "optimization.cpu.use_ipex"],
    ),
    "trl.yaml": (
        dict(
            method="lora",
            **{
                "sft.packing": "best_fit",
                "sft.train_on": "assistant",
                "quant.bits": 4,
                "quant.double_quant": True,
                "data.validation_split": "test",
                "data.group_by_length": True,
            },
        ),
        [],
    ),
    "llamafactory.yaml": (
        dict(
            method="lora",
            **{
                "lora.target_modules": "all-linear",
                "quant.bits": 4,
                "data.max_length": 512,
                "data.max_examples": 1000,
                "data.eval_fraction": 0.1,
                "sft.template": "llama3",
                "sft.packing": "best_fit",
            },
        ),
        ["trust_remote_code", "overwrite_output_dir"],
    ),
    "axolotl.yaml": (
        dict(
            method="lora",
            **{
                "quant.bits": 8,
                "data.path": "rows.jsonl",
                "data.kind": "instruction",
                "optim.optim": "adamw_8bit",
                "train.eval_strategy": "epoch",
                "train.mixed_precision": "auto",
                "lora.target_modules": "all-linear",
            },
        ),
        ["special_tokens"],
    ),
    "torchtune.yaml": (
        dict(
            method="lora",
            init_from="tiny/base",
            **{
                "lora.r": 64,
                "lora.target_modules": [
                    "q_proj",
                    "v_proj",
                    "o_proj",
                    "gate_proj",
                    "up_proj",
                    "down_proj",
                ],
                "optim.optim": "adamw_torch",
                "optim.lr_scheduler_type": "cosine",
                "optim.warmup_steps": 100,
                "train.max_grad_norm": 0.0,
                "data.max_length": 512,
            },
        ),
        [],
    ),
}


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("name", MEANT)
def test_a_config_of_another_system_loads_and_every_line_is_accounted_for(name, tmp_path):
    knobs, refused = MEANT[name]
    config, account = convert_config(CONFIGS / name, device="cpu")
    assert {k: value_of(config, k) for k in knobs} == knobs
    assert {row.setting for row in account.rows} >= {
        s.name for s in read_settings(CONFIGS / name)
    }, "no line is dropped in silence"
    assert set(refused) <= {row.setting for row in account.named("refused")} and all(
        row.why for row in account.named("refused")
    )
    assert not any("is not known" in row.why for row in account.rows)
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(account.given))
    assert method_config(tmp_path / "ours.yaml") == config, (
        "the translation as a file is the same run"
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(RunConfig, tmp_path / "saved.yaml") == config


def test_processes_become_a_launch():
    assert (
        convert_config(CONFIGS / "llm_trainer.json")[1].command
        == "trainkit launch FILE --processes 2 --strategy zero2"
    )


def test_the_part_for_the_device_counts():
    for device, rows, precision in (("cuda", 8, "bf16"), ("mps", 2, "no"), ("cpu", 1, "no")):
        config = convert_config(CONFIGS / "llamafarm.yaml", device=device)[0]
        assert (config.train.per_device_train_batch_size, config.train.mixed_precision) == (
            rows,
            precision,
        )
    assert (
        convert_config(CONFIGS / "orchestrator.yaml", method="sft")[0].optim.learning_rate == 2e-5
    )
    scratch = convert_config(CONFIGS / "orchestrator.yaml", method="from_scratch")[0]
    assert (scratch.method, scratch.optim.learning_rate, scratch.train.offload_optimizer) == (
        "pretrain",
        5e-5,
        True,
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("contradiction.yaml", r"optim .*line 7.*contradicts .*optimizer \(line 6\)"),
        ("twice.yaml", r"gradient_checkpointing \(line 7\): the key is given twice"),
    ],
)
def test_what_contradicts_itself_is_an_error_with_its_place(name, hint):
    with pytest.raises(ConfigError, match=hint):
        convert_config(CONFIGS / name)


@pytest.mark.parametrize(
    ("words", "knob", "value"),
    [  # alias rows of the table of features, each as a user would write it
        ({"lora": {"alpha": 4}}, "lora.lora_alpha", 4),
        ({"lora_alpha": 4}, "lora.lora_alpha", 4),
        ({"lora": {"dropout": 0.5}}, "lora.lora_dropout", 0.5),
        ({"lora_r": 3}, "lora.r", 3),
        ({"lora_rank": 3}, "lora.r", 3),
        ({"lora_target": "q_proj,v_proj"}, "lora.target_modules", "q_proj,v_proj"),
        ({"optimizer": "adamw"}, "optim.optim", "adamw_torch"),
        ({"optim": {"optimizer": "sgd"}}, "optim.optim", "sgd"),
        ({"optim": "lion_32bit", "learning_rate": 1e-4}, "optim.optim", "lion"),
        ({"optim": "adafactor"}, "optim.optim", "adafactor"),
        ({"neftune_noise_alpha": 5}, "train.neftune_noise_alpha", 5),
        ({"vocab_size": 400}, "tokenizer.vocab_size", 400),
        ({"model": "z"}, "init_from", "z"),
        ({"lr_scheduler": "linear"}, "optim.lr_scheduler_type", "linear"),
        ({"max_seq_length": 77}, "data.max_length", 77),
        ({"warmup_ratio": 0.2}, "optim.warmup_ratio", 0.2),
        ({"num_epochs": 5}, "train.num_train_epochs", 5),
        ({"per_device_batch_size": 3}, "train.per_device_train_batch_size", 3),
        ({"batch_size": 3}, "train.per_device_train_batch_size", 3),
        ({"checkpoint_dir": "x"}, "train.output_dir", "x"),
        ({"pack_sequences": True}, "sft.packing", "best_fit"),
        ({"method": "lora", "load_in_8bit": True}, "quant.bits", 8),
        ({"method": "lora", "quantization_bit": 4}, "quant.bits", 4),
        ({"finetuning_type": "qlora"}, "quant.bits", 4),
        ({"bf16": True}, "train.mixed_precision", "bf16"),
        ({"use_amp": True, "amp_dtype": "float16"}, "train.mixed_precision", "fp16"),
        ({"torch_dtype": "bfloat16"}, "train.mixed_precision", "bf16"),
        ({"dtype": "torch.float32"}, "train.mixed_precision", "no"),
        ({"use_bf16": True}, "train.mixed_precision", "bf16"),
        ({"early_stopping": True, "eval_strategy": "epoch"}, "train.early_stopping_patience", 3),
        ({"use_wandb": True}, "report_to", ["wandb"]),
        ({"use_flash_attention": True}, "model.attention", "flash_attention_2"),
        ({"use_flash_attention": False}, "model.attention", "sdpa"),
        ({"use_wandb": False}, "report_to", []),
        ({"wandb_name": "mine"}, "name", "mine"),
        ({"use_wandb": True, "wandb_name": "mine"}, "report_to", ["wandb"]),
        ({"torch_dtype": "auto"}, "train.mixed_precision", "auto"),
        ({"load_in_4bit": True, "method": "lora"}, "quant.bits", 4),
        ({"base_model_name": "z"}, "init_from", "z"),
        ({"model_name": "z"}, "init_from", "z"),
        ({"use_lora": True}, "method", "lora"),
        ({"training_type": "lora"}, "method", "lora"),
        ({"stage": "sft", "finetuning_type": "freeze"}, "method", "freeze"),
        ({"dataloader_num_workers": 2}, "data.num_workers", 2),
        ({"group_by_length": True}, "data.group_by_length", True),
    ],
)
def test_common_aliases_load_without_a_translation(words, knob, value):
    config = {
        "method": "lora"
        if "lora" in str(words)
        and not {"method", "stage", "training_type", "finetuning_type", "use_lora"} & {*words}
        else "sft",
        "init_from": "x",
        **words,
    }
    if {"stage", "training_type", "finetuning_type", "use_lora"} & {*words}:
        config.pop("method")
    if {"base_model_name", "model_name", "model"} & {*words}:
        config.pop("init_from")
    for load in (lambda g: load_config(RunConfig, g), method_config):
        assert value_of(load(config), knob) == value
    if not any(
        isinstance(v, dict) for v in config.values()
    ):  # As a flag, too, over whatever the method has by itself
        assert value_of(method_config(None, [f"{k}={v}" for k, v in config.items()]), knob) == value


def test_the_project_of_a_tracker_is_named_in_the_environment():
    for load in (method_config, lambda g: method_config(None, [f"{k}={v}" for k, v in g.items()])):
        with pytest.raises(ConfigError, match="wandb_project.*WANDB_PROJECT=p"):
            load({"wandb_project": "p"})


@pytest.mark.parametrize(
    ("words", "overrides", "knob", "value"),
    [  # what somebody says beats what a method has by itself, and a change what a file says
        ({"method": "dpo"}, ["learning_rate=1e-3"], "optim.learning_rate", 1e-3),
        (
            {"method": "dpo"},
            ["gradient_accumulation_steps=3"],
            "train.gradient_accumulation_steps",
            3,
        ),
        ({"method": "dpo"}, ["lr=1e-3"], "optim.learning_rate", 1e-3),
        ({"method": "sft", "optim": {"lr": 1}}, ["learning_rate=0.5"], "optim.learning_rate", 0.5),
        (
            {"method": "sft", "learning_rate": 1},
            ["optim.learning_rate=0.5"],
            "optim.learning_rate",
            0.5,
        ),
        ({"method": "sft", "bf16": True}, ["fp16=true"], "train.mixed_precision", "fp16"),
        ({"method": "rloo"}, ["beta=0.2"], "rl.beta", 0.2),
        ({"method": "sft", "sft": {"packing": "greedy"}}, ["packing=none"], "sft.packing", "none"),
        (
            {"method": "sft"},
            ["pack_sequences=true", "packing_strategy=greedy"],
            "sft.packing",
            "greedy",
        ),
        ({}, ["method=dpo", "learning_rate=1e-3"], "optim.learning_rate", 1e-3),
    ],
)
@pytest.mark.parametrize("profile", [None, "quick"])
def test_a_word_at_the_top_beats_what_a_method_has_by_itself(
    words, overrides, knob, value, profile
):
    assert value_of(method_config({**words, "init_from": "x"}, overrides, profile), knob) == value
    assert value_of(load_config(RunConfig, {**words, "init_from": "x"}, overrides), knob) == value


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("learning_rate=0.25",),
        ("optim.lr=0.25",),
        ("max_length=32",),
        ("packing=true",),
        ("preset=cpu",),
        ("method=lora",),
        ("use_lora=true",),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        {"method": "sft", "optim": {"learning_rate": 0.5}},
        {"method": "dpo", "max_length": 64},
        {"method": "sft", "preset": "cuda"},
        {"method": "dpo", "preset": "memory-efficient"},
        {"preset": "minimal-memory"},
        {"method": "sft", "train": {"max_steps": 5}},
        {"method": "grpo", "preset": "experimental"},
        {"preset": "small", "train": None},
    ],
    ids=str,
)
def test_python_and_the_shell_read_a_file_alike(words, overrides, tmp_path):
    """The user's value wins, then the preset's, then the method's, then the class default.

    Also if a group is named for one knob.
    """
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**words, "init_from": "x"}))
    read = load_config(RunConfig, tmp_path / "c.yaml", overrides)
    assert (
        read
        == load_config(RunConfig, {**words, "init_from": "x"}, overrides)
        == method_config(tmp_path / "c.yaml", overrides)
    )
    typed = dict(o.split("=") for o in overrides)
    preset = (
        PRESETS[typed.get("preset") or words["preset"]].knobs
        if typed.get("preset") or "preset" in words
        else {}
    )
    for group, values in METHODS[read.method].defaults.items():
        for name, value in values.items():
            expected = (words.get(group) or {}).get(name, preset.get(group, {}).get(name, value))
            if name not in ("learning_rate", "max_length"):
                assert getattr(getattr(read, group), name) == expected, (group, name)
    rate = float(
        typed.get("learning_rate")
        or typed.get("optim.lr")
        or (words.get("optim") or preset.get("optim", {})).get("learning_rate")
        or 0
    )
    assert not rate or read.optim.learning_rate == rate
    assert read.optim.learning_rate != 3e-4 or read.method == "pretrain", "not the class default"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_defaults_however_it_is_named(method):
    assert (
        load_config(RunConfig, {"method": method})
        == load_config(RunConfig, {}, [f"method={method}"])
        == RunConfig(method=method)
        == method_config({"method": method})
    )
    for group, values in METHODS[method].defaults.items():
        for name, value in values.items():
            assert (
                getattr(getattr(load_config(RunConfig, {"method": method}), group), name) == value
            )


@pytest.mark.parametrize(
    "words",
    [
        {"optimizer": "adamw", "optim": {"optim": "sgd"}},
        {"max_length": 5, "max_seq_length": 6},
        {"lora": {"alpha": 1, "lora_alpha": 2}, "method": "lora"},
        {"load_in_4bit": True, "load_in_8bit": True, "method": "lora"},
        {"torch_dtype": "float16", "bf16": True},
        {"stage": "pt", "finetuning_type": "freeze"},
        {"batch_size": 2, "train": {"per_device_train_batch_size": 3}},
    ],
)
def test_aliases_that_disagree_are_an_error(words):
    with pytest.raises(ConfigError):
        load_config(
            RunConfig,
            {"method": "sft", "init_from": "x", **words} if "stage" not in words else words,
        )


def test_override_rules():
    from trainkit.train.optim import make_schedule
    import torch

    net = torch.nn.Linear(1, 1)

    def first_rates(**knobs):
        config = method_config(
            {
                "method": "sft",
                "init_from": "x",
                "optim": {
                    "learning_rate": 1.0,
                    "lr_scheduler_type": "constant_with_warmup",
                    **knobs,
                },
            }
        ).optim
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule, rates = make_schedule(optimizer, config, 100), []
        for _ in range(30):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step(), schedule.step()
        return rates

    def warm(rates):
        return next(i for i, r in enumerate(rates) if r == 1.0)

    assert (
        warm(first_rates(warmup_ratio=0.1, warmup_steps=0)) == 10
        and warm(first_rates(warmup_ratio=0.1, warmup_steps=20)) == 20
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_survives_a_file(name, tmp_path):
    config = method_config(
        {
            "preset": name,
            **(
                {}
                if PRESETS[name].kind == "size"
                else {"init_from": "x", "method": PRESETS[name].knobs.get("method", "sft")}
            ),
        }
    )
    save_config(config, tmp_path / "c.yaml")
    assert (
        load_config(RunConfig, tmp_path / "c.yaml") == config == method_config(tmp_path / "c.yaml")
    )
    assert "70 billion" in PRESETS[name].doc or name not in (
        "minimal-memory",
        "maximum-performance",
    )


KINDS = {
    "pretrain": "texts",
    "dpo": "pairs",
    "reward": "pairs",
    **dict.fromkeys(("grpo", "rloo", "ppo", "reinforce"), "asks"),
}


def with_preset(name, method, home):
    groups = (
        {
            "rl": {
                "max_completion_length": 4,
                "num_prompts": 2,
                "num_generations": 2 if method in ("grpo", "rloo") else 1,
                "rewards": "right_answer",
            }
        }
        if KINDS.get(method) == "asks"
        else {}
    )
    if method == "distill":
        groups = {"distill": {"teacher": str(home / "base"), "lmbda": 0.0}}
    return method_config(
        {
            "preset": name,
            "method": method,
            "init_from": str(home / "base"),
            "sft": {"questions": 0},
            "train": {"progress": False, "sample_steps": 0},
            "data": {
                "path": str(home / f"{KINDS.get(method, 'talks')}.jsonl"),
                **({"max_length": 32} if method == "pretrain" else {}),
            },
            **groups,
        }
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_suits_a_method_or_says_why_not(name, method, tmp_path):
    "A named method is used; 4 bits need an adapter, and nothing else is refused."
    few = "quant" in PRESETS[name].knobs and method in ("sft", "freeze")
    if few:
        with pytest.raises(
            ConfigError, match="a quantized model cannot be trained directly.*qlora"
        ):
            with_preset(name, method, tmp_path)
        return
    config = with_preset(name, method, tmp_path)
    assert config.method == method and config.adapts == (
        "lora" in method
        or (method in ALIGNED and bool({"lora", "quant"} & {*PRESETS[name].knobs}))
        or (method == "pretrain" and "quant" in PRESETS[name].knobs)
    )
    for knob, value in PRESETS[name].knobs.get("train", {}).items():
        assert getattr(config.train, knob) == value
    for knob, value in PRESETS[name].knobs.get("optim", {}).items():
        assert getattr(config.optim, knob) == value


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A small model, and data of each kind."
    import torch

    from trainkit.tokenizer.chat import set_template
    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    folder = tmp_path_factory.mktemp("presets")
    names = "zero one two three four five six seven eight nine ten eleven".split()
    rows = [
        dict(
            prompt=f"Spell {n}, {k}.",
            completion=a,
            chosen=a,
            rejected=names[n - 1],
            answer=a,
            text=f"{n} is {a}, {k} times. " * 5,
        )
        for n, a in enumerate(names)
        for k in range(8)
    ]
    for file, keys in (
        ("talks", ("prompt", "completion")),
        ("pairs", ("prompt", "chosen", "rejected")),
        ("asks", ("prompt", "answer")),
        ("texts", ("text",)),
    ):
        (folder / f"{file}.jsonl").write_text(
            "\n".join(json.dumps({k: row[k] for k in keys}) for row in rows)
        )
    tokenizer = BPETokenizer.train(
        [row["prompt"] + row["completion"] for row in rows], 300, special_tokens=["<|endoftext|>"]
    )
    set_template(tokenizer, "chatml")
    torch.manual_seed(0)
    save_pretrained(
        Transformer(
            ModelConfig(
                vocab_size=tokenizer.vocab_size,
                d_model=64,
                n_heads=4,
                n_kv_heads=2,
                n_layers=2,
                d_ff=128,
                max_seq_len=256,
            )
        ),
        tokenizer,
        folder / "base",
    )
    return folder


@pytest.fixture(scope="module")
def stranger(home, tmp_path_factory):
    "The folder of a model of a family that ours does not compute, with a tokenizer."
    import torch
    import transformers

    from trainkit.interop.hf import load_pretrained

    folder, tokenizer = tmp_path_factory.mktemp("stranger"), load_pretrained(home / "base")[1]
    torch.manual_seed(0)
    transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    with pytest.raises(ValueError, match="native=False"):
        load_pretrained(folder, native=True)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_another_family_learns_by_every_method(method, home, stranger, tmp_path):
    "Two steps: what should learn has moved, what should not has not, whatever the objective."
    import torch

    from trainkit.recipes.runner import make_trainer, plan_lines, prepare

    config = with_preset("cpu", method, home)
    config.init_from = str(stranger)
    config.optim.learning_rate, config.train.max_steps, config.train.logging_steps = 1e-2, 2, 1
    (
        config.train.per_device_train_batch_size,
        config.train.gradient_accumulation_steps,
        config.train.eval_strategy,
        config.runs_dir,
    ) = 4, 1, "no", str(tmp_path)
    scored = (
        {"rewards": [lambda completion_ids, **_: [ids[0] / 100 for ids in completion_ids]]}
        if KINDS.get(method) == "asks"
        else {}
    )
    if scored:
        config.rl.rewards = []
    parts = prepare(config, **scored)
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    trainer = make_trainer(parts)
    assert "2 layers, 64 wide, 2 heads; format GPTNeoXForCausalLM, computed by transformers" in (
        "".join(plan_lines(parts, trainer))
    )
    done = trainer.train()
    assert done.steps == 2 and done.final_loss is not None and math.isfinite(done.final_loss)
    moved = {name for name, p in parts.model.named_parameters() if not torch.equal(p, before[name])}
    learns = {name for name, p in parts.model.named_parameters() if p.requires_grad}
    assert moved and moved <= learns, (len(moved), len(learns))
    if "lora" in method:
        assert all("lora_" in name for name in learns)


ON_A_GPU = [
    pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-t4")
]  # their number formats are those of a GPU


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", [*(name for name in PRESETS if not name.startswith("cuda")), *ON_A_GPU]
)
def test_a_preset_runs_with_every_method(name, method, home):
    """Two steps of a small model with the preset's batches, optimizer, adapter and bits.

    What it compiles is traced, not made into machine code.
    """
    if name == "minimal-memory" and method in ("pretrain", "sft", "freeze"):
        pytest.skip("refused, as the test above says")
    from trainkit.recipes.runner import rehearse

    train, config = PRESETS[name].knobs.get("train", {}), with_preset(name, method, home)
    if config.train.torch_compile:
        config.train.torch_compile_backend = "eager"
    tried = rehearse(config, 2)
    assert (
        tried.steps > 0
        and tried.loss is not None
        and math.isfinite(tried.loss)
        and not any("Error" in note for note in tried.notes)
    )
    if "per_device_train_batch_size" in train:
        assert (
            tried.effective_batch
            == train["per_device_train_batch_size"] * train["gradient_accumulation_steps"]
        )


def test_no_run_folder_holds_a_secret(tmp_path):
    "`${HF_TOKEN}` is filled in where it is used, and written down as it stood."
    secret = "hf_verysecretindeed"
    (tmp_path / "c.yaml").write_text(
        "name: quiet\n"
        "data: {path: stdlib, max_chars: 60000, max_length: 32, eval_fraction: 0.1}\n"
        "tokenizer: {vocab_size: 300}\n"
        "model: {d_model: 32, n_heads: 2, n_layers: 1, d_ff: 64}\n"
        "train: {max_steps: 2, per_device_train_batch_size: 2, sample_steps: 0, output_dir: 'out', "
        "torch_compile_backend: '${HF_TOKEN}'}\n"
    )
    done = trainkit("train", "c.yaml", cwd=tmp_path, HF_TOKEN=secret)
    assert done.returncode == 0, done.stderr
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 8 and not [p for p in files if secret.encode() in p.read_bytes()]
    assert (
        "${HF_TOKEN}" in (tmp_path / "out" / "config.yaml").read_text()
        and secret not in done.stdout + done.stderr
    )
    (tmp_path / "foreign.yaml").write_text(
        'base_model: {huggingface_id: a/b, use_auth_token: "${HF_TOKEN}"}\n'
    )
    done = trainkit(
        "config", "convert", "foreign.yaml", "-o", "ours.yaml", cwd=tmp_path, HF_TOKEN=secret
    )
    assert done.returncode == 0 and secret not in done.stdout + (tmp_path / "ours.yaml").read_text()


def test_old_names_lead_somewhere():
    "Each right-hand side of the lesson's table of old names can be imported, or is a command."
    notebook = json.loads((ROOT / "nbs" / "10_interop/08_class_names.ipynb").read_text())
    text = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    rows = re.findall(r"(?m)^\| (A\d+) \| (.*?) \| (.*?) \|", text)
    assert {f"A{i}" for i in range(1, 34)} <= {row[0] for row in rows}
    from typer.main import get_command

    from trainkit.cli import app

    commands = get_command(app).commands  # type: ignore
    for number, _, here in rows:
        names = re.findall(r"`([^`]+)`", here)
        assert names, number
        for name in names:
            if name.startswith("trainkit "):
                words, group = name.split()[1:], commands
                for word in words:
                    if word.startswith("-") or not isinstance(group, dict):
                        break
                    assert word in group, (number, name)
                    group = getattr(group[word], "commands", None)
            else:
                words = name.split(".")
                for n in range(len(words), 0, -1):  # the longest part of the name that is a module
                    try:
                        target = importlib.import_module(".".join(["trainkit", *words[:n]]))
                    except ModuleNotFoundError:
                        continue
                    break
                attribute = ".".join(words[n:])
                for part in attribute.split(".") if attribute else []:
                    target = (
                        getattr(target, part)
                        if hasattr(target, part)
                        else target.__dataclass_fields__[part]
                    )


def test_a_translated_word_is_reported_where_it_was_said():
    "Not in the module that read it, however deep in the config it stood."
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_config(TrainConfig, {"fp16": True})
        method_config({"fp16": True})
        method_config({"train": {"fp16": True}})
    assert [(w.filename, "name from another library" in str(w.message)) for w in warned] == [
        (__file__, True)
    ] * 3


def test_two_trackers_are_no_contradiction():
    for settings, trackers in (
        ({"use_wandb": True, "use_tensorboard": True}, ["wandb", "tensorboard"]),
        (
            {"report_to": "tensorboard", "use_wandb": True, "use_tensorboard": True},
            ["tensorboard", "wandb"],
        ),
    ):
        config, account = convert_config(
            {"model_name_or_path": "x", "finetuning_type": "lora", **settings}
        )
        assert sorted(config.report_to) == sorted(trackers) and "report_to" in next(
            r.becomes for r in account.rows if r.setting == "use_wandb"
        )
    with pytest.raises(ConfigError, match="contradicts"):
        convert_config({"model_name_or_path": "x", "report_to": "none", "use_wandb": True})
    with pytest.raises(ConfigError, match="contradicts"):
        convert_config(
            {
                "model_name_or_path": "x",
                "finetuning_type": "lora",
                "lora_target": ["q_proj"],
                "lora_target_modules": ["v_proj"],
            }
        )


# A script is read and never run: an expression is what its constants say, or it is not translated

KNOWN = {  # what an argument is, and what stands around it -> its value
    "an attribute of the object": (
        (
            "class P:\n"
            "  def __init__(self, output_dir='mine'):\n"
            "    self.output_dir = output_dir\n"
            "  def go(self): return TrainConfig(x=self.output_dir)"
        ),
        "mine",
    ),
    "the same, made with another value": (
        (
            "class P:\n"
            "  def __init__(self, output_dir='mine'):\n"
            "    self.output_dir = output_dir\n"
            "  def go(self): return TrainConfig(x=self.output_dir)\n"
            "P('yours').go()"
        ),
        "yours",
    ),
    "a constant of the class": (
        "class P:\n  FOLDER = 'a'\n  def go(self): return TrainConfig(x=self.FOLDER)",
        "a",
    ),
    "of another class": ("class P:\n  FOLDER = 'a'\nTrainConfig(x=P.FOLDER)", "a"),
    "of a class above": (
        "class P:\n  FOLDER = 'a'\nclass Q(P):\n  def go(self): return TrainConfig(x=self.FOLDER)",
        "a",
    ),
    "a field of a dataclass": (
        "@dataclass\nclass C:\n  lr: float = 1e-4\ncfg = C()\nTrainConfig(x=cfg.lr)",
        1e-4,
    ),
    "a field that a call sets": (
        "@dataclass\nclass C:\n  lr: float = 1e-4\ncfg = C(lr=3e-4)\nTrainConfig(x=cfg.lr)",
        3e-4,
    ),
    "a field that is set later": (
        "@dataclass\nclass C:\n  lr: float = 1e-4\ncfg = C()\ncfg.lr = 2e-4\nTrainConfig(x=cfg.lr)",
        2e-4,
    ),
    "a field with a factory": (
        (
            "@dataclass\n"
            "class C:\n"
            "  names: list = field(default_factory=lambda: ['a', 'b'])\n"
            "cfg = C()\n"
            "TrainConfig(x=cfg.names)"
        ),
        ["a", "b"],
    ),
    "a field of a field": (
        (
            "@dataclass\n"
            "class A:\n"
            "  r: int = 8\n"
            "@dataclass\n"
            "class C:\n"
            "  lora: A = field(default_factory=A)\n"
            "cfg = C()\n"
            "TrainConfig(x=cfg.lora.r)"
        ),
        8,
    ),
    "a parameter with a class": (
        "@dataclass\nclass C:\n  lr: float = 1e-4\ndef go(cfg: C): return TrainConfig(x=cfg.lr)",
        1e-4,
    ),
    "a name at the top": ("LR = 5e-5\ndef go(): return TrainConfig(x=LR)", 5e-5),
    "a name in the function": ("def go():\n  lr = 5e-5\n  return TrainConfig(x=lr)", 5e-5),
    "the default of a function": ("def go(lr=5e-5): return TrainConfig(x=lr)", 5e-5),
    "what the function is called with": (
        "def go(lr=5e-5): return TrainConfig(x=lr)\ngo(lr=1e-3)",
        1e-3,
    ),
    "an entry of a table": (
        "SIZES = {'small': {'rows': 4}}\nTrainConfig(x=SIZES['small']['rows'])",
        4,
    ),
    "an f-string": ("NAME = 'a'\nTrainConfig(x=f'runs/{NAME}-{3:02d}')", "runs/a-03"),
    "a sum": ("ROWS = 4\nTrainConfig(x=ROWS*2 + 1)", 9),
    "a path": ("ROOT = Path('runs')\nTrainConfig(x=str(ROOT/'a'))", "runs/a"),
    "a joined path": ("ROOT = 'runs'\nTrainConfig(x=os.path.join(ROOT, 'a'))", "runs/a"),
    "an option of the command line": (
        (
            "parser.add_argument('--lr', type=float, default=1e-5)\n"
            "args = parser.parse_args()\n"
            "TrainConfig(x=args.lr)"
        ),
        1e-5,
    ),
    "two names at once": ("a, b = 1, 2\nTrainConfig(x=b)", 2),
    "a dtype": ("import torch\nTrainConfig(x=torch.bfloat16)", "bfloat16"),
    "a choice with one answer": ("BIG = False\nTrainConfig(x=8 if BIG else 2)", 2),
    "the environment": ("TrainConfig(x=os.environ.get('LR', '1e-4'))", "${LR:-1e-4}"),
    "keywords from a table": ("MORE = dict(x=3)\nTrainConfig(**MORE)", 3),
}
UNKNOWN = {  # only a run would tell
    "set twice": "LR = 1e-4\nif fast(): LR = 1e-3\nTrainConfig(x=LR)",
    "a loop": "for LR in (1, 2): TrainConfig(x=LR)",
    "counted up": "N = 1\nN += 1\nTrainConfig(x=N)",
    "a call": "TrainConfig(x=steps())",
    "an attribute of a call": "TrainConfig(x=settings().lr)",
    "a name from elsewhere": "from settings import LR\nTrainConfig(x=LR)",
    "an attribute of it": "import settings\nTrainConfig(x=settings.lr)",
    "a parameter without a default": "def go(lr): return TrainConfig(x=lr)",
    "called with two values": "def go(lr): return TrainConfig(x=lr)\ngo(1)\ngo(2)",
    "called with a list": "def go(lr=1): return TrainConfig(x=lr)\ngo(*more)",
    "self, set by a parameter": (
        "class P:\n"
        "  def __init__(self, out): self.out = out\n"
        "  def go(self): return TrainConfig(x=self.out)"
    ),
    "an f-string": "TrainConfig(x=f'runs/{name()}')",
    "a subscript": "TrainConfig(x=table[key])",
    "a list that grows": "NAMES = ['a']\nNAMES.append('b')\nTrainConfig(x=NAMES)",
    "a table that is changed": "T = {'a': 1}\nT['a'] = 2\nTrainConfig(x=T['a'])",
    "a global": "LR = 1\ndef change():\n  global LR\n  LR = 2\nTrainConfig(x=LR)",
    "an option without a default": (
        "parser.add_argument('--lr')\nargs = parser.parse_args()\nTrainConfig(x=args.lr)"
    ),
    "set by name": (
        "@dataclass\n"
        "class C:\n"
        "  lr: float = 1\n"
        "cfg = C()\n"
        "for k, v in more: setattr(cfg, k, v)\n"
        "TrainConfig(x=cfg.lr)"
    ),
    "handed to somebody": "def go(lr=1): return TrainConfig(x=lr)\npool.submit(go, 2)",
    "handed over with keywords": "def go(lr=1): return TrainConfig(x=lr)\nrun(go, lr=2)",
    "a name of itself": "a = b\nb = a\nTrainConfig(x=a)",
    "a condition": "TrainConfig(x=True if cuda() else False)",
    "too large": "TrainConfig(x=9**9**9)",
    "what an heir makes of it": (
        "class P:\n"
        "  def __init__(self, out='a'): self.out = out\n"
        "  def go(self): return TrainConfig(x=self.out)\n"
        "class Q(P):\n"
        "  def __init__(self): super().__init__(folder())"
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_script_says_a_constant_in_many_ways(case):
    text, value = KNOWN[case]
    assert [s.value for s in read_python(text) if s.name == "TrainConfig.x"] == [value]


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_only_a_run_would_tell_is_no_literal(case):
    assert [type(s.value) for s in read_python(UNKNOWN[case]) if s.name == "TrainConfig.x"] == [
        Computed
    ], "never a wrong value, and never left out"


SCRIPTS = {  # A call in a script -> knobs that it must come to, and words that must be refused
    "GRPOConfig(beta=0.04, epsilon=0.1, epsilon_high=0.28, temperature=0.9, top_p=0.95, top_k=5, "
    "loss_type='dapo', scale_rewards=False, num_generations=4, num_iterations=2, seed=3, "
    "max_completion_length=64, learning_rate=1e-6, adam_epsilon=1e-7, min_p=0.1, delta=1.5, "
    "max_prompt_length=9, repetition_penalty=1.1, disable_dropout=True, vllm_mode='colocate')": (
        {
            "method": "grpo",
            "rl.beta": 0.04,
            "rl.epsilon": 0.1,
            "rl.epsilon_high": 0.28,
            "rl.temperature": 0.9,
            "rl.top_p": 0.95,
            "rl.top_k": 5,
            "rl.loss_type": "dapo",
            "rl.scale_rewards": "none",
            "rl.num_generations": 4,
            "rl.num_iterations": 2,
            "rl.max_completion_length": 64,
            "train.seed": 3,
            "optim.learning_rate": 1e-6,
            "optim.adam_epsilon": 1e-7,
            "dpo.beta": 0.1,
        },
        {"min_p", "delta", "max_prompt_length", "repetition_penalty"},
    ),
    "RLOOConfig(beta=0.05, epsilon=0.3, temperature=0.7, normalize_advantages=True)": (
        {"method": "rloo", "rl.beta": 0.05, "rl.epsilon": 0.3, "rl.temperature": 0.7},
        {"normalize_advantages"},
    ),
    "KTOConfig(beta=0.2, desirable_weight=1.5, max_length=64, disable_dropout=True)": (
        {
            "method": "dpo",
            "dpo.loss_type": ["kto"],
            "dpo.beta": 0.2,
            "dpo.desirable_weight": 1.5,
            "dpo.max_length": 64,
        },
        set(),
    ),
    "KTOConfig(loss_type='apo_zero_unpaired', undesirable_weight=2.0)": (
        {"method": "dpo", "dpo.loss_type": ["apo_zero"], "dpo.undesirable_weight": 2.0},
        set(),
    ),
    "DPOConfig(truncation_mode='keep_end', loss_type=['sigmoid', 'sft'])": (
        {"method": "dpo", "dpo.truncation": "prompt", "dpo.loss_type": ["sigmoid", "sft"]},
        set(),
    ),
    "DPOConfig(truncation_mode='keep_start')": ({"method": "dpo"}, {"truncation_mode"}),
    "RewardConfig(max_length=64)": ({"method": "reward", "data.max_length": 64}, set()),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script[:40])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_script_of_trl_keeps_its_method_and_the_sense_of_its_words(script, adapter, tmp_path):
    "`epsilon` is a bound on the ratio in GRPOConfig; and what an adapter learns stays in one."
    knobs, words = SCRIPTS[script]
    lora = "peft_config = LoraConfig(r=4)\n" if adapter else ""
    (tmp_path / "script.py").write_text(
        f"{lora}args = {script}\ntrainer = Trainer(model='tiny/base', args=args)\n"
    )
    config, account = convert_config(tmp_path / "script.py")
    assert {name: value_of(config, name) for name in knobs} == knobs
    assert {row.setting.rpartition(".")[2] for row in account.named("refused")} == words
    assert bool(config.use_lora) is adapter and (not adapter or config.lora.r == 4)


@pytest.mark.parametrize(
    "kind, method, use_lora", [("SFT", "lora", None), ("DPO", "dpo", True), ("GRPO", "grpo", True)]
)
def test_an_adapter_without_arguments_is_an_adapter(kind, method, use_lora, tmp_path):
    made = f"{kind}Trainer(model='tiny/base', args={kind}Config(), peft_config=LoraConfig())"
    (tmp_path / "script.py").write_text(f"trainer = {made}\n")
    config, _ = convert_config(tmp_path / "script.py")
    assert config.method == method and (use_lora is None or config.use_lora)
    (tmp_path / "script.py").write_text(f"trainer = {made.replace('LoraConfig()', 'None')}\n")
    assert not convert_config(tmp_path / "script.py")[0].use_lora


def test_a_word_at_the_top_goes_to_the_group_of_its_method():
    "In a file, and as flags; where nothing tells the method, a word with two meanings is refused."
    words = dict(beta=0.04, epsilon=0.1, temperature=0.7)
    for data in (
        dict(method="grpo", **words),
        dict(rl="grpo", trl=words),
        dict(method="grpo", rl=words),
    ):
        config = convert_config(dict(data, base_model="tiny/base"))[0]
        assert {k: getattr(config.rl, k) for k in words} == words, data
        assert (config.optim.adam_epsilon, config.dpo.beta) == (1e-8, 0.1)
    config = convert_config(dict(method="dpo", base_model="tiny/base", beta=0.3, epsilon=1e-6))[0]
    assert (config.dpo.beta, config.optim.adam_epsilon) == (0.3, 1e-6)
    for method, knob in (("grpo", "rl.epsilon"), ("sft", "optim.adam_epsilon")):
        assert f"{knob}=1e-5" in flag_changes([("method", method), ("epsilon", "1e-5")])[0]
    with pytest.raises(ValueError, match="optim.adam_epsilon or rl.epsilon"):
        flag_changes([("epsilon", "0.1")])


def test_what_a_script_computes_is_reported_with_its_place(tmp_path):
    (tmp_path / "train.py").write_text("""class Pipeline:
    def __init__(self, output_dir='mine', model_name='tiny/base'):
        self.output_dir, self.model_name = output_dir, model_name
    def go(self):
        model = AutoModelForCausalLM.from_pretrained(self.model_name)
        args = SFTConfig(output_dir=self.output_dir, learning_rate=rate(),
                         logging_steps=self.every, max_steps=3)
        return SFTTrainer(model=model, args=args, train_dataset=load_rows(), reward_funcs=mine)
""")
    done = call("config", "convert", "train.py", "-o", "ours.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert (
        ours["train"].items() >= {"output_dir": "mine", "max_steps": 3}.items()
        and ours["init_from"] == "tiny/base"
        and "learning_rate" not in ours["optim"]
    ), "what is computed is not left out: it has no default of TRL"
    rows = {row.setting: row for row in convert_config(tmp_path / "train.py")[1].rows}
    for name, line in (
        ("SFTConfig.learning_rate", 6),
        ("SFTConfig.logging_steps", 7),
        ("SFTTrainer.reward_funcs", 8),
        ("SFTTrainer.train_dataset", 8),
    ):
        assert (
            rows[name].verdict == "refused"
            and rows[name].line == line
            and f"train.py, line {line}" in rows[name].why
        ), rows[name]
    assert (
        "data.path" in rows["SFTTrainer.train_dataset"].why
        and rows["SFTTrainer.model"].verdict == rows["SFTTrainer.args"].verdict == "replaced"
    )


# One word that cannot be translated is reported, and the rest is converted


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ({"rope_scaling": "dynamic"}, {}),
        ({"rope_scaling": "linear", "learning_rate": 1e-3}, {"optim.learning_rate": 1e-3}),
        ({"learning_rate": "fast"}, {}),
        ({"num_train_epochs": "two", "lora_r": 4}, {"lora.r": 4}),
        ({"lr_scheduler_type": "zigzag"}, {}),
        ({"optim": "adamw_of_tomorrow"}, {}),
        ({"betas": 0.9}, {}),
        ({"betas": [0.9]}, {}),
        ({"val_size": "some"}, {}),
        ({"eval_percentage": "x"}, {}),
        ({"flash_attn": ["fa2"]}, {}),
        ({"report_to": 5}, {}),
        ({"datasets": [5, 6]}, {}),
        ({"datasets": [{"type": "alpaca"}]}, {}),
        ({"early_stopping": "yes"}, {}),
        ({"bf16": "maybe", "lora_alpha": 8}, {"lora.lora_alpha": 8}),
        ({"save_steps": -5}, {}),
        ({"lora_dropout": 7}, {}),
        ({"warmup_ratio": 2}, {}),
        ({"template": ["a"]}, {}),
        (
            {"gradient_accumulation_steps": 0, "per_device_train_batch_size": 2},
            {"train.per_device_train_batch_size": 2},
        ),
        ({"quantization_bit": 3}, {}),
        ({"deepspeed": {"zero_optimization": {"stage": 7}}}, {}),
        ({"deepspeed": "missing.json"}, {}),
        ({"loraplus_lr_ratio": "x"}, {}),
    ],
    ids=str,
)
def test_one_word_that_has_no_translation_is_reported_and_the_rest_is_converted(words, rest):
    config, account = convert_config(
        {
            "model_name_or_path": "x",
            "stage": "sft",
            "finetuning_type": "lora",
            "max_steps": 7,
            **words,
        },
        device="cpu",
    )
    assert (config.init_from, config.method, config.train.max_steps) == ("x", "lora", 7)
    assert {k: value_of(config, k) for k in rest} == rest
    refused = account.named("refused")
    assert [row.setting.split(".")[0] for row in refused] == [
        k
        for k in words
        if k not in ("learning_rate", "lora_r", "lora_alpha", "per_device_train_batch_size")
        or not rest
    ], account.rows
    assert all(len(row.why) > 8 and "Traceback" not in row.why for row in refused)


# A file that another library reads next to a config

HALVES = {
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": "auto"},
    },
}


def test_a_deepspeed_file_alone_becomes_the_knobs_that_it_names(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(HALVES))
    done = call("config", "convert", "ds.json", "-o", "ours.yaml", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "trainkit launch ours.yaml --processes 8 --strategy zero2" in done.stdout
    ), done.stderr
    assert "give method=" in done.stdout and "take bf16" in done.stdout
    ours = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert ours == {
        "train": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "max_grad_norm": 0.5,
            "mixed_precision": "bf16",
        },
        "optim": {"learning_rate": 5e-4, "adam_beta1": 0.9, "adam_beta2": 0.95},
    }
    assert (
        method_config(tmp_path / "ours.yaml", ["method=sft", "init_from=x"]).optim.learning_rate
        == 5e-4
    )
    for settings, command in (
        (
            {
                "zero_optimization": {"stage": 3},
                "train_batch_size": "auto",
                "fp16": {"enabled": "auto"},
            },
            "trainkit launch FILE --processes 2 --strategy zero3",
        ),
        ({"train_micro_batch_size_per_gpu": 2}, "trainkit train FILE"),
        ({**HALVES, "train_batch_size": 4}, "trainkit train FILE"),
    ):
        account = convert_config(settings)[1]
        assert (
            account.command == command
            or not command.endswith("zero3")
            or account.command.endswith("zero3")
        ), account
        assert "method" not in account.given and not any(
            "method = 2" in row.why for row in account.rows
        )
    offload = convert_config(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "Lamb"},
        }
    )[1]
    assert [
        ("offload_optimizer" in row.why) or ("Adam" in row.why) for row in offload.named("refused")
    ] == [True, True], "nothing is left out in silence"


@pytest.mark.parametrize("device", ["cpu", "nvme", "none"])
@pytest.mark.parametrize("alone", [True, False])
def test_states_in_main_memory_are_carried_where_one_process_trains(device, alone):
    "What DeepSpeed moves for several processes is its own; parameters are reported, as before."
    places = dict(offload_optimizer=dict(device=device), offload_param=dict(device=device))
    settings = dict(
        zero_optimization=dict(stage=3, **places),
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
        train_batch_size=4,
    )
    run = dict(deepspeed=settings, method="sft", model_name_or_path="tiny/base")
    config, account = convert_config(settings if alone else run)
    given = config.train.offload_optimizer if not alone else None
    carried = account.given.get("train", {}).get("offload_optimizer", False)
    assert carried is (device == "cpu") and given in (None, carried)
    [row] = [row for row in account.named("refused") if "nothing to shard" in row.why]
    assert "offload_param" in str(row.value)
    assert ("offload_optimizer" in str(row.value)) is (device != "cpu")


@pytest.mark.parametrize("where", ["inline", "a file", "use_amp"])
def test_fp16_with_zero_becomes_bf16_and_says_so(where, tmp_path):
    "As a trainer from scratch has it; the loop refuses the two together."
    (tmp_path / "ds.json").write_text(json.dumps(HALVES))
    settings = {
        "model_name_or_path": "x",
        "num_gpus": 8,
        "max_steps": 3,
        **{
            "inline": {"deepspeed": HALVES},
            "a file": {"deepspeed_config": str(tmp_path / "ds.json"), "fp16": True},
            "use_amp": {
                "use_amp": True,
                "amp_dtype": "float16",
                "use_deepspeed": True,
                "deepspeed_config": {"zero_stage": 2},
            },
        }[where],
    }
    config, account = convert_config(settings)
    assert (
        config.train.mixed_precision == "bf16"
        and config.train.max_steps == 3
        and account.command == "trainkit launch FILE --processes 8 --strategy zero2"
    )
    assert any(
        "bf16" in row.why or "bf16" in row.becomes
        for row in account.rows
        if row.verdict == "replaced"
    ) and not account.named("refused")
    for stage in (1, 2, 3):
        assert convert_config(
            {"num_gpus": 2, "use_deepspeed": True, "deepspeed_config": {"zero_stage": stage}}
        )[1].command.endswith(f"zero{stage}")
    if where == "a file":
        from trainkit.recipes.launcher import translate_launch

        for own in ({}, {"fp16": True}, {"train": {"mixed_precision": "fp16"}}):
            with pytest.warns(
                UserWarning,
                match=(
                    "fp16 in the DeepSpeed file: zero2 is not combined with it here, "
                    "and bf16 takes its place"
                ),
            ):
                plan, rest = translate_launch(
                    {"deepspeed_config": str(tmp_path / "ds.json"), "num_gpus": 8, **own}
                )
            assert (
                plan.strategy == "zero2"
                and "fp16" not in rest
                and rest["train"]["mixed_precision"] == "bf16"
            )
        (tmp_path / "bf16.json").write_text(
            json.dumps({**HALVES, "fp16": {}, "bf16": {"enabled": True}})
        )
        with pytest.raises(ConfigError, match="contradicts"):
            translate_launch(
                {
                    "deepspeed_config": str(tmp_path / "bf16.json"),
                    "num_gpus": 8,
                    "train": {"mixed_precision": "fp16"},
                }
            )


@pytest.mark.parametrize(
    "words", [["l.yaml"], ["l.yaml", "deepspeed_config=0"], ["own.yaml", "--strategy", "zero2"]]
)
def test_launch_takes_bf16_for_fp16_with_zero(words, tmp_path, recwarn):
    "As `config convert` does, and says so."
    (tmp_path / "ds.json").write_text(json.dumps(HALVES))
    (tmp_path / "rows.jsonl").touch()
    run = {"method": "sft", "init_from": "x", "data": {"path": "rows.jsonl"}}
    (tmp_path / "l.yaml").write_text(yaml.safe_dump({**run, "deepspeed_config": "ds.json"}))
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({**run, "train": {"mixed_precision": "fp16"}})
    )
    if len(words) == 2:
        words = ["l.yaml", "train.mixed_precision=fp16"]
    done = call("launch", *words, "--processes", "8", "--dry-run", cwd=tmp_path)
    messages = done.stderr + "".join(str(warning.message) for warning in recwarn)
    assert done.returncode == 0 and "bf16 takes its place" in messages, messages
    assert "mixed_precision: bf16" in done.stdout and "mixed_precision: fp16" not in done.stdout, (
        done.stdout
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64},
            "config of a model.*init_from",
        ),
        ({"tokenizer_class": "X", "model_max_length": 5}, "config of a tokenizer"),
        ({"log_history": [], "global_step": 3}, "log of a run"),
        ({"metadata": {}, "weight_map": {"a": "b"}}, "list of a model's files"),
        ({"mine": {"file_name": "a.json"}}, "list of data sets"),
    ],
)
def test_a_file_that_describes_no_run_is_named(data, says, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says):
        convert_config(tmp_path / "x.json")


def test_a_file_of_accelerate_is_a_launch():
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none"},
        "num_processes": 4,
        "num_machines": 1,
        "mixed_precision": "bf16",
        "use_cpu": False,
    }
    config, account = convert_config(settings)
    assert (
        account.command == "trainkit launch FILE --processes 4 --strategy zero3"
        and config.train.mixed_precision == "bf16"
    )
    assert (
        convert_config({**settings, "distributed_type": "FSDP", "deepspeed_config": None})[
            1
        ].command
        == "trainkit launch FILE --processes 4 --strategy fsdp"
    )
    assert (
        convert_config({**settings, "distributed_type": "MULTI_GPU", "deepspeed_config": None})[
            1
        ].command
        == "trainkit launch FILE --processes 4 --strategy ddp"
    )


# There and back: our run in LLaMA-Factory's words, and its words as our run

TRIPS = [
    ("pretrain", {}),
    ("sft", {"sft": {"packing": "best_fit", "train_on": "last", "template": "chatml"}}),
    ("sft", {"sft": {"train_on": "all", "template": "llama3"}}),
    ("sft", {"sft": {"template": "plain"}}),
    ("freeze", {"sft": {"trainable_layers": 3}}),
    (
        "lora",
        {
            "lora": {
                "r": 4,
                "use_dora": True,
                "modules_to_save": ["norm", "head"],
                "init_lora_weights": "pissa",
                "target_modules": ["q_proj", "v_proj"],
            },
            "optim": {"lr_factors": {"lora_B": 16.0}},
        },
    ),
    ("lora", {"lora": {"use_rslora": True, "lora_dropout": 0.2}}),
    (
        "lora",
        {"optim": {"optim": "muon", "min_lr_ratio": 0.1, "weight_decay": 0.3, "adam_beta1": 0.8}},
    ),
    ("qlora", {"quant": {"quant_type": "fp4", "double_quant": False}}),
    ("lora", {"quant": {"bits": 8}, "model": {"gradient_checkpointing": True}}),
    (
        "dpo",
        {
            "dpo": {
                "loss_type": ["sigmoid", "sft"],
                "loss_weights": [1.0, 0.3],
                "ld_alpha": 0.5,
                "label_smoothing": 0.1,
                "beta": 0.4,
            }
        },
    ),
    ("dpo", {"dpo": {"loss_type": ["simpo"], "simpo_gamma": 1.5}, "use_lora": True}),
    ("dpo", {"dpo": {"loss_type": ["hinge"]}}),
    (
        "dpo",
        {
            "dpo": {"loss_type": ["kto"], "desirable_weight": 1.5, "undesirable_weight": 0.5},
            "use_lora": True,
        },
    ),
    ("dpo", {"dpo": {"loss_type": ["orpo"]}, "use_lora": True, "quant": {"bits": 4}}),
    ("reward", {}),
    ("reward", {"use_lora": True}),
    (
        "ppo",
        {
            "rl": {
                "rewards": ["judge"],
                "whiten_rewards": True,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "max_completion_length": 33,
            }
        },
    ),
]


@pytest.mark.parametrize(
    "loop",
    [
        {
            "mixed_precision": "no",
            "max_steps": 9,
            "early_stopping_patience": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_total_limit": 4,
        },
        {
            "mixed_precision": "bf16",
            "num_train_epochs": 2.0,
            "max_steps": -1,
            "per_device_train_batch_size": 3,
            "seed": 9,
        },
    ],
    ids=["steps", "epochs"],
)
@pytest.mark.parametrize(("method", "groups"), TRIPS, ids=str)
def test_a_run_in_the_words_of_llamafactory_is_the_same_run(method, groups, loop):
    from trainkit.config import to_dict
    from trainkit.interop.llamafactory import llamafactory_arguments
    from trainkit.train.optim import warmup_steps

    config = method_config(
        {
            "method": method,
            "init_from": "base",
            "data": {"max_length": 333} if method != "pretrain" else {"max_length": 100},
            **groups,
            # There a prompt has no limit of its own
            **(
                {"dpo": {"max_prompt_length": None, **groups.get("dpo", {})}}
                if method in ("dpo", "reward")
                else {}
            ),
            "train": loop,
            "report_to": ["wandb"],
        }
    )
    arguments = llamafactory_arguments(config, 100, ("train", "eval"))
    back, account = convert_config(arguments, device="cpu")
    assert not account.named("refused"), account.named("refused")
    ours, theirs = to_dict(config), to_dict(back)
    differ = {
        f"{k}.{name}"
        for k in ours
        if isinstance(ours[k], dict)
        for name in ours[k]
        if ours[k][name] != theirs[k][name]
    } | {k for k in ours if not isinstance(ours[k], dict) and ours[k] != theirs[k]}
    names = {"data.path", "data.eval_file"}  # of the data sets, in dataset_info.json
    same = {
        "optim.optim": {config.optim.optim, back.optim.optim}
        == {"adamw_torch_fused", "adamw_torch"},
        "lora.target_modules": config.lora.target_modules is None
        and back.lora.target_modules == "all-linear",
        "optim.warmup_steps": warmup_steps(config.optim, 9 if loop["max_steps"] > 0 else 26)
        == back.optim.warmup_steps
        or method in ("reward", "dpo", "ppo", "pretrain")
        or loop["max_steps"] < 0,
        "method": (method, back.method) == ("qlora", "lora") and back.quant.bits == 4,
        "data.eval_fraction": "eval_dataset" not in arguments,  # Then all rows train there
    }
    assert {k for k in differ - names if not same.get(k)} == set(), {
        k: (value_of(config, k), value_of(back, k)) for k in differ - names
    }
    assert llamafactory_arguments(
        back, 100, (arguments["dataset"], arguments.get("eval_dataset", "eval"))
    ) == {**arguments, "optim": arguments["optim"]}, "and a second time"


@pytest.mark.parametrize("own", [False, True])
def test_a_base_model_without_a_chat_format_is_exported_with_the_one_that_it_gets_here(
    own, tmp_path
):
    "LLaMA-Factory would tune it without any, and our run in chatml."
    from transformers import PreTrainedTokenizerFast

    from trainkit.tokenizer.chat import set_template
    from trainkit.interop.hf import save_pretrained
    from trainkit.interop.llamafactory import llamafactory_arguments
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.train(
        ["one two three four five six seven"] * 9,
        270,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    if own:
        set_template(tokenizer, "chatml")
    save_pretrained(
        Transformer(
            ModelConfig(
                vocab_size=tokenizer.vocab_size,
                d_model=32,
                n_heads=2,
                n_layers=1,
                d_ff=32,
                max_seq_len=64,
            )
        ),
        tokenizer,
        tmp_path / "base",
    )
    assert bool(PreTrainedTokenizerFast.from_pretrained(tmp_path / "base").chat_template) is own
    for method, options in (
        ("sft", True),
        ("lora", True),
        ("freeze", True),
        ("dpo", False),
        ("reward", False),
        ("ppo", False),
        ("pretrain", False),
    ):
        config = method_config(
            {
                "method": method,
                "init_from": str(tmp_path / "base"),
                **({"rl": {"rewards": ["judge"]}} if method == "ppo" else {}),
            }
        )
        assert llamafactory_arguments(config, 100).get("template") == (
            "chatml" if options and not own else None
        ), method
    config = method_config(
        {"method": "sft", "init_from": str(tmp_path / "base"), "sft": {"template": "llama3"}}
    )
    assert llamafactory_arguments(config, 100)["template"] == "llama3"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"environment": "calculator"}, "single answers and no environments"),
        ({"thinking_budget": 0}, "rl.thinking_budget = 0.*no such setting"),
        ({"batch_invariant": True}, "rl.batch_invariant"),
        ({"sampler_weights": "int8"}, "rl.sampler_weights"),
        ({"mask_truncated_completions": True}, "rl.mask_truncated_completions"),
        ({"gamma": 0.9}, "rl.gamma = 0.9"),
        ({"rewards": ["a", "b"]}, "one reward model"),
    ],
)
def test_what_ppo_of_llamafactory_cannot_do_is_refused(changes, message):
    from trainkit.interop.llamafactory import llamafactory_arguments

    base = {"method": "ppo", "init_from": "/no/such/model"}
    llamafactory_arguments(method_config({**base, "rl": {"rewards": ["judge"]}}), 100)
    config = method_config({**base, "rl": {"rewards": ["judge"], **changes}})
    with pytest.raises(ValueError, match=message):
        llamafactory_arguments(config, 100)


def test_thoughts_and_tools_of_a_chat_are_not_lost_in_llamafactory():
    "A thought comes between tags, where its templates look for it; what it lacks is refused."
    from trainkit.interop.llamafactory import llamafactory_arguments, stage_rows

    answer = dict(role="assistant", content="4", reasoning_content="two and two")
    rows = [dict(messages=[dict(role="user", content="2 + 2?"), answer])]
    for kept, text in ((True, "<think>\ntwo and two\n</think>\n\n4"), (False, "4")):
        assert stage_rows("sft", rows, kept)[0]["messages"][1]["content"] == text
    answer["tool_calls"] = [dict(function=dict(name="add", arguments={}))]
    with pytest.raises(ValueError, match="row 0 calls a tool"):
        stage_rows("sft", rows)
    words = {"method": "sft", "init_from": "/no/such/model", "sft": {"reasoning": "read"}}
    with pytest.raises(ValueError, match="sft.reasoning = read"):
        llamafactory_arguments(method_config(words), 100)


def test_a_script_of_sft_with_a_computed_model_is_still_sft(tmp_path):
    "What cannot be read is refused with what to give; the method follows from the trainer."
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "args = SFTConfig(output_dir='out', learning_rate=2e-5)\n"
        "SFTTrainer(model=model, args=args, train_dataset=load(sys.argv[2])).train()\n"
    )
    config, account = convert_config(tmp_path / "train.py")
    assert (config.method, config.optim.learning_rate) == ("sft", 2e-5)
    (row,) = [v for v in account.rows if v.setting == "method"]
    assert "give the model to start from" in row.why


@pytest.mark.parametrize(
    "source, becomes",
    [
        ("'json', data_files='a.jsonl', split='train'", {"path": "a.jsonl"}),
        ("'csv', data_files=['a.csv']", {"path": "a.csv"}),
        (
            "'json', data_files={'train': 'a.jsonl', 'test': ['b.jsonl']}",
            {"path": "a.jsonl", "eval_file": "b.jsonl"},
        ),
        ("'a/b', data_files=['a.jsonl', 'b.jsonl']", {"path": "a/b"}),
        (
            "'json', data_files=['a.jsonl', 'b.jsonl']",
            {"path": "auto", "datasets": ["a.jsonl", "b.jsonl"]},
        ),
    ],
)
def test_files_that_a_script_gives_to_load_dataset(source, becomes, tmp_path):
    "'json' is the name of a reader there, not of a dataset."
    script = tmp_path / "train.py"
    script.write_text(
        f"rows = load_dataset({source})\n"
        "SFTTrainer('model', train_dataset=rows, args=SFTConfig(learning_rate=1e-4)).train()\n"
    )
    config, account = convert_config(script)
    given = config.data.path, config.data.eval_file, config.data.datasets
    assert given == (
        becomes["path"],
        becomes.get("eval_file", ""),
        becomes.get("datasets", []),
    )
    refused = [row.setting for row in account.rows if row.verdict == "refused"]
    assert refused == ["load_dataset.data_files"] * ("/" in source)


def test_files_named_where_a_trainer_takes_rows(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "SFTTrainer('model', train_dataset='a.jsonl', eval_dataset='b.jsonl',"
        " args=SFTConfig(learning_rate=1e-4)).train()\n"
    )
    data = convert_config(script)[0].data
    assert (data.path, data.eval_file) == ("a.jsonl", "b.jsonl")


THINKS = "right_format('<think>(?!.*<think>).*?</think>.*')"
LLAMA_FACTORY = dict(model_name_or_path="m", dataset_name="d.jsonl", finetuning_type="full")
AXOLOTL = dict(base_model="m", rl="dpo")


@pytest.mark.parametrize(
    ("file", "values", "refused"),
    [
        (  # The names of GRPO alone say the method
            dict(model_name_or_path="m", dataset_name="d.jsonl", num_generations=8, beta=0.04),
            {"method": "grpo", "rl.num_generations": 8, "rl.beta": 0.04},
            [],
        ),
        (
            dict(model_name_or_path="m", dataset_name="d", reward_funcs=["think_format_reward"]),
            {"method": "grpo", "rl.rewards": [THINKS]},
            [],
        ),
        (
            LLAMA_FACTORY | dict(stage="kto", pref_ftx=0.3, pref_beta=0.2),
            {"dpo.loss_type": ["kto"], "dpo.beta": 0.2},
            ["pref_ftx"],
        ),
        (
            LLAMA_FACTORY | dict(stage="dpo", pref_loss="orpo", pref_ftx=0.1, cutoff_len=4096),
            {
                "dpo.loss_weights": [1.0, 1.1],
                "dpo.max_length": 4096,
                "dpo.max_prompt_length": None,
            },
            [],
        ),
        (
            LLAMA_FACTORY | dict(stage="sft", cutoff_len=4096),
            {"dpo.max_prompt_length": 512, "data.max_length": 4096},
            [],
        ),
        (
            AXOLOTL | dict(datasets=[dict(path="x.jsonl", type="chat_template.argilla")]),
            {"data.kind": None, "data.columns": {}, "data.path": "x.jsonl"},
            [],
        ),
        (
            AXOLOTL
            | dict(
                datasets=[
                    dict(
                        path="x.jsonl",
                        type="chat_template.default",
                        field_messages="talk",
                        field_chosen="good",
                        field_rejected="rejected",
                    )
                ]
            ),
            {"data.kind": None, "data.columns": {"prompt": "talk", "chosen": "good"}},
            [],
        ),
    ],
)
def test_preferences_and_rewards_keep_their_meaning(file, values, refused):
    config, account = convert_config(file, device="cpu")
    assert {path: value_of(config, path) for path in values} == values
    assert [row.setting for row in account.rows if row.verdict == "refused"] == refused


def trl_script(trainer, given="", config=None):
    "A script that makes a trainer of TRL and the config of its name."
    kind = trainer.removesuffix("Trainer")
    more = {"GRPO": ", reward_funcs='accuracy_reward'", "RLOO": ", reward_funcs='accuracy_reward'"}
    more["GKD"] = ", teacher_model='m/teacher'"
    return (
        "rows = load_dataset('json', data_files='rows.jsonl', split='train')\n"
        f"args = {config or kind + 'Config'}({given})\n"
        f"{trainer}(model='m/base', args=args, train_dataset=rows{more.get(kind, '')}).train()\n"
    )


def converted(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    return convert_config(tmp_path / "script.py", device="cpu")


TRL_TRAINERS = ["SFT", "DPO", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "GKD"]
ELSEWHERE = {  # Fields that a config of TRL computes, or that say nothing about what is learned
    *("output_dir", "bf16", "fp16", "report_to", "run_name", "logging_dir", "hub_token"),
    *("eval_strategy", "optim", "push_to_hub", "project", "eval_steps", "save_total_limit"),
    *("logging_steps", "disable_tqdm", "log_level", "lr_scheduler_kwargs", "trust_remote_code"),
    *("remove_unused_columns", "dataset_text_field"),
}


def trl_defaults(kind):
    "The fields of a config class of TRL with a plain default."
    import dataclasses

    trl = pytest.importorskip("trl")
    module = trl
    if not hasattr(trl, f"{kind}Config"):
        module = importlib.import_module(f"trl.experimental.{kind.lower()}")
    for field in dataclasses.fields(getattr(module, f"{kind}Config")):
        if isinstance(field.default, (bool, int, float, str)) and field.name not in ELSEWHERE:
            yield field.name, getattr(field.default, "value", field.default)


@pytest.mark.parametrize("kind", TRL_TRAINERS)
def test_what_a_script_of_trl_leaves_out_is_as_if_it_said_it(kind, tmp_path, monkeypatch):
    "Fails when a default of TRL's classes changes, or one of ours."
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    unread = {"seed", "truncation_mode"} if kind == "GKD" else set()  # Has its own seed here
    fields = [(name, value) for name, value in trl_defaults(kind) if name not in unread]
    said = ", ".join(f"{name}={value!r}" for name, value in fields)
    silent, account = converted(tmp_path, trl_script(f"{kind}Trainer"))
    spoken, _ = converted(tmp_path, trl_script(f"{kind}Trainer", said))
    differ = {
        (group.name, k.name): (k.value, getattr(getattr(spoken, group.name), k.name))
        for group in knobs(silent)
        for k in (knobs(group.value) if hasattr(group.value, "__dataclass_fields__") else ())
        if k.value != getattr(getattr(spoken, group.name), k.name)
    }
    assert not differ and silent == spoken
    defaults = [row.becomes for row in account.named("default")]
    assert {"train.num_train_epochs = 3.0", "data.eval_fraction = 0.0"} <= {*defaults}
    assert all("is the default of TRL" in row.why for row in account.named("default"))


@pytest.mark.parametrize(
    ("trainer", "given", "values", "refused"),
    [
        ("SFTTrainer", "loss_type='nll'", {"method": "sft"}, []),
        ("SFTTrainer", "loss_type='dft'", {"method": "sft"}, ["SFTConfig.loss_type"]),
        ("SFTTrainer", "completion_only_loss=True", {"sft.train_on": "assistant"}, []),
        ("SFTTrainer", "assistant_only_loss=True", {"sft.train_on": "assistant"}, []),
        ("SFTTrainer", "assistant_only_loss=False", {"sft.train_on": "all"}, []),
        ("CPOTrainer", "", {"dpo.loss_type": ["cpo"], "dpo.sft_weight": 1.0}, []),
        ("CPOTrainer", "cpo_alpha=0.5", {"dpo.loss_type": ["cpo"], "dpo.sft_weight": 0.5}, []),
        ("CPOTrainer", "alpha=0.3", {"dpo.loss_type": ["cpo"]}, ["CPOConfig.alpha"]),
        (
            "CPOTrainer",
            "loss_type='simpo', cpo_alpha=0.0, simpo_gamma=1.0",
            {"dpo.loss_type": ["simpo"], "dpo.simpo_gamma": 1.0},
            [],
        ),
        (
            "CPOTrainer",
            "loss_type='simpo', cpo_alpha=0.25",
            {"dpo.loss_type": ["simpo", "sft"], "dpo.loss_weights": [1.0, 0.25]},
            [],
        ),
        ("GRPOTrainer", "", {"rl.num_prompts": 1, "rl.loss_type": "dapo"}, []),
        (
            "GRPOTrainer",
            "per_device_train_batch_size=8, gradient_accumulation_steps=4",
            {"rl.num_prompts": 4, "rl.num_generations": 8},
            [],
        ),
        ("GRPOTrainer", "generation_batch_size=64", {"rl.num_prompts": 8}, []),
        (
            "GRPOTrainer",
            "steps_per_generation=6, num_generations=4",
            {"rl.num_prompts": 12},
            [],
        ),
        ("RLOOTrainer", "", {"rl.num_prompts": 4, "rl.num_generations": 2}, []),
        ("DPOTrainer", "max_steps=5, warmup_steps=2", {"optim.warmup_steps": 2}, []),
    ],
)
def test_a_class_of_trl_says_what_its_words_mean(trainer, given, values, refused, tmp_path):
    config, account = converted(tmp_path, trl_script(trainer, given))
    assert {knob: value_of(config, knob) for knob in values} == values
    assert [row.setting for row in account.named("refused")] == refused


def test_rows_with_a_completion_are_learned_as_trl_learns_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for row, learned in (
        ({"messages": [{"role": "user", "content": "a"}]}, "all"),
        ({"prompt": "a", "completion": "b"}, "assistant"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        assert converted(tmp_path, trl_script("SFTTrainer"))[0].sft.train_on == learned


def test_an_adapter_of_a_script_has_the_defaults_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    theirs = peft.LoraConfig()
    text = "peft_config = LoraConfig(r=4)\n" + trl_script("SFTTrainer").replace(
        "args=args", "args=args, peft_config=peft_config"
    )
    config = converted(tmp_path, text)[0]
    assert (config.method, config.lora.r) == ("lora", 4)
    assert config.lora.lora_alpha == theirs.lora_alpha
    assert (config.lora.target_modules, config.lora.lora_dropout) == ("conservative", 0.0)
    assert theirs.target_modules is None and theirs.lora_dropout == 0.0
    assert config.optim.learning_rate == 2e-5, "that of SFTConfig"


def test_rows_to_evaluate_on_leave_ours_for_it(tmp_path):
    script = trl_script("DPOTrainer").replace(
        "train_dataset=rows", "train_dataset=a, eval_dataset=b"
    )
    assert converted(tmp_path, script)[0].data.eval_fraction == 0.1
    for words, share in (({}, 0.0), ({"val_size": 0.2}, 0.2), ({"eval_dataset": "b.jsonl"}, 0.1)):
        config = convert_config({**LLAMA_FACTORY, "stage": "sft", **words})[0]
        assert config.data.eval_fraction == share
    assert convert_config({"base_model": "m", "val_set_size": 0})[0].data.eval_fraction == 0.0


def test_orpo_of_trl_says_how_it_differs(tmp_path):
    _, account = converted(tmp_path, trl_script("ORPOTrainer"))
    (row,) = [row for row in account.rows if row.setting == "method"]
    assert "TRL learns the chosen prompt and its answer" in row.why


@pytest.mark.parametrize(
    ("dataset", "knobs", "refused"),
    [
        (
            dict(type="chat_template", field_messages="talk", roles_to_train=["assistant"]),
            {"data.kind": "messages", "data.columns": {"messages": "talk"}},
            [],
        ),
        (
            dict(type="chat_template", roles_to_train=["user", "assistant"], train_on_eos="all"),
            {"sft.train_on": "all"},
            ["datasets.train_on_eos"],
        ),
        (
            dict(
                type="chat_template",
                chat_template="chatml",
                message_property_mappings=dict(role="from", content="value"),
                roles=dict(user=["human"], assistant=["gpt"]),
                shards=10,
            ),
            {"sft.template": "chatml"},
            ["datasets.shards"],
        ),
        (
            dict(type="chat_template", message_property_mappings=dict(role="who", content="txt")),
            {},
            ["datasets.message_property_mappings"],
        ),
        (
            dict(
                type=dict(
                    field_instruction="q",
                    field_output="a",
                    format="[INST] {instruction} [/INST]",
                    no_input_format="[INST] {instruction} [/INST]",
                    system_prompt="Be terse",
                )
            ),
            {"data.kind": "instruction", "data.columns": {"instruction": "q", "output": "a"}},
            ["datasets.format", "datasets.no_input_format", "datasets.system_prompt"],
        ),
        (dict(type="input_output"), {"data.kind": None}, ["datasets.type"]),
    ],
)
def test_no_key_of_a_data_set_of_axolotl_is_dropped(dataset, knobs, refused):
    file = {"base_model": "m", "datasets": [{"path": "x.jsonl", **dataset}]}
    config, account = convert_config(file)
    assert {knob: value_of(config, knob) for knob in knobs} == knobs
    assert [row.setting for row in account.named("refused")] == refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (dict(adapter_name_or_path="a", export_dir="out", export_size=5), "trainkit merge m a out"),
        (dict(export_dir="out"), "trainkit export hf m out"),
        (dict(infer_backend="huggingface"), "trainkit chat --model m"),
        (dict(adapter_name_or_path="a", infer_backend="vllm"), "trainkit chat --model a"),
    ],
)
def test_a_config_that_trains_nothing_is_answered_with_its_command(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert_config({"model_name_or_path": "m", "template": "llama3", **words})


@pytest.mark.parametrize(
    ("words", "knobs", "refused"),
    [
        (dict(export_size=2, default_system="x"), {}, ["export_size", "default_system"]),
        (dict(gradient_checkpointing_kwargs={"use_reentrant": False}), {}, []),
        (
            dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}),
            {"optim.power": 2.0},
            [],
        ),
        (
            dict(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}),
            {"optim.num_cycles": 3},
            [],
        ),
        (dict(report_to="all"), {"report_to": ["all"]}, []),
        (dict(report_to="mlflow"), {"report_to": []}, ["report_to"]),
        (dict(report_to=["wandb", "mlflow"]), {"report_to": ["wandb"]}, []),
        (dict(metric_for_best_model="accuracy"), {}, ["metric_for_best_model"]),
        (dict(metric_for_best_model="eval_loss"), {}, []),
        (dict(init_lora_weights="loftq"), {"lora.init_lora_weights": True}, ["init_lora_weights"]),
        (dict(auto_find_batch_size=True), {"train.on_oom": "retry"}, []),
        (dict(template="gemma3"), {"sft.template": "gemma"}, []),
        (dict(chat_template="qwen_25"), {"sft.template": "qwen"}, []),
        (dict(chat_template="tokenizer_default_fallback_chatml"), {"sft.template": ""}, []),
        (dict(template="glm4"), {}, ["template"]),
        (dict(optim="paged_adamw_32bit"), {"optim.optim": "adamw_torch"}, []),
        (dict(optimizer="lion_8bit"), {"optim.optim": "lion"}, []),
        (dict(optim="adamw_torch_8bit"), {"optim.optim": "adamw_8bit"}, []),
        (dict(optim="adamw_apex_fused"), {"optim.optim": "adamw_torch_fused"}, []),
        (dict(optim="adafactor"), {"optim.optim": "adafactor"}, []),
        (dict(optim="rmsprop"), {}, ["optim"]),
        (dict(neftune_noise_alpha=5), {"train.neftune_noise_alpha": 5.0}, []),
    ],
)
def test_words_are_refused_for_a_reason_only(words, knobs, refused):
    config, account = convert_config({"method": "lora", "model_name_or_path": "m", **words})
    assert {knob: value_of(config, knob) for knob in knobs} == knobs
    assert [row.setting for row in account.named("refused")] == refused
    for row in account.rows:
        if row.becomes == "optim.optim = lion":
            assert row.why.startswith("read as lion")


def test_pre_training_with_an_adapter():
    words = dict(stage="pt", finetuning_type="lora", lora_rank=4, dataset="rows.txt")
    config, account = convert_config({"model_name_or_path": "m", **words})
    assert (config.method, config.adapts, config.lora.r) == ("pretrain", True, 4)
    assert config.lora.lora_alpha == 8 and not account.named("refused")
    config, account = convert_config(
        {"model_name_or_path": "m", **words, "finetuning_type": "freeze"}
    )
    assert (config.method, config.adapts) == ("pretrain", False)
    assert [row.setting for row in account.named("refused")] == ["finetuning_type"]


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo", "kto", "rm"])
def test_llama_factory_trains_an_adapter_where_nothing_is_said(stage):
    "finetuning_type is lora there, and lora_alpha twice the rank, whatever is learned."
    words = dict(stage=stage, do_train=True, model_name_or_path="m", dataset="rows", lora_rank=16)
    config, account = convert_config(words)
    assert config.adapts and (config.lora.r, config.lora.lora_alpha) == (16, 32)
    assert any("finetuning_type" in row.why for row in account.rows)
    config, _ = convert_config({**words, "finetuning_type": "full"})
    assert not config.adapts


@pytest.mark.parametrize(
    "words",
    [
        dict(
            stage="dpo",
            finetuning_type="lora",
            model_name_or_path="m",
            adapter_name_or_path="saves/sft",
        ),
        dict(base_model="m", lora_model_dir="saves/sft", adapter="lora", rl="dpo"),
    ],
)
def test_an_adapter_to_train_further_is_the_start_of_the_run(words):
    config, account = convert_config(words | dict(dataset="pairs.jsonl"))
    assert (config.init_from, config.adapts) == ("saves/sft", True)
    assert not account.named("refused")
    for more in (dict(create_new_adapter=True), dict(adapter_name_or_path="a,b")):
        _, account = convert_config(words | dict(dataset="pairs.jsonl") | more)
        assert any("trainkit merge BASE ADAPTER" in row.why for row in account.named("refused"))


def test_the_trackers_of_the_converter_are_those_of_a_run():
    from trainkit.recipes import foreign_words
    from trainkit.train.loggers import TRACKERS

    assert {*foreign_words._TRACKERS} == {"all", *TRACKERS}


@pytest.mark.parametrize(
    ("word", "value", "answer"),
    [
        ("cutoff_len", 512, "here it is data.max_length: 512"),
        ("deepspeed", "ds.json", "trainkit launch FILE"),
        ("interleave_probs", "0.5,0.5", "weights stand in data.datasets"),
        ("val_size", 0.2, "here it is data.eval_fraction: 0.2"),
        ("fsdp", "full_shard", "trainkit launch FILE"),
        ("label_smoothing_factor", 0.1, "has no equivalent here"),
        ("plot_loss", True, "leave it out"),
    ],
)
def test_a_word_of_another_library_in_a_file_is_explained(word, value, answer):
    with pytest.raises(ConfigError) as error:
        method_config({"method": "sft", "init_from": "m", word: value})
    assert answer in str(error.value) and "trainkit config convert FILE" in str(error.value)
    assert "Did you mean" not in str(error.value)


def test_words_whose_meaning_depends_on_their_value_or_neighbours():
    assert "Did you mean 'learning_rate'" in look_up("lerning_rate", 1)
    packed = look_up("packing", True, (), {"packing_strategy": "bfd"})
    assert isinstance(packed, Implied)
    hub = look_up("name", "a", ("base_model",), {"huggingface_id": "b"})
    assert isinstance(hub, Implied) and isinstance(look_up("max_grad_norm", None), Implied)
    assert isinstance(look_up("use_auth_token", "x"), Implied)
    assert isinstance(look_up("trust_remote_code", True), Refused)
    assert isinstance(look_up("trust_remote_code", False), Implied)
    names = ["q_proj", "output_proj"]
    layers = look_up("lora_attn_modules", names, ("model",), {"apply_lora_to_mlp": True})
    projections = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert layers == {"lora.target_modules": projections}
    for word, value, meaning in (
        ("packing", True, {"sft.packing": "best_fit"}),
        ("packed", False, {"sft.packing": "none"}),
        ("bf16", "auto", {"train.mixed_precision": "auto"}),
        ("clip_grad_norm", None, {"train.max_grad_norm": 0.0}),
        ("optim", "adamw", {"optim.optim": "adamw"}),
        ("num_epochs", 3, {"train.num_train_epochs": 3}),
        ("loraplus_lr_ratio", 16, {"optim.lr_factors": {"lora_B": 16.0}}),
    ):
        assert look_up(word, value) == meaning, word
    stopping = {"?train.early_stopping_patience": 3, "?train.eval_strategy": "epoch"}
    assert look_up("early_stopping", True) == stopping
    assert (PRECISIONS["bfloat16"], CONTEXTS["loraconfig"]) == ("bf16", "lora")


ABOUT = {
    "alpaca": {"file_name": "a.json"},
    "talks": {"file_name": "t.json", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    "chats": {
        "hf_hub_url": "org/chats",
        "subset": "en",
        "split": "sft",
        "num_samples": 9,
        "formatting": "sharegpt",
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "pairs": {
        "file_name": "p.json",
        "ranking": True,
        "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"},
    },
    "wiki": {"file_name": "w.json", "columns": {"prompt": "article"}},
    "odd": {"file_name": "o.json", "formatting": "sharegpt", "tags": {"role_tag": "who"}},
    "seen": {"file_name": "s.json", "columns": {"images": "pictures"}},
    "none": {"script_url": "x.py"},
}


@pytest.mark.parametrize(
    ("dataset", "more", "entries"),
    [
        ("alpaca,b.json", {}, ["D/a.json", "b.json"]),
        (
            ["talks", "chats"],
            {},
            [
                {"path": "D/t.json", "columns": {"messages": "turns"}},
                {"path": "org/chats", "dataset_config": "en", "split": "sft", "max_examples": 9},
            ],
        ),
        (
            "alpaca, talks",
            {"mix_strategy": "interleave_over", "interleave_probs": "0.7,0.3"},
            [
                {"path": "D/a.json", "weight": 0.7},
                {"path": "D/t.json", "columns": {"messages": "turns"}, "weight": 0.3},
            ],
        ),
        (
            "alpaca,b.json",
            {"mix_strategy": "interleave_under"},
            [{"path": "D/a.json", "weight": 1.0}, {"path": "b.json", "weight": 1.0}],
        ),
        (
            "pairs,p.json",
            {"stage": "dpo"},
            [
                {
                    "path": "D/p.json",
                    "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"},
                },
                "p.json",
            ],
        ),
        ("wiki,w.txt", {"stage": "pt"}, [{"path": "D/w.json", "text_column": "article"}, "w.txt"]),
    ],
)
def test_the_data_sets_of_llama_factory(dataset, more, entries, tmp_path):
    "Several are a mixture, and dataset_info.json says where each is and what its columns are."
    (tmp_path / "dataset_info.json").write_text(json.dumps(ABOUT))
    words = dict(model_name_or_path="m", stage="sft", finetuning_type="lora", dataset=dataset)
    config, account = convert_config({**words, "dataset_dir": str(tmp_path), **more})
    here = json.loads(json.dumps(entries).replace("D/", f"{tmp_path}/"))
    assert config.data.datasets == here and config.data.path == "auto"
    rule = {"interleave_over": "all_exhausted", "interleave_under": "first_exhausted"}
    assert config.data.stopping_strategy == rule.get(more.get("mix_strategy"), "total")
    assert not account.named("refused")
    (one,) = [e if isinstance(e, dict) else {"path": e} for e in here[:1]]
    first = dataset[0] if isinstance(dataset, list) else dataset.split(",")[0]
    data = convert_config({**words, "dataset_dir": str(tmp_path), **more, "dataset": first})[0].data
    assert {name: getattr(data, name) for name in one if name != "weight"} == {
        name: value for name, value in one.items() if name != "weight"
    }


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("odd", "a turn has role and content"),
        ("seen", "its column 'images' has no equivalent"),
        ("none", "names no file_name and no hf_hub_url for none"),
        ("alpaca,talks", "2 data sets have 1 interleave_probs"),
    ],
)
def test_a_data_set_of_llama_factory_that_cannot_be_read(dataset, words, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps(ABOUT))
    file = dict(model_name_or_path="m", stage="sft", finetuning_type="lora", dataset=dataset)
    file |= dict(mix_strategy="interleave_under", interleave_probs="1")
    _, account = convert_config({**file, "dataset_dir": str(tmp_path)})
    (row,) = [row for row in account.named("refused") if row.setting == "dataset"]
    assert words in row.why


OFF = {"method": "lora", "init_from": "x"}


@pytest.mark.parametrize(
    ("words", "knobs"),
    [
        ({"distributed": False, "num_gpus": 4, "distributed_backend": "nccl"}, {}),
        ({"distributed": {"enabled": False, "backend": "nccl", "world_size": 4}}, {}),
        ({"deepspeed": {"enabled": False, "zero_stage": 2, "offload_optimizer": True}}, {}),
        ({"use_deepspeed": False, "deepspeed_config": "missing.json"}, {}),
        ({"use_deepspeed": False, "offload_optimizer": True}, {"train.offload_optimizer": True}),
    ],
)
def test_processes_that_a_file_switches_off_are_not_launched(words, knobs):
    config, account = convert_config({**OFF, **words})
    assert account.command == "trainkit train FILE" and not account.named("refused")
    assert {k: value_of(config, k) for k in knobs} == knobs


def test_a_switch_in_the_group_of_deepspeed_is_none_of_its_settings():
    given = {"enabled": True, "zero_stage": 2}
    account = convert_config({**OFF, "deepspeed": given, "num_gpus": 2})[1]
    assert account.command == "trainkit launch FILE --processes 2 --strategy zero2"
    assert not account.named("refused")


@pytest.mark.parametrize("ours", [512, 2048])
def test_the_length_of_the_pairs_of_a_method_beats_that_of_the_data(ours):
    file = {
        "model": {"name": "x"},
        "training": {"sft": {"batch_size": 8}, "dpo": {"max_length": 1024}},
        "data": {"train_file": "pairs.json", "max_length": ours},
    }
    config, account = convert_config(file, method="dpo")
    assert config.dpo.max_length == 1024
    why = {row.setting: row.why for row in account.rows}["data.max_length"]
    assert why == "training.dpo.max_length wins"
    assert convert_config(file, method="sft")[0].data.max_length == ours
    with pytest.raises(ConfigError, match="give --method sft, say"):
        convert_config(file)


@pytest.mark.parametrize(
    ("split", "knob", "value"),
    [("train", "data.split", None), ("train[:50]", "data.max_examples", 50)],
)
def test_the_split_of_one_file_is_the_file(split, knob, value, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        f"rows = load_dataset('csv', data_files='rows.csv', split={split!r})\n"
        "model = AutoModelForCausalLM.from_pretrained('x')\n"
    )
    config, account = convert_config(script)
    assert config.data.path == "rows.csv" and config.data.split is None
    assert value_of(config, knob) == value and not account.named("refused")
    words = {**OFF, "dataset_name": "rows.jsonl", "dataset_split": "train[10%:]"}
    assert "data.max_examples" in convert_config(words)[1].named("refused")[0].why
    words = {**OFF, "dataset_name": "owner/rows", "dataset_split": split}
    assert convert_config(words)[0].data.split == split


def test_a_model_from_scratch_takes_no_weights_from_the_model_that_a_file_names():
    file = {"model": {"name": "x"}, "training": {"from_scratch": {"vocab_size": 500}}}
    config, account = convert_config(file)
    assert (config.method, config.init_from, config.tokenizer.vocab_size) == ("pretrain", "", 500)
    assert "new weights" in account.named("refused")[0].why
    assert convert_config(file, method="pretrain")[0].init_from == "x"


@pytest.mark.parametrize("words", [{"stage": "sft"}, {"stage": "rm"}, {}])
def test_an_adapter_of_another_kind_is_refused_for_what_it_is(words):
    with pytest.raises(ConfigError, match="'oft': must be one of"):
        method_config({**words, "finetuning_type": "oft"})


@pytest.mark.parametrize(
    "word", ["use_deepspeed", "deepspeed_config", "zero_stage", "offload_param", "distributed"]
)
def test_a_word_about_processes_in_a_config_of_ours_names_the_launcher(word):
    with pytest.raises(ConfigError, match=f"{word}.*trainkit launch FILE --processes N"):
        method_config({**OFF, word: True})
