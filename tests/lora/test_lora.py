"LoRA on our model and on transformers', against PEFT: training, folders and merging."

import copy
import json
import math
import re
import shutil
import warnings
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from support.peak import run_measured
from trainkit.recipes import commands as tools
from trainkit.lora.adapters import (
    FrozenAdapter,
    adapter_state,
    adapter_tensors,
    adapters_off,
    combine_adapters,
    merge_updates,
    load_adapter,
    read_adapter,
    remove_adapter,
    resize_vocabulary,
    save_adapter,
    use_adapter,
)
from trainkit.interop.families import to_hf
from trainkit.model.generation import generate
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.inject import LoRALayer
from trainkit.config import load_config
from trainkit.lora.inject import adapted, add_lora, replace_layer, target_layers, trainable_report
from trainkit.lora.merge import agreement, merge_folder, merge_lora, merge_quantized, merged_tensor
from trainkit.lora.merge import read_header, unmerge_lora
from trainkit.model.config import ModelConfig
from trainkit.quant.linear import Linear8bit
from trainkit.quant.quantize import QuantConfig, quantize_model
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss
from trainkit.train.optim import OptimConfig
from trainkit.lora.rank import GrowRank, grow_rank, shrink_rank
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer
from trainkit.lora.inject import eva_init, init_factors, lora_plus

warnings.filterwarnings("ignore")
IDS = torch.randint(96, (4, 20), generator=torch.Generator().manual_seed(0))


def small(**knobs):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            **{
                **dict(
                    vocab_size=96,
                    d_model=32,
                    n_heads=4,
                    n_kv_heads=2,
                    n_layers=2,
                    d_ff=64,
                    tie_embeddings=False,
                ),
                **knobs,
            }
        )
    )
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    return model


def llama(**knobs):
    return to_hf(small(**knobs))


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=96,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def disturb(model, seed=1):
    "Stands for training: every number that may learn moves."
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.1 * torch.randn(p.shape, generator=g))
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(ids).logits


def exactly(model):
    return logits(model.double())  # In double precision, where rounding does not hide a difference


def gap(a, b):
    return (a.float() - b.float()).abs().max().item()


def gradients(model, ids=IDS):
    model.train()
    model.zero_grad()
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    return {
        n.removeprefix("base_model.model."): p.grad.clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def train(model, steps=12, callbacks=(), optim=None, **knobs):
    batches = [dict(input_ids=IDS, labels=IDS)] * steps
    trainer = Trainer(
        model,
        lm_loss,
        batches,
        config=TrainConfig(max_steps=steps, logging_steps=1, seed=0, progress=False, **knobs),
        callbacks=callbacks,
        optim=optim or OptimConfig(learning_rate=1e-2),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("make", [small, llama, gpt2])
def test_only_the_adapter_learns(make):
    "The base keeps its bits and has no optimizer state; the loss falls; off is the base."
    base = make()
    before, out = {k: v.clone() for k, v in base.state_dict().items()}, logits(base)
    model = add_lora(base, LoRAConfig(r=4, target_modules="all-linear"))
    assert gap(logits(model), out) < 1e-6
    trainer = train(model)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] - 0.1
    held = {id(p) for g in trainer.raw_optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for n, p in model.named_parameters() if ".lora_" in n}
    after = {
        k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if ".lora_" not in k
    }
    assert set(after) == set(before) and all(torch.equal(before[k], after[k]) for k in before)
    with adapters_off(model):
        assert torch.equal(logits(model), out)
    assert gap(logits(model), out) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerge_gives_the_same_bits(dtype):
    model = disturb(
        add_lora(
            small().to(dtype),
            LoRAConfig(r=4, target_modules="all-linear", use_dora=dtype == torch.bfloat16),
        )
    )
    before, out = {k: v.clone() for k, v in model.state_dict().items()}, logits(model)
    merge_lora(model, keep=True)
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert gap(logits(model), out) < (1e-5 if dtype == torch.float32 else 0.2)
    unmerge_lora(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()) and torch.equal(
        logits(model), out
    )


def test_half_precision_base():
    "Adapters are in float32 over a bfloat16 base, train under autocast, and agree with PEFT's."
    from peft import LoraConfig, get_peft_model

    model = add_lora(llama().bfloat16(), LoRAConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    theirs = get_peft_model(llama().bfloat16(), LoraConfig(r=4, target_modules="all-linear"))
    disturb(model)
    own = dict(model.named_parameters())
    for n, p in theirs.base_model.model.named_parameters():
        if ".lora_" in n:
            p.data.copy_(own[n].data)
    assert gap(logits(model), logits(theirs)) < 0.05
    trainer = train(model, mixed_precision="bf16")
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] and trainer.notes == []


def test_autocast_by_hand_is_autocast():
    "The hand-made backward pass under autocast gives what plain lines give."
    model = disturb(add_lora(small(), LoRAConfig(r=4, target_modules="all-linear")))
    exact, results = gradients(model), []
    for kind in ("linear", "none"):  # 'none' takes the general way
        for layer in adapted(model).values():
            layer.kind = kind
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(model))
    errors = [
        sum((g[n] - exact[n]).norm() / exact[n].norm() for n in exact) / len(exact) for g in results
    ]
    assert 0 < errors[0] < 1.2 * errors[1] < 0.1


@pytest.mark.parametrize("make", [small, llama])
def test_gradient_checkpointing(make):
    "Below a frozen base too: the same gradients with and without."
    model = disturb(add_lora(make(), LoRAConfig(r=4, target_modules="all-linear")))
    want = gradients(model)
    if isinstance(model, Transformer):
        model.config.gradient_checkpointing = True
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    ours = gradients(model)
    assert (
        set(ours) == set(want)
        and len(want) == 2 * 7 * 2
        and all(gap(ours[n], want[n]) < 1e-6 for n in want)
    )


class Rounded(nn.Module):
    "A layer in sixteen steps a block, as a quantizer may make it."

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features, self.bias = *linear.weight.shape, None
        blocks = linear.weight.detach().reshape(-1, 32)
        self.register_buffer("top", blocks.abs().amax(1, keepdim=True))
        self.register_buffer("codes", (blocks / self.top * 7).round().to(torch.int8))

    def dequantize(self):
        return (self.codes / 7 * self.top).reshape(self.out_features, self.in_features)

    def forward(self, x):
        return F.linear(x, self.dequantize())


def test_over_a_quantized_base():
    """Gradients equal those over the de-quantized weights; the report counts packed numbers.

    Also after an evaluation.
    """
    packed, plain = small(), small()
    for name, module in list(packed.named_modules()):
        if type(module).__name__ == "Linear" and name != "lm_head":
            replace_layer(packed, name, Rounded(module))
            plain.get_submodule(name).weight.data.copy_(packed.get_submodule(name).dequantize())
    config = LoRAConfig(r=4, target_modules="all-linear")

    def with_adapter(model):
        torch.manual_seed(3)
        return disturb(add_lora(model, config))

    packed, plain = map(with_adapter, (packed, plain))
    for _ in range(2):
        ours, theirs = gradients(packed), gradients(plain)
        assert set(ours) == set(theirs) and all(gap(ours[n], theirs[n]) < 1e-5 for n in ours)
        assert gap(logits(packed), logits(plain)) < 1e-5
    assert trainable_report(packed).total == trainable_report(plain).total
    assert trainable_report(packed).total_bytes < trainable_report(plain).total_bytes
    assert gap(logits(merge_lora(packed)), logits(plain)) < 1e-5


def test_generation_with_a_cache():
    model = disturb(add_lora(small(), LoRAConfig(r=4, target_modules="all-linear")))
    prompt = IDS[:1, :5].tolist()
    tokens = generate(model.eval(), prompt, 12, temperature=0)
    assert tokens == generate(merge_lora(copy.deepcopy(model)), prompt, 12, temperature=0)
    with adapters_off(model):
        assert generate(model, prompt, 12, temperature=0) == generate(
            small().eval(), prompt, 12, temperature=0
        )


