"What a config says about memory, what a plan says about a config, and a rehearsal in words."

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.snapshots import compare

from trainkit.config import ConfigError
from trainkit.memory import planner
from trainkit.model.transformer import Transformer
from trainkit.recipes import memory_commands as commands
from trainkit.recipes import methods
from trainkit.recipes.config import method_config
from trainkit.recipes.runner import Rehearsal

METHODS = ("pretrain", "sft", "freeze", "lora", "qlora", "dpo", "reward", "grpo", "ppo")
ADAPTED = ("sft", "lora", "qlora", "dpo", "reward")
CHANGES = (
    {},
    {"data.max_length": 64, "train.mixed_precision": "bf16", "optim.optim": "muon"},
    {"train.mixed_precision": "auto", "model.gradient_checkpointing": True},
    {
        "train.optimizer_in_backward": True,
        "train.max_grad_norm": 0.0,
        "train.gradient_accumulation_steps": 1,
    },
    {"train.offload_optimizer": True, "train.per_device_train_batch_size": 3},
)


def config_of(method, **knobs):
    return method_config(
        {}, [f"method={method}"] + [f"{k}={json.dumps(v)}" for k, v in knobs.items()]
    )


def test_each_method_asks_for_the_same_memory():
    lines = []
    for method in METHODS:
        for knobs in CHANGES:
            needs = commands.read_setup(config_of(method, **knobs))
            lines.append(f"{method} {json.dumps(knobs)}: {needs.setup} {needs.note}\n")
    for name in ("small", "gpt2"):
        for length in (64, 100_000):
            config = config_of("sft", init_from=name, **{"data.max_length": length})
            needs = commands.read_setup(config)
            lines.append(f"{name} {length}: {needs.model.vocab_size} {needs.setup.seq_len}\n")
    compare("".join(lines), "setups.txt")


def test_each_lever_is_the_same_knobs():
    lines = []
    for method in METHODS:
        config = config_of(method)
        old = commands.read_setup(config).setup
        adapter = dict(lora_rank=old.lora_rank or 8, bits=4)
        adapters = (adapter, dict(adapter, bits=None)) if method in ADAPTED else ()
        for new in (
            dict(batch_size=4, accumulation=4),
            dict(batch_size=1, accumulation=16),
            dict(mixed_precision="bf16", checkpointing=True, optim="adamw_8bit"),
            dict(in_backward=True, accumulation=1, offload=True, seq_len=32),
            *adapters,
        ):
            plan = planner.Plan(1, replace(old, **new), 1, [])
            lines.append(f"{method} {new}: {commands.plan_knobs(plan, config)}\n")
    clip = config_of("sft", **{"train.max_grad_norm": 0.0})
    setup = replace(commands.read_setup(clip).setup, in_backward=True, accumulation=1)
    lines.append(f"no clip: {commands.plan_knobs(planner.Plan(1, setup, 1, []), clip)}\n")
    compare("".join(lines), "levers.txt")


@pytest.mark.parametrize("host", [False, True])
def test_the_levers_that_suit_a_method(host, monkeypatch):
    seen = {}

    def plan_memory(model, budget, setup, levers, progress, others, before):
        assert others == 0 and before is None  # No teacher
        return budget, setup.offload, [*levers], progress

    monkeypatch.setattr(planner, "plan_memory", plan_memory)
    for method in METHODS:
        config = config_of(method, **{"train.offload_optimizer": True})
        budget, offload, levers, progress = commands.plan_needs(config, "1 GB", print, host)
        assert (budget, offload, progress) == ("1 GB", not host, print)
        seen[method] = ("LoRA" in levers, len(levers))
        assert ("offload" in levers) is not host
        assert not {"chunked loss", "half weights"} & {*levers}
    everything = len(planner.LEVERS) - 2 - host
    assert seen == {
        method: (method in ADAPTED, everything - (method not in ADAPTED)) for method in METHODS
    }


def test_when_a_checkpoint_is_written_during_a_step():
    def saves(**knobs):
        named = dict(async_save=None, save_strategy="steps", save_steps=5, max_steps=9) | knobs
        return commands._saves(SimpleNamespace(train=SimpleNamespace(**named)))

    assert saves() and saves(max_steps=6) and not saves(max_steps=5)
    assert saves(max_steps=0) and saves(max_steps=-1) and not saves(max_steps=1)
    assert saves(save_strategy="epoch", max_steps=1)
    assert not saves(save_strategy="no") and not saves(async_save=False) and saves(async_save=True)