OPTIONS = {
    "list": dict(target_modules=["q_proj", "down_proj"]),
    "pattern": dict(target_modules=r".*layers\.1\..*(q|up)_proj"),
    "all-linear": dict(target_modules="all-linear"),
    "left out": dict(target_modules="all-linear", exclude_modules=["o_proj"]),
    "r, alpha": dict(r=3, lora_alpha=5.0),
    "dropout": dict(lora_dropout=0.3),
    "bias all": dict(bias="all"),
    "bias lora_only": dict(bias="lora_only"),
    "modules_to_save": dict(modules_to_save=["lm_head", "embed_tokens"]),
    "layers": dict(layers_to_transform=[1]),
    "layers, named": dict(layers_to_transform=0, layers_pattern="layers"),
    "rank_pattern": dict(rank_pattern={"q_proj": 2}),
    "alpha_pattern": dict(alpha_pattern={"layers.1.self_attn.q_proj": 3}),
    "patterns": dict(rank_pattern={"^model.layers.0.*": 2}, alpha_pattern={"down_proj": 3}),
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "dora, rslora": dict(use_dora=True, use_rslora=True, rank_pattern={"q_proj": 2}),
    **{
        f"init {how}": dict(init_lora_weights=how)
        for how in (True, False, "gaussian", "pissa", "pissa_niter_4", "olora", "orthogonal")
    },
    "init eva": dict(init_lora_weights="eva"),
    "embeddings": dict(target_modules=["embed_tokens", "v_proj"]),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_in_both_directions(option, tmp_path):
    "Our folder in PEFT and PEFT's in ours: the same logits for each option, biases included."
    from peft import LoraConfig, PeftModel, get_peft_model

    knobs = {**dict(r=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"]), **OPTIONS[option]}

    def make():
        return llama(bias="qkv")

    ours = disturb(add_lora(make(), LoRAConfig(**knobs)))
    save_adapter(ours, tmp_path / "ours")
    assert (
        gap(exactly(PeftModel.from_pretrained(make(), str(tmp_path / "ours"))), exactly(ours))
        < 1e-6
    )
    theirs = disturb(get_peft_model(make(), LoraConfig(task_type="CAUSAL_LM", **knobs)))
    theirs.save_pretrained(tmp_path / "theirs")
    want = exactly(theirs)
    assert gap(want, logits(make())) > 1e-3
    for base in (small(bias="qkv"), make()):
        if (
            "niter" in option
        ):  # The random vectors of its start are in no folder: PEFT opens another model, in silence
            other = make()
            torch.manual_seed(7)
            assert (
                gap(logits(PeftModel.from_pretrained(other, str(tmp_path / "theirs"))), want) > 1e-3
            )
            with pytest.raises(ValueError, match="cannot be opened reliably"):
                load_adapter(base, tmp_path / "theirs")
        else:
            assert gap(exactly(load_adapter(base, tmp_path / "theirs")), want) < 1e-6


GPT2 = [
    dict(target_modules="all-linear"),
    dict(target_modules=["c_attn"], use_dora=True),
    dict(target_modules=["c_fc"], lora_alpha=3, use_rslora=True, bias="all"),
]


@pytest.mark.parametrize("knobs", GPT2, ids=str)
def test_gpt2_folders(knobs, tmp_path):
    "Transposed matrices, both ways."
    from peft import LoraConfig, PeftModel, get_peft_model

    ours = disturb(add_lora(gpt2(), LoRAConfig(r=4, **knobs)))
    save_adapter(ours, tmp_path / "ours")
    assert (
        gap(exactly(PeftModel.from_pretrained(gpt2(), str(tmp_path / "ours"))), exactly(ours))
        < 1e-6
    )
    theirs = disturb(
        get_peft_model(gpt2(), LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True, **knobs))
    )
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(gpt2(), tmp_path / "theirs")
    want = exactly(theirs)
    assert gap(exactly(again), want) < 1e-6
    assert gap(exactly(merge_lora(again)), want) < 1e-6


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_peft_folder_against_a_changed_base(how, tmp_path):
    "PEFT saves PiSSA against a residual base; ours opens and saves it for the whole base."
    from peft import LoraConfig, get_peft_model

    theirs = disturb(
        get_peft_model(
            llama(),
            LoraConfig(
                r=4,
                target_modules=["q_proj", "up_proj"],
                init_lora_weights=how,
                task_type="CAUSAL_LM",
            ),
        )
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_adapter(small(), tmp_path / "theirs")
    assert gap(logits(ours), logits(theirs)) < 1e-5
    save_adapter(ours, tmp_path / "ours")
    assert read_adapter(tmp_path / "ours")[0]["r"] == 8
    assert gap(logits(load_adapter(llama(), tmp_path / "ours")), logits(theirs)) < 1e-5
    with adapters_off(ours):
        assert torch.equal(logits(ours), logits(small()))


def test_eva_is_pefts():
    "The same directions as PEFT's incremental SVD finds."
    from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights

    ids = torch.randint(
        3, (32, 20), generator=torch.Generator().manual_seed(2)
    )  # Three tokens: what the first layer reads spans a plane
    ours = add_lora(llama(), LoRAConfig(r=2, target_modules="q_proj", init_lora_weights="eva"))
    before = logits(ours)
    shares = eva_init(ours, [dict(input_ids=ids)])
    assert gap(logits(ours), before) < 1e-6 and all(0 < s < 1 + 1e-9 for s in shares.values())
    theirs = get_peft_model(
        llama(),
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            init_lora_weights="eva",
            eva_config=EvaConfig(rho=1.0, use_label_mask=False, whiten=False),
        ),
    )
    initialize_lora_eva_weights(theirs, [dict(input_ids=ids)] * 3, show_progress_bar=False)
    a, b = (
        m.model.layers[0].self_attn.q_proj.lora_A["default"].weight.detach()
        for m in (ours, theirs.base_model.model)
    )
    b = torch.linalg.qr(b.T)[0].T
    assert gap(a.T @ a, b.T @ b) < 1e-3 and shares["model.layers.0.self_attn.q_proj"] > 0.999


def test_lora_plus_in_a_run():
    model = add_lora(small(), LoRAConfig(r=4))
    trainer = train(
        model, 3, optim=lora_plus(OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant"), 8)
    )
    rates = {
        ("B" if ".lora_B." in n else "A"): g["lr"]
        for g in trainer.raw_optimizer.param_groups
        for n in g["param_names"]
    }
    assert rates == pytest.approx(dict(A=1e-3, B=8e-3))


def test_rank_grows_in_a_run_with_any_optimizer():
    "4 -> 8 -> 16: as if the new directions had been there from the start without a gradient."
    for optim in ("adamw_torch_fused", "adamw_torch", "sgd"):
        model = add_lora(small(), LoRAConfig(r=4))
        trainer = train(
            model, 12, [GrowRank({4: 8, 8: 16})], OptimConfig(learning_rate=1e-2, optim=optim)
        )
        assert {len(m.lora_A["default"].weight) for m in adapted(model).values()} == {16}
        assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
        state = trainer.raw_optimizer.state
        assert all(
            v.shape == p.shape
            for p, s in state.items()
            for k, v in s.items()
            if k.startswith("exp")
        )
    model = disturb(add_lora(small(), LoRAConfig(r=4)))
    before = logits(model)
    assert gap(logits(grow_rank(model, 64)), before) < 1e-6 * before.abs().max()


def test_a_vocabulary_of_the_same_size_stays_as_it_is():
    model = small()
    before = model.lm_head.weight
    same = resize_vocabulary(model, len(before))
    assert same is model and model.lm_head.weight is before


def test_new_tokens_everywhere(tmp_path):
    "A folder with new tokens, tied or not, on ours and transformers'; PEFT opens it resized."
    from peft import PeftModel

    for tied in (True, False):
        model = disturb(
            add_lora(
                resize_vocabulary(small(tie_embeddings=tied), 99),
                LoRAConfig(r=2, modules_to_save=["embed_tokens", "lm_head"]),
            )
        )
        save_adapter(model, tmp_path / "a")
        for base in (small(tie_embeddings=tied), llama(tie_embeddings=tied)):
            again = load_adapter(base, tmp_path / "a")
            assert again.config.vocab_size == 99 and gap(logits(again), logits(model)) < 5e-6
        theirs = PeftModel.from_pretrained(
            resize_vocabulary(llama(tie_embeddings=tied), 99), str(tmp_path / "a")
        )
        assert gap(logits(theirs), logits(model)) < 5e-6
        assert gap(logits(merge_lora(copy.deepcopy(model))), logits(model)) < 1e-5


@pytest.mark.parametrize("formatted", [False, True], ids=["template gone", "template new"])
def test_a_merged_folder_has_the_tokenizer_of_the_adapter(formatted, tmp_path):
    "The base's template goes with the base's tokenizer."
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    base = llama(vocab_size=300)
    base.save_pretrained(tmp_path / "base")
    old = BPETokenizer.train(["a b c " * 9], 258, special_tokens=["<|end|>"], progress=False)
    old.chat_template = "old"
    old.save(tmp_path / "base")
    for name in ("vocab.json", "merges.txt", "tokenizer.model"):  # Another form of the base's
        (tmp_path / "base" / name).write_text("{}")
    model = add_lora(
        resize_vocabulary(base, 310), LoRAConfig(r=2, modules_to_save=["embed_tokens", "lm_head"])
    )
    save_adapter(model, tmp_path / "a")
    new = BPETokenizer.load(tmp_path / "base")
    new.add_special_tokens(["<|new|>"])
    new.chat_template = "new" if formatted else None
    new.save(tmp_path / "a")
    merge_folder(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    opened = BPETokenizer.load(tmp_path / "out")
    assert opened.special_tokens == new.special_tokens
    assert opened.chat_template == new.chat_template
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert not left & {"vocab.json", "merges.txt", "tokenizer.model"}


def test_dropped_layers_and_switching_keep_the_optimizer_honest():
    "After a switch, what was active before gets no gradient."
    model = add_lora(add_lora(small(), LoRAConfig(r=2), "a"), LoRAConfig(r=2), "b")
    use_adapter(model, "a")
    assert all(".a." in n for n in gradients(model))
    disturb(model)
    use_adapter(model, "b", trainable=False)
    assert trainable_report(model).trainable == 0
    assert all(isinstance(layer, LoRALayer) for layer in adapted(model).values())


def test_dropout_keeps_a_byte_a_number():
    "The layer stores less for backward than the plain formula; dropout costs one byte a number."
    sizes = {}
    for p in (0.0, 0.5):
        model = add_lora(
            nn.Sequential(nn.Linear(64, 64, bias=False)),
            LoRAConfig(r=2, target_modules="0", lora_dropout=p),
        ).train()
        stored = {}
        x = torch.randn(100, 64, requires_grad=True)

        def note(t, stored=stored):
            stored[t.data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(x)
        sizes[p] = sum(stored.values())
    assert sizes[0.5] - sizes[0.0] == 100 * 64


@pytest.mark.slow
def test_compiled():
    model = disturb(add_lora(small(), LoRAConfig(r=4, target_modules="all-linear")))
    want = gradients(model)
    compiled = gradients(torch.compile(model))
    assert all(gap(compiled[f"_orig_mod.{n}"], want[n]) < 1e-5 for n in want)


@pytest.mark.slow
def test_merging_on_disk_needs_little_memory(tmp_path):
    "A file of 480 MB, a tensor of 40 MB at a time."
    code = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from trainkit.lora.merge import merge_folder, stream_tensors
where, n = Path(sys.argv[1]), 12
(where/'base').mkdir()
layers = [f'model.layers.{i}.mlp.up_proj' for i in range(n)]
names = {f'{layer}.weight': (torch.float32, (2560, 4096)) for layer in layers}
with open(where/'base'/'model.safetensors', 'wb') as file:
    stream_tensors(file, names, ((k, torch.ones(2560, 4096)) for k in names))
(where/'a').mkdir()
shapes = dict(A=(2, 4096), B=(2560, 2))
adapter = {f'base_model.model.{layer}.lora_{x}.weight': torch.ones(shape)
           for layer in layers for x, shape in shapes.items()}
save_file(adapter, where/'a'/'adapter_model.safetensors')
config = dict(peft_type='LORA', r=2, lora_alpha=4, target_modules=['up_proj'])
(where/'a'/'adapter_config.json').write_text(json.dumps(config))
before = peak_memory()
merge_folder(where/'base', where/'a', where/'out')
after = peak_memory()
from safetensors import safe_open
with safe_open(where/'out'/'model.safetensors', 'pt') as f:
    assert all((f.get_tensor(k) == 5).all() for k in names)
print((after - before) // 2**20)
"""
    assert 0 < int(run_measured(code, tmp_path)) < 240


# Modules that are trained whole, and the kind of update next to them; PEFT's `modules_to_save`
# matches the end of a name
WHOLE = {
    "nothing": [],
    "every norm": ["norm"],
    "the last norm": ["model.norm"],
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
    "a block": ["layers.1.mlp"],
    "half a name": ["tokens", "ead"],
}
BESIDE = {
    "plain": dict(),
    "dora": dict(use_dora=True),
    "rslora": dict(use_rslora=True),
    "patterns": dict(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 3}),
    "bias all": dict(bias="all"),
    "bias lora_only": dict(bias="lora_only"),
    "fan_in_fan_out": dict(fan_in_fan_out=True),
}


def merged_by_folder(base, adapter, where):
    base.save_pretrained(where / "base")
    merge_folder(where / "base", adapter, where / "merged")
    return transformers.AutoModelForCausalLM.from_pretrained(where / "merged")


@pytest.mark.parametrize("word", ["norm", "model.norm", "layers.1.mlp", "tokens"])
def test_a_whole_layer_is_named_by_the_end_of_its_name_as_in_peft(word):
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper as Theirs

    from trainkit.lora.inject import saved_layers

    knobs = dict(r=2, target_modules=["q_proj"], modules_to_save=[word])
    theirs = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **knobs))
    inside = theirs.base_model.model.named_modules()
    names = {name for name, module in inside if isinstance(module, Theirs)}
    assert names == {*saved_layers(llama(), [word])}
    ours = adapted(add_lora(llama(), LoRAConfig(**knobs)))
    assert names == {name for name in ours if not name.endswith("q_proj")}


def roads():
    "All combinations; half of them have every pair of two settings, the others are slow tests."
    for (i, beside), (j, whole), tied in product(
        enumerate(BESIDE), enumerate(WHOLE), (True, False)
    ):
        marks = [pytest.mark.slow] * ((i + j) % 2 == tied)
        name = f"{beside}-{whole}-{'tied' if tied else 'untied'}"
        yield pytest.param(beside, whole, tied, marks=marks, id=name)


@pytest.mark.parametrize(("beside", "whole", "tied"), roads())
def test_every_road_to_one_model(beside, whole, tied, tmp_path):
    "PEFT's folder opened, merged in memory, on disk and by PEFT itself is the trained model."
    from peft import LoraConfig, get_peft_model

    knobs = dict(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=WHOLE[whole] or None,
        **BESIDE[beside],
    )

    def make():
        return llama(bias="qkv", tie_embeddings=tied)

    theirs = disturb(get_peft_model(make(), LoraConfig(task_type="CAUSAL_LM", **knobs)))
    theirs.save_pretrained(tmp_path / "theirs")
    want, bare = exactly(theirs), exactly(make())
    assert gap(want, bare) > 1e-3
    assert gap(exactly(merged_by_folder(make(), tmp_path / "theirs", tmp_path)), want) < 1e-5
    for base in (small(bias="qkv", tie_embeddings=tied), make()):
        before = {n: p.clone() for n, p in base.named_parameters()}
        load_adapter(base, tmp_path / "theirs")
        assert adapter_tensors(base).keys() == read_adapter(tmp_path / "theirs")[1].keys()
        save_adapter(base, tmp_path / "again")
        assert gap(exactly(load_adapter(make(), tmp_path / "again")), want) < 1e-5
        together = merge_lora(copy.deepcopy(base))
        assert gap(exactly(together), want) < 1e-5
        reference = (
            together if isinstance(together, transformers.PreTrainedModel) else to_hf(together)
        )
        reference.float().save_pretrained(tmp_path / "kept")
        assert (
            gap(exactly(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "kept")), want)
            < 1e-5
        )
        assert gap(exactly(base), want) < 1e-5
        with adapters_off(base):
            assert gap(logits(base), bare) < 1e-6
        remove_adapter(base.float(), "default")
        assert before.keys() == dict(base.named_parameters()).keys()
        assert all(torch.equal(p, before[n]) for n, p in base.named_parameters())
    assert gap(exactly(theirs.float().merge_and_unload()), want) < 1e-5


@pytest.mark.parametrize(
    "knobs",
    [
        dict(target_modules=["c_attn", "c_proj"]),
        dict(target_modules=["c_fc"], use_dora=True, modules_to_save=["wte"]),
        dict(target_modules=["mlp.c_proj"], bias="all", modules_to_save=["ln_1"]),
    ],
    ids=str,
)
def test_every_road_with_transposed_matrices(knobs, tmp_path):
    """The same for GPT-2, whose matrices are transposed, also the square ones.

    What the folder says of them makes no difference.
    """
    from peft import LoraConfig, get_peft_model

    theirs = disturb(
        get_peft_model(gpt2(), LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True, **knobs))
    )
    theirs.save_pretrained(tmp_path / "theirs")
    want = exactly(theirs)
    assert gap(exactly(merge_lora(load_adapter(gpt2(), tmp_path / "theirs"))), want) < 1e-5
    assert gap(exactly(merged_by_folder(gpt2(), tmp_path / "theirs", tmp_path)), want) < 1e-5
    file = tmp_path / "theirs" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(fan_in_fan_out=False)))
    assert gap(exactly(merge_lora(load_adapter(gpt2(), tmp_path / "theirs"))), want) < 1e-5
    shutil.rmtree(tmp_path / "merged")
    assert gap(exactly(merged_by_folder(gpt2(), tmp_path / "theirs", tmp_path)), want) < 1e-5


def state(model):
    return (
        {n: t.clone() for n, t in model.state_dict().items()},
        str(model),
        dict(vars(model.config)),
        {n: p.requires_grad for n, p in model.named_parameters()},
    )


def untouched(model, before):
    now = state(model)
    return (
        now[1:] == before[1:]
        and now[0].keys() == before[0].keys()
        and all(torch.equal(t, before[0][n]) for n, t in now[0].items())
    )


LAST = "base_model.model.model.layers.1.mlp.down_proj"
LIES = {  # What is wrong with the folder: what the config says, and what becomes of its tensors
    "rank": (dict(r=10**9), {}),
    "rank of a pattern": (dict(rank_pattern={"q_proj": 10**9}), {}),
    "alpha": (dict(lora_alpha=float("nan")), {}),
    "nan": ({}, {f"{LAST}.lora_B.weight": lambda t: t.index_fill(0, torch.tensor([3]), torch.nan)}),
    "inner size": ({}, {f"{LAST}.lora_A.weight": lambda t: t[:2]}),
    "outer size": ({}, {f"{LAST}.lora_B.weight": lambda t: t[:-1]}),
    "no B": ({}, {f"{LAST}.lora_B.weight": None}),
    "no magnitude": (dict(use_dora=True), {}),
    "a magnitude": ({}, {f"{LAST}.lora_magnitude_vector": lambda t: torch.ones(32)}),
    "one number for a bias": (
        dict(bias="all"),
        {
            "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias": lambda t: (
                torch.ones(1)
            )
        },
    ),
    "a layer of another model": (
        {},
        {"base_model.model.model.layers.7.input_layernorm.weight": lambda t: torch.ones(32)},
    ),
    "a norm of another size": ({}, {"base_model.model.model.norm.weight": lambda t: torch.ones(1)}),
    "half of a layer": (
        dict(modules_to_save=["mlp"]),
        {"base_model.model.model.layers.0.mlp.up_proj.weight": lambda t: torch.ones(64, 32)},
    ),
    "another base": (
        {},
        {"base_model.model.model.embed_tokens.base_layer.weight": lambda t: torch.ones(96, 32)},
    ),
    "a changed base": (dict(init_lora_weights="corda"), {}),
    "two sizes of vocabulary": (
        dict(),
        {
            "base_model.model.lm_head.weight": lambda t: torch.ones(99, 32),
            "base_model.model.model.embed_tokens.weight": lambda t: torch.ones(98, 32),
        },
    ),
    "more tokens, and a layer too many": (
        {},
        {
            "base_model.model.lm_head.weight": lambda t: torch.ones(99, 32),
            "base_model.model.score.weight": lambda t: torch.ones(1, 32),
        },
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_folder_that_does_not_fit_changes_nothing(lie, tmp_path):
    "Every road refuses it, before it makes room for anything and before the model is another."
    from safetensors.torch import load_file, save_file

    save_adapter(
        disturb(
            add_lora(small(bias="qkv"), LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]))
        ),
        tmp_path / "a",
    )
    message, changed = LIES[lie]
    file, tensors = (
        tmp_path / "a" / "adapter_config.json",
        load_file(tmp_path / "a" / "adapter_model.safetensors"),
    )
    (tmp_path / "a" / "trainkit.json").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | message))
    for name, change in changed.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name)).contiguous()
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    llama(bias="qkv").save_pretrained(tmp_path / "base")
    for base in (small(bias="qkv"), llama(bias="qkv")):
        before = state(base)
        with pytest.raises(ValueError):
            load_adapter(base, tmp_path / "a")
        assert untouched(base, before)
    with pytest.raises(ValueError):
        merge_folder(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError):
        tools.merge(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def half_a_merge():
    model = disturb(
        add_lora(
            small(), LoRAConfig(r=4, target_modules="all-linear", modules_to_save=["embed_tokens"])
        )
    )
    adapted(model)["model.layers.1.mlp.down_proj"].lora_B["default"].weight.data[3] = torch.nan
    return model


def half_a_float16():
    model = disturb(add_lora(small().half(), LoRAConfig(r=4, target_modules="all-linear")))
    adapted(model)["model.layers.1.mlp.down_proj"].lora_B["default"].weight.data[3] = 1e6
    return model


def two_adapters():
    model = disturb(
        add_lora(
            add_lora(small(), LoRAConfig(r=4, modules_to_save=["embed_tokens"]), "a"),
            LoRAConfig(r=4),
            "b",
        )
    )
    return use_adapter(model, "a")


def quantized():
    from trainkit.quant.quantize import quantize_model

    return disturb(
        add_lora(quantize_model(small()), LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]))
    )


class Refusing:  # A quantizer whose fourth layer fails
    left = 3

    def __call__(self, weight):
        from trainkit.quant.linear import Linear4bit

        self.left -= 1
        if self.left < 0:
            raise ValueError("no more")
        return Linear4bit.from_weight(weight)


def only_the_first(name):
    return {"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}[name]


def nearly_all_finite():
    model = small()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    return model


def dora():
    model = add_lora(small(), LoRAConfig(r=4, target_modules="q_proj"))
    adapted(model)["model.layers.1.self_attn.q_proj"].lora_magnitude_vector["default"] = nn.Linear(
        1, 1
    )
    return model


HALVES = {
    "merge": (half_a_merge, merge_lora),
    "merge to keep": (half_a_merge, lambda m: merge_lora(m, keep=True)),
    "merge into float16": (half_a_float16, merge_lora),
    "merge into the original": (
        quantized,
        lambda m: merge_quantized(m, IDS, "original", only_the_first),
    ),
    "one row for an original": (
        quantized,
        lambda m: merge_quantized(m, IDS, "original", lambda name: torch.ones(1, 32)),
    ),
    "merge and quantize": (
        quantized,
        lambda m: merge_quantized(m, IDS, "quantized", quantize=Refusing()),
    ),
    "add, at an odd rank": (
        small,
        lambda m: add_lora(
            m,
            LoRAConfig(
                r=4, rank_pattern={"layers.1.self_attn.q_proj": 3}, init_lora_weights="orthogonal"
            ),
        ),
    ),
    "add, dora to an embedding": (
        small,
        lambda m: add_lora(
            m, LoRAConfig(r=4, target_modules=["q_proj", "embed_tokens"], use_dora=True)
        ),
    ),
    "add, inside what learns whole": (
        small,
        lambda m: add_lora(
            m, LoRAConfig(r=4, target_modules=["q_proj"], modules_to_save=["_proj"])
        ),
    ),
    "combine, under a taken name": (two_adapters, lambda m: combine_adapters(m, {"b": 1.0}, "a")),
    "combine, under a name with a dot": (
        two_adapters,
        lambda m: combine_adapters(m, {"b": 1.0}, "a.b"),
    ),
    "combine nothing": (two_adapters, lambda m: combine_adapters(m, {}, "c")),
    "combine what is no sum": (two_adapters, lambda m: combine_adapters(m, {"a": 1.0}, "c")),
    "shrink": (dora, lambda m: shrink_rank(m, 2)),
    "turn to the inputs": (
        lambda: add_lora(small(), LoRAConfig(r=4, rank_pattern={"layers.1.self_attn.q_proj": 40})),
        lambda m: eva_init(m, [dict(input_ids=IDS)]),
    ),
}


@pytest.mark.parametrize("what", HALVES)
def test_all_or_nothing(what):
    "What is refused has changed nothing, however late it was found out."
    make, change = HALVES[what]
    model = make()
    before, active = state(model), {n: dict(layer.active) for n, layer in adapted(model).items()}
    with pytest.raises(ValueError):
        change(model)
    after = state(model)
    assert after[1:] == before[1:] and after[0].keys() == before[0].keys()
    assert all(torch.equal(t.nan_to_num(), before[0][n].nan_to_num()) for n, t in after[0].items())
    assert active == {n: dict(layer.active) for n, layer in adapted(model).items()}


def test_a_merged_adapter_is_not_taken_off_by_half():
    model = merge_lora(
        disturb(add_lora(small(), LoRAConfig(r=4, modules_to_save=["embed_tokens"]))), keep=True
    )
    before = state(model)
    with pytest.raises(RuntimeError, match="unmerge_lora first"):
        remove_adapter(model, "default")
    assert untouched(model, before)


def test_biases_belong_to_one_adapter(tmp_path):
    "They go with it, and no other adapter is saved with them."
    base = state(small(bias="qkv"))[0]
    model = disturb(add_lora(small(bias="qkv"), LoRAConfig(r=4, bias="all"), "a"))
    with pytest.raises(ValueError, match="those of 'a'"):
        add_lora(model, LoRAConfig(r=4), "b")
    remove_adapter(model, "a")
    assert all(torch.equal(t, base[n]) for n, t in model.state_dict().items())
    assert not any("bias" in n for n in adapter_tensors(add_lora(model, LoRAConfig(r=4), "b"), "b"))


@pytest.mark.parametrize(
    "make",
    [lambda: small(bias="all", norm="layernorm"), lambda: llama(bias="qkv"), gpt2],
    ids=["ours", "llama", "gpt2"],
)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_learned_go_and_come_with_their_adapter(make, bias, tmp_path):
    """Without an active adapter the model is the base bit for bit; with it, the trained model.

    A folder holds what was trained.
    """
    base = make().eval()
    bare, weights = base(IDS).logits, base.state_dict()
    targets = ["c_attn"] if hasattr(base, "transformer") else ["q_proj", "v_proj"]
    model = disturb(add_lora(make(), LoRAConfig(r=4, bias=bias, target_modules=targets))).eval()
    spoken, tensors = model(IDS).logits, adapter_tensors(model)
    moved = [
        n
        for n, p in model.named_parameters()
        if n.endswith("bias") and not torch.equal(p, weights[n.replace(".base_layer", "")])
    ]
    assert moved and not torch.equal(spoken, bare)

    def is_base():
        return torch.equal(model(IDS).logits, bare) and all(
            torch.equal(t, weights[n.replace(".base_layer", "")])
            for n, t in model.state_dict().items()
            if n.replace(".base_layer", "") in weights
        )

    def is_whole():
        return torch.equal(model(IDS).logits, spoken)

    def same_tensors():
        return all(torch.equal(t, tensors[n]) for n, t in adapter_tensors(model).items())

    for _ in range(2):
        use_adapter(model, [])
        assert is_base() and same_tensors() and not any(p.requires_grad for p in model.parameters())
        with adapters_off(model):
            assert is_base()
        assert is_base()
        assert is_whole() is False and torch.equal(
            copy.deepcopy(use_adapter(copy.deepcopy(model), "default"))(IDS).logits, spoken
        )
        use_adapter(model, "default")
        assert is_whole() and same_tensors()
        with adapters_off(model):
            assert is_base() and same_tensors()
            with adapters_off(model):
                assert is_base()
            assert is_base()
        assert is_whole()
    use_adapter(model, [])
    save_adapter(model, tmp_path / "off")
    again = load_adapter(make(), tmp_path / "off").eval()
    assert torch.equal(again(IDS).logits, spoken) and torch.equal(
        use_adapter(again, [])(IDS).logits, bare
    )
    assert torch.equal(
        merge_lora(copy.deepcopy(model))(IDS).logits, bare
    )  # Nothing takes part, so nothing is merged
    remove_adapter(model, "default")
    assert is_base() and not hasattr(model, "lora_trained_biases")


def test_biases_and_peft():
    "PEFT leaves trained biases in when an adapter is off, and warns of it; on, both say the same."
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(
        llama(bias="qkv"), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], bias="all")
    )
    ours = add_lora(
        llama(bias="qkv"), LoRAConfig(r=4, lora_alpha=8, target_modules=["q_proj"], bias="all")
    )
    base, plain = (
        llama(bias="qkv")(IDS).logits,
        lambda n: n.removeprefix("base_model.model.").replace(".default", ""),
    )
    disturb(ours)
    numbers = {plain(n): p for n, p in ours.named_parameters()}
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            p.copy_(numbers[plain(n)])
    assert torch.allclose(theirs(IDS).logits, ours(IDS).logits, atol=1e-5)
    with (
        pytest.warns(UserWarning, match="disabling adapter layers with bias"),
        theirs.disable_adapter(),
        adapters_off(ours),
    ):
        assert not torch.allclose(theirs(IDS).logits, base, atol=1e-3) and torch.equal(
            ours(IDS).logits, base
        )
    use_adapter(ours, "default")
    assert torch.allclose(theirs(IDS).logits, ours(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("value", [0, -1, True, "4", None])
@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_number_of_a_pattern_is_above_0(name, value):
    with pytest.raises(ValueError, match="must be a number above 0"):
        LoRAConfig(**{name: {"q_proj": value}})


def test_a_rank_is_whole_and_an_alpha_need_not_be():
    assert LoRAConfig(alpha_pattern={"q_proj": 2.5}).alpha_pattern == {"q_proj": 2.5}
    assert LoRAConfig(rank_pattern={"q_proj": 1, "k_proj": 2.0}).rank_pattern["q_proj"] == 1
    with pytest.raises(ValueError, match=r"rank_pattern\['q_proj'\] = 2.5"):
        LoRAConfig(rank_pattern={"q_proj": 2.5})


@pytest.mark.parametrize("unit", [1.0, 1e-5])
def test_what_a_smaller_rank_loses(unit):
    "The next singular value, the root of the sum of squares, and its share of all."
    from trainkit.lora.rank import shrink_rank

    model = add_lora(
        nn.Sequential(nn.Linear(6, 5, bias=False)), LoRAConfig(r=4, target_modules="0")
    )
    layer = model[0]
    A, B = layer.factors("default")
    values = torch.tensor([4.0, 3.0, 2.0, 1.0])
    with torch.no_grad():
        A.copy_(torch.eye(6)[:4] * values[:, None])
        B.copy_(torch.eye(5)[:, :4] * unit)
    scale = layer.scaling["default"] * unit
    report = shrink_rank(model, 2)["0"]
    rank, *lost = vars(report).values()
    assert rank == 2 and lost == pytest.approx([2 * scale, 5**0.5 * scale, 5 / 30])


@pytest.mark.parametrize("untied, need", [(False, 3000 + 2**20), (True, 3000 + 2**20 + 4 * 70)])
def test_a_merge_needs_room_on_the_disk(untied, need, tmp_path, monkeypatch):
    "As much as the base, a little more, and a matrix in float32 where the head gets its own."
    from trainkit.lora import merge

    files = [tmp_path / name for name in ("a", "b")]
    for file, size in zip(files, (1000, 2000), strict=True):
        file.write_bytes(bytes(size))
    base = SimpleNamespace(files=files, shape=lambda name: (7, 10), embedding="embedding")
    writer = SimpleNamespace(base=base, untied=["head"] * untied)
    for free in (need, need - 1):
        monkeypatch.setattr(
            merge.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        with nullcontext() if free == need else pytest.raises(OSError, match="and the disk has"):
            merge._FolderMerge.check_disk(writer, tmp_path / "new" / "folder")


class Attends(nn.Module):
    "Takes several arguments, as attention of transformers does."

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(3, 3)

    def forward(self, hidden_states, mask, scale=1.0):
        return self.q_proj(hidden_states) * mask * scale, mask


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.self_attn = Attends()

    def forward(self, x):
        return self.self_attn(self.first(x), x > 0, scale=2.0)[0]


def test_a_whole_layer_may_take_several_arguments():
    torch.manual_seed(0)
    model = Holder()
    x = torch.randn(2, 3)
    expected = model(x)
    config = LoRAConfig(r=1, target_modules=["first"], modules_to_save=["self_attn"])
    torch.testing.assert_close(add_lora(model, config)(x), expected)


def test_eva_takes_the_mean_out():
    "The directions of a batch are those around its mean, and every layer keeps its mode."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout(0.5))
    add_lora(model, LoRAConfig(r=2, target_modules=["0"]))
    model.train()
    model[1].eval()
    x = torch.randn(400, 6) * torch.tensor([3.0, 2.0, 0.1, 0.1, 0.1, 0.1])
    far = x + torch.tensor([0, 0, 50.0, 0, 0, 0])  # The mean lies in another direction
    model.forward = lambda input: model[1](model[0](input))
    shares = eva_init(model, [dict(input=far[:200]), dict(input=far[200:])])
    A = model[0].lora_A["default"].weight.detach()
    spread = torch.linalg.svd(x - x.mean(0))[2][:2]
    torch.testing.assert_close(A.T @ A, spread.T @ spread, atol=2e-3, rtol=0)
    energy = torch.linalg.svdvals(x - x.mean(0)).square()
    assert shares["0"] == pytest.approx((energy[:2].sum() / energy.sum()).item(), abs=1e-4)
    assert model.training and not model[1].training


def test_orthogonal_factors_have_pefts_size():
    "Rows of A and columns of B are a tenth of a normal number, turned."
    torch.manual_seed(0)
    A, B, subtracted = init_factors("orthogonal", torch.zeros(4000, 3000), 4, 1.0)
    assert not subtracted and (A @ A.T).trace() / (4 * 3000) == pytest.approx(0.005, rel=0.1)
    assert (B.T @ B).trace() / (4 * 4000) == pytest.approx(0.005, rel=0.1)
    assert (B @ A).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["8 bits", "4 bits", "packed"])
def test_layers_of_bitsandbytes_get_adapters(form, monkeypatch):
    "They are linear layers by their class, and their weights are codes."
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = nn.Linear(64, 32)
    if form == "8 bits":
        layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=0.0)
    else:
        layer = bnb.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict(plain.state_dict(), strict=False)
    layer = layer.to("cpu").eval()
    model = nn.Sequential(layer)
    x = torch.randn(5, 64)
    if form == "packed":  # As after a step in eval mode on a processor that has what it needs
        exact = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        layer.weight.quant_state.packing_format_for_cpu = True
        monkeypatch.setattr(type(layer), "forward", lambda self, x: F.linear(x, exact, self.bias))
    with torch.no_grad():
        before = model(x)
    add_lora(model, LoRAConfig(r=4, target_modules="all-linear")).eval()
    assert model[0].kind == "quantized"
    torch.testing.assert_close(model(x), before, rtol=0, atol=2e-3)
    model[0].factor("lora_B", "default").data.normal_(0, 0.1)
    model(x).square().sum().backward()
    assert model[0].factor("lora_A", "default").grad.abs().max() > 0
    with torch.no_grad():
        adapted_output = model(x)
        merge_lora(model)
        torch.testing.assert_close(model(x), adapted_output, rtol=0, atol=0.02)
    assert type(model[0]) is nn.Linear and (adapted_output - before).abs().max() > 0.05


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_updates_are_merged_as_in_peft(method, density, monkeypatch):
    utils = pytest.importorskip("peft.utils.merge_utils")
    torch.manual_seed(0)
    updates = [torch.randn(6, 10) for _ in range(3)]
    weights = [0.5, -0.3, 1.2]
    masks = []
    plain = torch.bernoulli

    def remembered(p, *, generator=None):
        masks.append(plain(p, generator=generator))
        return masks[-1]

    monkeypatch.setattr(torch, "bernoulli", remembered)
    ours = merge_updates(updates, weights, method, density, seed=3)
    again = iter(masks[:])
    monkeypatch.setattr(torch, "bernoulli", lambda p, **_: next(again))
    theirs = getattr(utils, method)(updates, torch.tensor(weights), density)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_combination_that_is_no_sum():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1, d_ff=48))
    for name, targets in (("a", "q_proj,down_proj"), ("b", "q_proj,up_proj")):
        add_lora(model, LoRAConfig(r=3, target_modules=targets), name)
    for name, p in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    weights = {"a": 0.6, "b": 0.5}
    want = {}
    for name, layer in adapted(use_adapter(model, weights)).items():
        updates = [layer.update(n) for n in layer.active]
        want[name] = merge_updates(updates, [*layer.active.values()], "ties", 0.4)
    combine_adapters(model, weights, "whole", "ties", 0.4, r=10**6)
    for name, layer in adapted(model).items():
        torch.testing.assert_close(layer.update("whole"), want[name], rtol=0, atol=1e-5)
    combine_adapters(model, weights, "small", "ties", 0.4)
    layer = next(iter(adapted(model).values()))
    values = torch.linalg.svdvals(want[next(iter(adapted(model)))])
    rank = len(layer.factor(layer.A_name, "small"))
    left = (layer.update("small") - want[next(iter(adapted(model)))]).norm()
    torch.testing.assert_close(left, values[rank:].norm(), rtol=1e-3, atol=1e-5)
    for knobs, words in ((dict(method="tie"), "is none of sum, ties"), (dict(density=0), "share")):
        with pytest.raises(ValueError, match=words):
            combine_adapters(model, weights, "other", **knobs)


def test_pissa_by_rounds_is_the_best_update_of_its_rank():
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(24, 6))[0]
    right = torch.linalg.qr(torch.randn(16, 6))[0]
    weight = left * torch.tensor([64.0, 32.0, 16.0, 8.0, 0.01, 0.01]) @ right.T
    A, B, subtracted = init_factors("pissa_niter_8", weight, 4, 0.5)
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    assert subtracted and A.shape == (4, 16) and B.shape == (24, 4)
    assert torch.allclose(0.5 * B @ A, U[:, :4] * S[:4] @ V[:4], atol=1e-3)
    assert torch.allclose(A.norm(dim=1), B.norm(dim=0), rtol=1e-3)  # The root of S on each side


def test_all_is_all_linear():
    "LLaMA-Factory's word, under its name or ours."
    model = small()
    wanted = target_layers(model, LoRAConfig(target_modules="all-linear"))
    assert target_layers(model, load_config(LoRAConfig, {"lora_target": "all"})) == wanted


def low_rank(ranks, **knobs):
    "Linear layers of 7 x 6, each with an update of its own rank."
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 7) for _ in ranks])
    pattern = {str(i): r for i, r in enumerate(ranks)}
    config = LoRAConfig(r=2, target_modules="all-linear", rank_pattern=pattern, **knobs)
    return disturb(add_lora(model, config))


def test_ranks_grow_and_shrink_where_they_must():
    from trainkit.lora.rank import shrink_rank, spectrum

    model = low_rank([2, 4, 5])

    def ranks():
        return [len(m.factors("default")[0]) for m in adapted(model).values()]

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    updates = [m.update("default") for m in adapted(model).values()]
    grow_rank(model, 4, optimizer)
    assert ranks() == [4, 4, 5]
    for m, before in zip(adapted(model).values(), updates, strict=True):
        assert torch.allclose(m.update("default"), before, atol=1e-6)
    first = adapted(model)["0"]
    for factor, old in zip(
        first.factors("default"), (slice(2), (slice(None), slice(2))), strict=True
    ):
        state = optimizer.state[factor]["exp_avg"]
        assert state.shape == factor.shape and (state[old] != 0).all()
        assert int((state != 0).sum()) == state[old].numel()
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    grow_rank(model, 5)
    assert ranks() == [5, 5, 5] and ranks() == [len(s) for s in spectrum(model).values()]
    grow_rank(model, 5)
    with pytest.raises(ValueError, match="r = 4: the rank is 5 already"):
        grow_rank(model, 4)
    values = spectrum(model)
    for name, m in adapted(model).items():
        exact = torch.linalg.svdvals(m.update("default"))[:5]
        assert torch.allclose(values[name], exact, atol=1e-5)
    report = shrink_rank(model, 1)
    for name, m in adapted(model).items():
        exact = values[name]
        rest = exact[1:].square().sum()
        assert report[name].bound == pytest.approx(float(exact[1]), rel=1e-4)
        assert report[name].norm == pytest.approx(float(rest.sqrt()), rel=1e-4)
        assert report[name].share == pytest.approx(float(rest / exact.square().sum()), rel=1e-4)
        assert torch.allclose(torch.linalg.svdvals(m.update("default"))[0], exact[0], atol=1e-5)
    assert shrink_rank(model, 1) == {} and ranks() == [1, 1, 1]
    with pytest.raises(ValueError, match="r = 0: must be at least 1"):
        shrink_rank(model, 0)


def test_effective_ranks_and_intruders_by_hand():
    from trainkit.lora.rank import effective_rank, intruder_dimensions

    for values, rank in (([3.0], 1), ([2, 2, 2], 3)):
        assert effective_rank(values) == pytest.approx(rank)
    assert effective_rank([3, 1, 0]) == pytest.approx(4 / 3**0.75)
    assert effective_rank(torch.tensor([1.0, 1e-9])) == pytest.approx(1, abs=1e-6)
    config = LoRAConfig(r=1, lora_alpha=1, target_modules="0")
    model = add_lora(nn.Sequential(nn.Linear(5, 5, bias=False)), config)
    layer = model[0]
    A, B = layer.factors("default")
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.diag(torch.tensor([5.0, 4, 3, 2, 1])))
        A.copy_(torch.tensor([[0.0, 0, 0, 0, 1]]))
        B.copy_(torch.tensor([[10.0], [10], [10], [10], [0]]))
    assert intruder_dimensions(model, 1, 0.4) == {"0": 0}
    assert intruder_dimensions(model, 1, 0.6) == {"0": 1}
    counts = [intruder_dimensions(model, top, 0.99)["0"] for top in (1, 2, 5)]
    assert counts == sorted(counts) and counts[0] == 1
    with torch.no_grad():
        B.zero_()
    assert intruder_dimensions(model, 5, 1.0) == {"0": 0}, "a cosine of 1 is not below 1"


def test_how_alike_two_models_predict():
    from trainkit.lora.merge import agreement

    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    found = agreement(p.log()[None], q.log()[None] + 3)
    kl = 0.5 * math.log(2) - 0.25 * math.log(2) + 0.2 * math.log(0.5) + 0.8 * math.log(4 / 3)
    assert found.kl == pytest.approx(kl / 2, rel=1e-5)
    assert (found.same, found.tokens) == (0.5, 2)
    assert agreement(p.log(), p.log()).kl == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.5, 0.25])
def test_gradients_of_an_adapted_layer_are_autograds(dropout):
    "With the same numbers dropped, which are drawn first."
    from trainkit.lora.inject import _Adapted

    torch.manual_seed(0)
    shapes = dict(x=(9, 6), weight=(5, 6), bias=(5,), A=(2, 6), B=(5, 2))
    inputs = {k: torch.randn(s, requires_grad=k != "weight") for k, s in shapes.items()}
    push = torch.randn(9, 5)
    torch.manual_seed(1)
    y = _Adapted.apply(*inputs.values(), 0.7, dropout)
    found = torch.autograd.grad((y * push).sum(), [inputs[k] for k in ("x", "bias", "A", "B")])
    torch.manual_seed(1)
    keep = 1 - dropout
    noise = torch.empty(9, 6).bernoulli_(keep) / keep if dropout else 1.0
    x, weight, bias, A, B = inputs.values()
    wanted_y = x @ weight.T + bias + 0.7 * ((x * noise) @ A.T @ B.T)
    wanted = torch.autograd.grad((wanted_y * push).sum(), [x, bias, A, B])
    assert torch.allclose(y, wanted_y, atol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_updates_of_several_adapters_by_hand():
    "TIES keeps the larger half of each, and of each place those with the sign of most."
    from trainkit.lora.adapters import merge_updates

    updates = [
        torch.tensor([[4.0, -1, 0.5], [-3, 2, 0]]),
        torch.tensor([[1.0, 5, -6], [-2, 0, 0.1]]),
    ]
    weights = [1.0, 3.0]
    kept = [torch.tensor([[4.0, 0, 0], [-3, 2, 0]]), torch.tensor([[0.0, 5, -6], [-2, 0, 0]])]
    wanted = torch.zeros(2, 3)
    for i in range(2):
        for j in range(3):
            total = sum(float(u[i, j]) for u in kept)
            sign = 1 if total >= 0 else -1
            same = [(w, float(u[i, j])) for w, u in zip(weights, kept, strict=True)]
            same = [(w, u) for w, u in same if u * sign > 0]
            wanted[i, j] = sum(w * u for w, u in same) / max(len(same), 1)
    assert torch.equal(merge_updates(updates, weights, "ties", 0.5), wanted)
    whole = merge_updates(updates, weights, "dare_linear", 1.0)
    assert torch.allclose(whole, updates[0] + 3 * updates[1])
    draw = torch.Generator().manual_seed(5)
    masks = [torch.bernoulli(torch.full((2, 3), 0.4), generator=draw) / 0.4 for _ in updates]
    dropped = masks[0] * updates[0] + 3 * masks[1] * updates[1]
    assert torch.allclose(merge_updates(updates, weights, "dare_linear", 0.4, 5), dropped)
    opposed = [torch.tensor([[2.0]]), torch.tensor([[-2.0]])]
    assert merge_updates(opposed, [1.0, 1.0], "ties", 1.0).tolist() == [[2.0]]


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_are_the_mean(tied):
    from trainkit.lora.adapters import resize_vocabulary, vocabulary_size

    model = small()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    old = vocabulary_size(model)
    before = [model.model.embed_tokens.weight.clone(), model.lm_head.weight.clone()]
    resize_vocabulary(model, old + 3)
    after = [model.model.embed_tokens.weight, model.lm_head.weight]
    for a, b in zip(after, before, strict=True):
        assert len(a) == old + 3 and torch.equal(a[:old], b)
        assert torch.allclose(a[old:], b.mean(0).expand(3, -1), atol=1e-6)
    assert (after[0] is after[1]) == tied and vocabulary_size(model) == old + 3
    assert resize_vocabulary(model, old + 3) is model and vocabulary_size(nn.Linear(1, 1)) == 0
    with pytest.raises(ValueError, match=f"vocab_size = {old + 2}: the model has {old + 3} tokens"):
        resize_vocabulary(model, old + 2)


def test_first_values_of_factors():
    from trainkit.lora.inject import init_factors

    torch.manual_seed(0)
    W = torch.randn(30, 400)
    A, B, start = init_factors(True, W, 8, 2.0)
    assert 0.99 < A.abs().max() * 400**0.5 <= 1 and B.abs().sum() == 0 and not start
    assert A.shape == (8, 400) and B.shape == (30, 8)
    A, B, start = init_factors("gaussian", W, 8, 2.0)
    assert float(A.std()) == pytest.approx(1 / 8, rel=0.05) and B.abs().sum() == 0 and not start
    A, B, start = init_factors(False, W, 4, 2.0)
    assert float(B.std()) == pytest.approx(1 / 4, rel=0.25) and A.abs().max() * 20 <= 1
    left, _, right = torch.linalg.svd(W, full_matrices=False)
    sizes = 30 / 2.0 ** torch.arange(30)
    for how in ("pissa", "pissa_niter_4"):
        A, B, start = init_factors(how, left * sizes @ right, 3, 2.0)
        best = left[:, :3] * sizes[:3] @ right[:3]
        assert torch.allclose(2.0 * (B @ A), best, atol=1e-3) and start
        assert torch.allclose(A.norm(dim=1), B.norm(dim=0), atol=1e-3)
    A, B, start = init_factors("olora", W, 3, 2.0)
    assert torch.allclose(B.T @ B, torch.eye(3), atol=1e-5) and start
    assert torch.allclose(B @ (B.T @ W), B @ A, atol=1e-4)
    A, B, start = init_factors("orthogonal", W, 6, 2.0)
    assert (B @ A).abs().max() < 1e-6 and not start and A.norm() > 1
    assert float(A.std()) == pytest.approx(0.1 / 2**0.5, rel=0.1)
    assert float(B.std()) == pytest.approx(0.1 / 2**0.5, rel=0.3)
    for how, r, what in (("orthogonal", 5, "an even rank"), ("olora", 31, "has only 30 dir")):
        with pytest.raises(ValueError, match=what):
            init_factors(how, W, r, 2.0)
    assert len(init_factors("pissa", W, 30, 1.0)[0]) == 30
    with pytest.raises(ValueError, match="lora_alpha must not be 0"):
        init_factors("pissa", W, 2, 0.0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_by_hand(dropout):
    "Each row of the sum has its own length; what is dropped is dropped for the update alone."
    torch.manual_seed(0)
    config = LoRAConfig(r=2, lora_alpha=3, use_dora=True, lora_dropout=dropout, target_modules="0")
    model = disturb(add_lora(nn.Sequential(nn.Linear(6, 5)), config))
    layer, x = model[0], torch.randn(7, 6)
    A, B = layer.factors("default")
    length = layer.factor("lora_magnitude_vector", "default")
    W, bias = layer.matrix(), layer.base_layer.bias
    whole = W + 1.5 * B @ A
    share = (length / whole.norm(dim=1)).detach()
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(1)
    dropped = F.dropout(x, dropout)
    wanted = x @ W.T + bias + (share - 1) * (dropped @ W.T) + share * (dropped @ A.T @ B.T * 1.5)
    assert torch.allclose(y, wanted, atol=1e-5)
    if not dropout:
        assert torch.allclose(y, x @ (whole * share[:, None]).T + bias, atol=1e-5)
    y = model.eval()(x)
    assert torch.allclose(y, x @ (whole * share[:, None]).T + bias, atol=1e-5)


def test_the_config_that_peft_reads():
    "The rank and alpha of most layers, the others by name; a transposed matrix says so."
    from transformers.pytorch_utils import Conv1D

    from trainkit.lora.adapters import peft_config

    config = peft_config(low_rank([2, 4, 4], lora_alpha=6, alpha_pattern={"0": 3}), base="here")
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 6, False)
    assert config["rank_pattern"] == {"0": 2} and config["alpha_pattern"] == {"0": 3}
    assert config["target_modules"] == ["0", "1", "2"] and config["modules_to_save"] is None
    assert config["base_model_name_or_path"] == "here" and config["init_lora_weights"] is True
    rooted = peft_config(low_rank([4, 4, 9], lora_alpha=6, use_rslora=True))
    assert rooted["lora_alpha"] == 6 and rooted["alpha_pattern"] == {} and rooted["use_rslora"]
    turned = add_lora(nn.Sequential(Conv1D(5, 6)), LoRAConfig(r=2, target_modules="0"))
    assert peft_config(turned)["fan_in_fan_out"] is True
    half = low_rank([2, 2], lora_alpha=2.5)
    assert peft_config(half)["lora_alpha"] == 2.5


@pytest.mark.parametrize(
    "settings",
    [
        dict(r=4),
        dict(r=4, use_dora=True),
        dict(r=2, modules_to_save=["embed_tokens", "lm_head"]),
        dict(r=2, init_lora_weights="pissa", lora_dropout=0.5),
    ],
)
def test_a_frozen_adapter_computes_with_the_old_values(settings):
    model = add_lora(small(tie_embeddings=True), LoRAConfig(**settings)).eval()
    before = model(IDS).logits
    frozen = FrozenAdapter(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p += 0.1 * torch.randn_like(p)
    after = model(IDS).logits
    assert not torch.allclose(after, before, atol=0.1)
    with pytest.raises(KeyError), frozen.in_place(model):
        assert torch.equal(model(IDS).logits, before)
        raise KeyError
    assert torch.equal(model(IDS).logits, after)
    assert [p for p in model.parameters() if p.requires_grad] == trained
    with pytest.raises(ValueError, match="trains biases, too"):
        FrozenAdapter(add_lora(small(bias="qkv"), LoRAConfig(r=2, bias="all")))
    merge_lora(model, keep=True)
    with pytest.raises(RuntimeError, match="unmerge_lora first"), frozen.in_place(model):
        pass


@pytest.mark.parametrize(
    "knobs",
    [
        dict(init_lora_weights="pissa"),
        dict(use_dora=True),
        dict(modules_to_save=["embed_tokens", "lm_head"]),
        dict(bias="lora_only"),
        dict(bias="all"),
        dict(target_modules=["embed_tokens", "q_proj"]),
    ],
    ids=str,
)
def test_the_tensors_of_an_adapter_by_the_names_of_the_model(knobs):
    "All that is trained is among them, and loading them gives the same adapter."
    shape = dict(vocab_size=40, d_model=16, n_heads=2, n_layers=1, d_ff=16, max_seq_len=16)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**shape, tie_embeddings=False, bias="qkv"))
    add_lora(model, LoRAConfig(r=2, **{"target_modules": ["q_proj"], **knobs}))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for _, p in trained:
        torch.nn.init.normal_(p)
    tensors = adapter_tensors(model)
    state = adapter_state(model, tensors)
    assert {name for name, _ in trained} == state.keys()
    for _, p in trained:
        torch.nn.init.zeros_(p)
    model.load_state_dict(state, strict=False)
    assert all(torch.equal(t, tensors[name]) for name, t in adapter_tensors(model).items())


@pytest.mark.parametrize("kind", ["linear", "flipped", "embedding", "dora"])
def test_a_merged_weight_by_hand(kind):
    "W + s·BA; transposed where W is, and with rows of the lengths that DoRA learned."
    A, B = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0], [5.0]])
    W = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    whole = torch.tensor([[3.0, 4.0, 6.0], [2.5, 6.0, 7.5]])  # W + 0.5·BA
    parts = dict(lora_A=A, lora_B=B)
    if kind == "dora":
        parts["lora_magnitude_vector"] = torch.tensor([2.0, 3.0])
        whole = whole / whole.norm(dim=1)[:, None] * torch.tensor([[2.0], [3.0]])
    if kind == "embedding":  # One row for each of three tokens
        parts = dict(lora_embedding_A=A, lora_embedding_B=B)
        W, whole = W.T, whole.T
    if kind == "flipped":
        W, whole = W.T, whole.T
    merged = merged_tensor(W, parts, 0.5, kind == "flipped")
    assert torch.allclose(merged, whole)


@pytest.mark.parametrize("rows", [(96, 32), (95, 32), (96, 31)])
def test_an_adapter_of_an_embedding_merges_only_into_a_table_of_its_shape(rows, tmp_path):
    model = small(vocab_size=rows[0], d_model=32)
    add_lora(model, LoRAConfig(r=2, target_modules="embed_tokens"))
    save_adapter(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    if rows[1] != 32:
        name = next(n for n in tensors if "embedding_B" in n)
        save_file(tensors | {name: tensors[name][: rows[1]].contiguous()}, file)
    (tmp_path / "base").mkdir()
    save_file(small().state_dict(), tmp_path / "base" / "model.safetensors")
    if rows == (96, 32):
        merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
        return
    with pytest.raises(ValueError, match=re.escape(f"which is {rows} there")):
        merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b"{"])
def test_a_file_whose_header_is_nonsense_is_damaged(header, tmp_path):
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="damaged or cut short"):
        read_header(tmp_path / "x")


def test_a_tied_head_gets_no_update_of_its_own():
    with pytest.raises(ValueError, match="lm_head shares its weight with model.embed_tokens:") as e:
        add_lora(small(tie_embeddings=True), LoRAConfig(r=2, target_modules=["lm_head"]))
    assert str(e.value).endswith("modules_to_save=['lm_head']")
    with pytest.raises(ValueError, match="embed_tokens shares its weight with lm_head:"):
        add_lora(small(tie_embeddings=True), LoRAConfig(r=2, target_modules=["embed_tokens"]))


def test_a_layer_that_is_missing_is_looked_for_among_the_ends_of_names():
    with pytest.raises(
        ValueError, match="no layer fits 'q_prj'; there are embed_tokens, q_proj, k_proj, v"
    ):
        add_lora(small(), LoRAConfig(target_modules=["q_prj"]))


def test_a_layer_that_learns_whole_reads_half_precision_in_its_own():
    "Its result is in half precision again; what else it is given arrives unchanged."
    model = add_lora(small(), LoRAConfig(r=2, target_modules="q_proj", modules_to_save=["lm_head"]))
    head, x = model.lm_head, torch.randn(2, 32).bfloat16()
    with torch.no_grad():
        y = head(x)
        assert y.dtype == torch.bfloat16 and torch.equal(
            y, F.linear(x.float(), head.weight).bfloat16()
        )


def test_several_adapters_at_once_are_the_sum_of_their_updates():
    "y = W·x + Σ weight·scale·B·A·x, also where their matrices are stacked to one."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    for name, r, alpha in (("a", 2, 3), ("b", 3, 4)):
        add_lora(model, LoRAConfig(r=r, lora_alpha=alpha, target_modules="0"), name)
    disturb(model)
    use_adapter(model, {"a": 0.5, "b": -2.0})
    layer, x = model[0], torch.randn(7, 6)
    (a, A), (b, B) = ((layer.factors(n)[1], layer.factors(n)[0]) for n in "ab")
    wanted = layer.base_layer(x) + 0.5 * 3 / 2 * x @ (a @ A).T - 2 * 4 / 3 * x @ (b @ B).T
    assert torch.allclose(model(x), wanted, atol=1e-5)


def test_a_pickled_adapter_is_not_opened(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError) as e:
        read_adapter(tmp_path)
    assert str(e.value).endswith("has no adapter_model.safetensors: is it an adapter?")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="an adapter\\?; adapter_model.bin is a pickle"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [(dict(use_dora=True), "use_dora"), (dict(bias="all"), "bias"), ({}, "")],
)
def test_what_is_more_than_a_sum_is_not_combined(knobs, reason):
    model = add_lora(small(), LoRAConfig(r=2, target_modules="q_proj", **knobs), "a")
    if not reason:
        combine_adapters(model, {"a": 1.0}, "c")
        return
    with pytest.raises(ValueError, match=reason):
        combine_adapters(model, {"a": 1.0}, "c")


def test_a_combined_adapter_counts_once_and_drops_nothing():
    "Its factor is 1, for the factors and weights of its parts are in B already."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    for name, r in (("a", 2), ("b", 3)):
        config = LoRAConfig(r=r, lora_alpha=4, lora_dropout=0.5, target_modules="0")
        add_lora(model, config, name)
    disturb(model)
    layer = model[0]
    wanted = 0.5 * layer.update("a") + 2 * layer.update("b")
    combine_adapters(model, {"a": 0.5, "b": 2.0}, "c")
    assert torch.allclose(layer.update("c"), wanted, atol=1e-5)
    assert layer.scaling["c"] == 1 and layer.dropout["c"] == 0 and list(layer.active) == ["c"]
    config = model.lora_configs["c"]
    assert config.r == config.lora_alpha == 5


def test_what_grows_is_noise_beside_the_old_directions():
    "An embedding's noise is in B, with standard deviation 1; another's in A, as in a new adapter."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 30))
    add_lora(model, LoRAConfig(r=2, target_modules=["0", "1"]))
    before = [[f.detach().clone() for f in m.factors("default")] for m in adapted(model).values()]
    grow_rank(model, 22)
    for i, layer in enumerate(adapted(model).values()):
        A, B = layer.factors("default")
        assert torch.equal(A[:2], before[i][0]) and torch.equal(B[:, :2], before[i][1])
        noise, zeros = (B[:, 2:], A[2:]) if i == 0 else (A[2:], B[:, 2:])
        assert zeros.abs().max() == 0
        if i == 0:
            assert float(noise.std()) == pytest.approx(1, rel=0.1)
        else:  # Uniform up to 1/√in
            assert 0.98 < noise.abs().max() * 40**0.5 <= 1


def test_each_row_of_a_batch_has_its_own_weights_of_the_adapters():
    "Row i gets W·x + Σ weight_i·(alpha/r)·B·A·x."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    for name, r, alpha in (("a", 2, 3), ("b", 3, 4)):
        add_lora(model, LoRAConfig(r=r, lora_alpha=alpha, target_modules="0"), name)
    disturb(model)
    layer, x = model[0], torch.randn(2, 7, 6)
    updates = {n: layer.factors(n)[1] @ layer.factors(n)[0] for n in "ab"}
    wanted = layer.base_layer(x)
    wanted[0] += 2 * (3 / 2) * x[0] @ updates["a"].T
    wanted[1] += -1 * (4 / 3) * x[1] @ updates["b"].T + 0.5 * (3 / 2) * x[1] @ updates["a"].T
    weights = dict(a=torch.tensor([2.0, 0.5]), b=torch.tensor([0.0, -1.0]))
    layer.row_weights = {name: weight.view(2, 1, 1) for name, weight in weights.items()}
    assert torch.allclose(model(x), wanted, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_folder_says_whether_its_weights_are_transposed(transposed, tmp_path):
    model = gpt2() if transposed else small()
    names = ["c_fc"] if transposed else ["q_proj", "embed_tokens"]
    save_adapter(add_lora(model, LoRAConfig(r=2, target_modules=names)), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is transposed


def test_a_report_of_what_trains_counts_numbers_and_megabytes():
    "200 of 1,000 numbers; 1,500,000 of 24,000,000 bytes."
    from trainkit.lora.inject import TrainableReport

    assert str(TrainableReport(200, 1000, 1_500_000, 24_000_000)) == (
        "trainable params: 200 || all params: 1,000 || trainable%: 20.0000 || 1.5 of 24.0 MB"
    )
    assert TrainableReport(0, 0, 0, 0).percent == 0


def test_settings_of_an_adapter_are_written_for_people(tmp_path):
    "A key on each line, two spaces deep, in order; a line ends the file."
    from trainkit.lora.merge import _write_settings

    save_adapter(add_lora(small(), LoRAConfig(r=2, target_modules="q_proj")), tmp_path)
    _write_settings(tmp_path / "own.json", dict(b=[1], a=2))
    for name in ("adapter_config.json", "own.json"):
        text = (tmp_path / name).read_text()
        assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("target", ["dequantized", "original", "quantized"])
def test_over_a_quantized_base_the_update_is_added_to_what_is_asked_for(target):
    "To the weight from before, or to what its codes stand for, which may be rounded again."
    before = small()
    model = add_lora(quantize_model(small(), QuantConfig(bits=8)), LoRAConfig(r=2, lora_alpha=3))
    disturb(model)
    layers = adapted(model)
    codes = {name: layer.matrix().detach().float().clone() for name, layer in layers.items()}
    updates = {name: layer.update("default").detach().clone() for name, layer in layers.items()}
    with torch.no_grad():
        first = model.eval()(IDS).logits
    rounded = []

    def again(weight):
        rounded.append(weight.clone())
        return Linear8bit.from_weight(weight)

    knobs = dict(original=before.state_dict()) if target == "original" else {}
    knobs |= dict(quantize=again) if target == "quantized" else {}
    said = merge_quantized(model, IDS, target, **knobs)
    assert len(updates) > 2
    for i, (name, update) in enumerate(updates.items()):
        start = before.get_submodule(name).weight if target == "original" else codes[name]
        layer = model.get_submodule(name)
        found = rounded[i] if target == "quantized" else layer.weight
        assert type(layer) is (Linear8bit if target == "quantized" else nn.Linear)
        assert torch.allclose(found, start + update, atol=1e-5), name
    with torch.no_grad():
        assert said == agreement(first, model(IDS).logits)
    for wrong in (
        dict(target="original"),
        dict(original={}),
        dict(quantize=again),
        dict(target="q"),
    ):
        with pytest.raises(ValueError, match="target"):
            merge_quantized(model, IDS, **wrong)


def test_a_direction_that_the_update_puts_in_place_of_another_is_an_intruder():
    "W maps e1 to 2·e1, and with the update to 3·e3, where W maps nothing."
    from trainkit.lora.rank import intruder_dimensions

    config = LoRAConfig(r=1, lora_alpha=1, target_modules="0")
    model = add_lora(nn.Sequential(nn.Linear(2, 3, bias=False)), config)
    A, B = model[0].factors("default")
    with torch.no_grad():
        model[0].base_layer.weight.copy_(torch.tensor([[2.0, 0], [0, 1], [0, 0]]))
        A.copy_(torch.tensor([[1.0, 0.0]]))
        B.copy_(torch.tensor([[-2.0], [0.0], [3.0]]))
    assert intruder_dimensions(model, 1) == {"0": 1} == intruder_dimensions(model, 2)


@pytest.mark.parametrize(
    ("base", "saved", "differ"),
    [
        ((torch.float32, 1 + 2**-20), (torch.bfloat16, 1.0), False),
        ((torch.bfloat16, 1.0), (torch.float32, 1 + 2**-20), False),
        ((torch.float32, 1 + 2**-20), (torch.float32, 1.0), True),
        ((torch.bfloat16, 1.0), (torch.float16, 1 + 2**-10), False),
        ((torch.float16, 1 + 2**-10), (torch.bfloat16, 1.0), True),
        ((torch.bfloat16, 1.0), (torch.bfloat16, 1 + 2**-7), True),
    ],
)
def test_weights_differ_by_more_than_rounding_to_the_narrower_format(base, saved, differ):
    "Of two formats of one width, that of the model decides."
    from trainkit.lora.adapters import tensors_differ

    a, b = (torch.tensor([2.0, number], dtype=dtype) for dtype, number in (base, saved))
    assert tensors_differ(a, b) is differ and tensors_differ(a, b[:1])


def test_two_adapters_are_not_stacked_where_one_is_more_than_a_sum():
    model = add_lora(small(), LoRAConfig(r=2), "plain")
    add_lora(model, LoRAConfig(r=2, use_dora=True), "directions")
    with pytest.raises(
        ValueError, match="'directions' cannot be weighted or stacked: with use_dora"
    ):
        use_adapter(model, ["plain", "directions"])
    use_adapter(model, "directions")


class StopAt:
    "A callback that ends a run as Ctrl-C does."

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, record):
        if record["step"] == self.step:
            raise KeyboardInterrupt


def test_a_growing_run_keeps_an_adapter_of_each_rank_and_can_be_resumed(tmp_path):
    def finish(folder, *callbacks, resume=None):
        config = TrainConfig(
            max_steps=9, save_strategy="steps", save_steps=3, output_dir=str(folder), progress=False
        )
        torch.manual_seed(0)
        model = add_lora(small(), LoRAConfig(r=2))
        torch.manual_seed(1)
        ids = torch.randint(0, 60, (9, 2, 8))
        batches = [dict(input_ids=row, labels=row) for row in ids]
        growing = [GrowRank({2: 4, 5: 8}), *callbacks]
        Trainer(model, lm_loss, batches, config=config, callbacks=growing).train(resume)
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    whole = finish(tmp_path / "a")
    for rank in (2, 4):
        again = load_adapter(small(), tmp_path / "a" / f"adapter-rank-{rank}")
        assert {len(m.lora_A["default"].weight) for m in adapted(again).values()} == {rank}
    with pytest.raises(KeyboardInterrupt):
        finish(tmp_path / "b", StopAt(8))
    resumed = finish(tmp_path / "b", resume=True)
    assert {t.shape for t in resumed.values()} == {t.shape for t in whole.values()}
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