def test_how_many_products_are_kept(monkeypatch):
    from trainkit import system

    monkeypatch.setattr(system, "bound_kernels", lambda: 100)

    def kept(method, steps, windows, count):
        train = SimpleNamespace(max_steps=steps, gradient_accumulation_steps=windows)
        return commands._products_kept(SimpleNamespace(method=method, train=train), count)

    assert [kept("pretrain", 3, 2, n) for n in (7, 700)] == [7, 700]
    assert [kept("sft", 3, 2, n) for n in (7, 16, 17)] == [42, 96, 100]
    assert kept("sft", 1, 1, 7) == 7 and kept("sft", -1, 2, 7) == 100 == kept("sft", 0, 2, 7)


def test_what_lies_beside_the_tensors_in_words():
    def words(**sizes):
        return commands._beside_words(SimpleNamespace(beside=sizes))

    assert words() == words(kernels=0) == "the tensors alone"
    assert words(checkpoint=5000, allocator=0, libraries=2 * 10**6) == (
        "the tensors and 5 kB for the copy that a checkpoint is written from, "
        "2 MB for the libraries"
    )


@pytest.mark.parametrize("count, trained", [(1, [2]), (2, [1, 2]), (-1, [0]), (-2, [0, 1])])
@pytest.mark.parametrize("ends", [False, True])
def test_which_blocks_a_frozen_model_trains(count, trained, ends):
    from trainkit.memory.offload import find_blocks

    shape = method_config(
        {"model": dict(vocab_size=50, d_model=16, n_heads=2, n_layers=3, d_ff=16)}
    ).model
    with torch.device("meta"):
        model = commands._frozen(shape, count, ends)()
    blocks = [all(p.requires_grad for p in block.parameters()) for block in find_blocks(model)]
    assert [i for i, trains in enumerate(blocks) if trains] == trained
    assert model.get_input_embeddings().weight.requires_grad is ends


def test_a_rehearsal_in_words():
    lines = []
    for seconds in (0.4, 119.4, 120, 7199, 7200, 90_000):
        told = Rehearsal(["Plan"], 12, 3456, 8, 0.01234, seconds, 2.5, 3_000_000, ["n"])
        lines.append(f"{told}\n")
    lines.append(f"{Rehearsal([], 1, 1, 1, 12.34, 5, 2.5)}\n")
    lines.append(f"{Rehearsal(['a', 'b'], 1, 1, 1, None, None, None, None, ['c', 'd'])}\n")
    compare("".join(lines), "rehearsals.txt")
    assert Rehearsal([], 1, 2, 3, None, 4, 5).to_dict() == dict(
        plan=[], steps=1, tokens=2, effective_batch=3, step_seconds=None, seconds=4, loss=5
    ) | dict(memory=None, notes=[])


@pytest.mark.parametrize("depth", [1, 6, 12])
def test_one_dial_sets_a_model_and_its_run(depth):
    "20 tokens for each parameter, in batches whose rate is that of GPT-3's smallest model."
    config = method_config({"depth": depth})
    model, train, optim = config.model, config.train, config.optim
    shape = model.n_layers, model.n_heads, model.d_model, model.d_ff, model.mup_base_width
    assert shape == (depth, depth, 64 * depth, 256 * depth, 768)
    with torch.device("meta"):
        whole = Transformer(replace(model, vocab_size=config.tokenizer.vocab_size))
    batch = train.gradient_accumulation_steps * train.per_device_train_batch_size
    batch *= config.data.max_length
    tokens = 20 * sum(p.numel() for p in whole.parameters())
    assert 0 <= train.max_steps * batch - tokens < batch
    assert optim.learning_rate == pytest.approx(6e-4 * (batch / 2**19) ** 0.5, rel=0.005)
    # What is said wins, and the rest of the dial follows from it
    own = method_config({"depth": depth}, ["train.max_steps=7", "model.d_ff=512"])
    assert (own.train.max_steps, own.model.d_ff, own.model.n_layers) == (7, 512, depth)
    assert own.optim.learning_rate == optim.learning_rate or own.model.d_ff != model.d_ff


@pytest.mark.parametrize(
    "values", [{"depth": 0}, {"depth": 129}, {"depth": 6, "method": "sft"}, {"depth": True}]
)
def test_a_dial_that_is_wrong_is_named(values):
    with pytest.raises(ConfigError, match="depth"):
        method_config(values)


def test_the_defaults_of_each_method():
    "What a run takes that says nothing, of a model or of an adapter; reviewed as one table."
    lines = []
    for method, row in methods.METHODS.items():
        for adapter in (False, True) if row.trains == "either" else (False,):
            lines.append(f"{method}{' of an adapter' * adapter}:")
            for group, values in methods.defaults_of(method, adapter).items():
                words = ", ".join(f"{name}={value!r}" for name, value in values.items())
                lines.append(f"  {group}: {words}")
    wide = methods.defaults_of("dpo", losses=["kto"])["train"]
    lines.append(f"dpo with kto: {wide}")
    compare("\n".join(lines) + "\n", "method_defaults.txt")
