"The transformer against transformers, family by family: logits, loss and every gradient."

import copy
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from support.peak import run_measured
from trainkit.model import attention
from trainkit.model.config import PRESETS, count_flops, count_parameters
from trainkit.config import ConfigError, load_config
from trainkit.interop.families import _stacked as in_stacks
from trainkit.interop.families import (
    from_hf,
    from_hf_config,
    hf_architecture,
    to_hf,
    to_hf_config,
    to_hf_weights,
)
from trainkit.model.transformer import ACTIVATIONS, Block, Transformer
from trainkit.model.attention import MAX_CROP, KVCache, attend
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import chunked_cross_entropy

transformers = pytest.importorskip("transformers")
HF = dict(
    vocab_size=61,
    hidden_size=32,
    num_attention_heads=4,
    num_hidden_layers=3,
    intermediate_size=56,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    initializer_range=0.3,
    attn_implementation="sdpa",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
OURS = dict(vocab_size=61, d_model=32, n_heads=4, n_layers=3, d_ff=56, max_seq_len=64)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

YARN = dict(
    rope_type="yarn",
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=9,
    beta_slow=0.5,
    truncate=False,
    mscale=0.8,
    mscale_all_dim=0.3,
)
GEMMA2 = dict(norm="rmsnorm1p", activation="geglu", sandwich_norm=True, scale_embeddings=True)

# name -> (transformers' family, changes to its config, changes to ours)
FAMILIES = {
    "llama": (
        "Llama",
        dict(num_key_value_heads=4, tie_word_embeddings=False),
        dict(tie_embeddings=False),
    ),
    "llama, tied, grouped": (
        "Llama",
        dict(num_key_value_heads=2, tie_word_embeddings=True),
        dict(n_kv_heads=2),
    ),
    "llama, one kv head, wide heads": (
        "Llama",
        dict(num_key_value_heads=1, head_dim=12, tie_word_embeddings=True),
        dict(n_kv_heads=1, head_dim=12),
    ),
    "llama, biases": (
        "Llama",
        dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        dict(bias="all"),
    ),
    "llama, theta": (
        "Llama",
        dict(
            num_key_value_heads=4,
            rope_parameters=dict(rope_type="default", rope_theta=77.0),
            tie_word_embeddings=True,
        ),
        dict(rope_theta=77.0),
    ),
    "llama, linear": (
        "Llama",
        dict(
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4),
        ),
        dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    ),
    "llama 3": (
        "Llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=dict(LLAMA3, rope_theta=5e5),
        ),
        dict(n_kv_heads=2, rope_theta=5e5, rope_scaling=LLAMA3),
    ),
    "llama, yarn": (
        "Llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4
            ),
        ),
        dict(
            n_kv_heads=2,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    "llama, yarn with options": (
        "Llama",
        dict(
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_parameters=dict(YARN, rope_theta=1e4),
        ),
        dict(rope_scaling=YARN),
    ),
    "llama, dynamic": (
        "Llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=16,
            rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
        ),
        dict(
            n_kv_heads=2,
            rope_scaling=dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(
            num_key_value_heads=2,
            head_dim=12,
            query_pre_attn_scalar=10,
            sliding_window=6,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
            tie_word_embeddings=True,
            attn_implementation="eager",
        ),
        dict(
            GEMMA2,
            n_kv_heads=2,
            head_dim=12,
            query_pre_attn_scalar=10,
            layer_windows=[6, 0, 6],
            attn_softcap=3.0,
            logit_softcap=2.0,
        ),
    ),
    "gemma2, no caps": (
        "Gemma2",
        dict(
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=9,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            attn_implementation="eager",
        ),
        dict(GEMMA2, n_kv_heads=1, layer_windows=[9, 0, 9], tie_embeddings=False),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            num_key_value_heads=2,
            head_dim=12,
            query_pre_attn_scalar=10,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=True,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
        dict(
            GEMMA2,
            n_kv_heads=2,
            head_dim=12,
            query_pre_attn_scalar=10,
            layer_windows=[6, 0, 6],
            qk_norm=True,
            rope_theta=1e6,
            layer_rope_theta=[1e4, 1e6, 1e4],
            rope_scaling=dict(rope_type="linear", factor=8.0),
        ),
    ),
    "smollm3": (
        "SmolLM3",
        dict(num_key_value_heads=2, tie_word_embeddings=True, no_rope_layers=[1, 0, 1]),
        dict(n_kv_heads=2, rope_theta=2e6, layer_rope_theta=[2e6, 0.0, 2e6]),
    ),
    "mistral, window": (
        "Mistral",
        dict(num_key_value_heads=2, sliding_window=6, tie_word_embeddings=False),
        dict(n_kv_heads=2, layer_windows=[6, 6, 6], tie_embeddings=False),
    ),
    "qwen2": (
        "Qwen2",
        dict(num_key_value_heads=2, tie_word_embeddings=True),
        dict(n_kv_heads=2, bias="qkv"),
    ),
    "qwen2, windows in the upper layers": (
        "Qwen2",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        dict(n_kv_heads=2, bias="qkv", layer_windows=[0, 5, 5]),
    ),
    "qwen3": (
        "Qwen3",
        dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        dict(n_kv_heads=2, head_dim=16, qk_norm=True),
    ),
}
TOLERANCE = 1e-5


def hf_model(family: str, config: str = "", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{config or family}Config")(**{**HF, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for (
            name,
            p,
        ) in (
            model.named_parameters()
        ):  # Norms and biases start as ones and zeros, which would hide mistakes
            if "norm" in name or "bias" in name:
                p.add_(torch.randn_like(p) * 0.2)
    return model


def pair(name: str):
    "transformers' model and ours with its weights, which fit by name."
    family, theirs, ours = FAMILIES[name]
    names = {"Gemma3": "Gemma3Text"}
    theirs = hf_model(family, names.get(family, family), **theirs)
    model = Transformer(ModelConfig(**OURS, **ours))
    model.load_state_dict(theirs.state_dict())
    return model, theirs


def batch(rows: int = 3, length: int = 24):
    ids = torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9], labels[1, 20:] = -100, -100
    return ids, labels


def close(a, b, tolerance: float = TOLERANCE) -> None:
    scale = max(1.0, b.abs().max().item())
    assert (a - b).abs().max().item() <= tolerance * scale, (a - b).abs().max().item()


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    ours, theirs = pair(name)
    ids, labels = batch()
    a, b = ours(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    close(a.logits, b.logits)
    close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    assert set(want) == {n for n, _ in ours.named_parameters()}
    for n, p in ours.named_parameters():
        close(p.grad, want[n])
    # The chunked loss is the same loss
    ours.zero_grad()
    chunked = ours(ids, labels=labels, return_logits=False).loss
    chunked.backward()
    close(chunked, b.loss)
    for n, p in ours.named_parameters():
        close(p.grad, want[n])


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int) -> None:
    "Llama again, with shapes, batch and labels drawn at random."

    def draw(*choices):
        return choices[torch.randint(len(choices), ()).item()]

    torch.manual_seed(seed)
    heads, width, layers, vocab, ff = (
        draw(2, 3, 4, 6),
        2 * draw(2, 4, 8, 9),
        draw(1, 2, 5),
        draw(11, 64, 500),
        draw(8, 33, 100),
    )
    shared, tied, rows, length = (
        draw(*(n for n in range(1, heads + 1) if heads % n == 0)),
        draw(True, False),
        draw(1, 5),
        draw(2, 17, 40),
    )
    theirs = hf_model(
        "Llama",
        vocab_size=vocab,
        hidden_size=heads * width,
        num_attention_heads=heads,
        intermediate_size=ff,
        num_key_value_heads=shared,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    ours = Transformer(
        ModelConfig(
            vocab_size=vocab,
            d_model=heads * width,
            n_heads=heads,
            d_ff=ff,
            n_kv_heads=shared,
            n_layers=layers,
            tie_embeddings=tied,
            max_seq_len=64,
        )
    )
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(seed)
    ids = torch.randint(vocab, (rows, length))
    labels = torch.where(torch.rand(rows, length) < 0.3, -100, ids)
    labels[0, -1] = ids[0, -1]
    a, b = ours(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    close(a.logits, b.logits)
    close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for n, p in ours.named_parameters():
        close(p.grad, want[n])


def random_config(family: str, seed: int) -> ModelConfig:
    "A shape and choices drawn at random, such that transformers has a class for it."
    torch.manual_seed(seed)

    def draw(*choices):
        return choices[torch.randint(len(choices), ()).item()]

    heads, layers = draw(2, 3, 4, 6), draw(1, 2, 4)
    width = 2 * draw(2, 4, 8, 9)
    shared = draw(*(n for n in range(1, heads + 1) if heads % n == 0))
    values = dict(
        vocab_size=draw(11, 64, 300),
        n_heads=heads,
        n_kv_heads=shared,
        d_model=heads * width,
        n_layers=layers,
        d_ff=draw(8, 33, 100),
        max_seq_len=64,
        tie_embeddings=draw(True, False),
        norm_eps=draw(1e-5, 1e-6),
        rope_theta=draw(1e4, 5e5, 99.0),
        init_std=0.2,
    )
    window = draw(1, 3, 7, 12)
    scaling = draw(
        None,
        dict(rope_type="linear", factor=draw(1.5, 4.0)),
        LLAMA3,
        YARN,
        dict(YARN, attention_factor=1.3, truncate=True),
        dict(rope_type="dynamic", factor=8.0, original_max_position_embeddings=8),
    )
    own = {
        "Llama": dict(bias=draw("none", "all"), rope_scaling=scaling),
        "Mistral": dict(
            layer_windows=[window] * layers, head_dim=draw(None, 6), rope_scaling=scaling
        ),
        "Qwen2": dict(
            bias="qkv", layer_windows=[draw(0, window) for _ in range(layers)], rope_scaling=scaling
        ),
        "Qwen3": dict(
            qk_norm=True,
            head_dim=draw(None, 10),
            layer_windows=[draw(0, window) for _ in range(layers)],
        ),
        "Gemma2": dict(
            GEMMA2,
            layer_windows=[draw(0, window) for _ in range(layers)],
            query_pre_attn_scalar=draw(None, 7),
            attn_softcap=draw(None, 1.0, 20.0),
            logit_softcap=draw(None, 1.0, 9.0),
            head_dim=draw(None, 10),
        ),
        "SmolLM3": dict(
            bias=draw("none", "all"),
            rope_scaling=None if (scaling or {}).get("rope_type") == "dynamic" else scaling,
            layer_rope_theta=[0.0, *(draw(0.0, values["rope_theta"]) for _ in range(layers - 1))],
        ),
        "GPT2": dict(
            norm="layernorm",
            position="learned",
            bias="all",
            n_kv_heads=heads,
            activation=draw("gelu", "gelu_tanh", "relu2"),
        ),
        # Of several layers theirs takes the tokens together for the balance loss
        "Mixtral": dict(
            n_experts=draw(2, 5, 8),
            experts_per_token=draw(1, 2),
            layer_windows=[draw(0, window)] * layers,
            router_aux_loss_coef=0.3 * (layers == 1),
        ),
        "Qwen3Moe": dict(
            n_experts=draw(4, 6),
            experts_per_token=draw(1, 2, 4),
            norm_topk_prob=draw(True, False),
            head_dim=draw(None, 10),
            qk_norm=True,
            router_aux_loss_coef=0.3 * (layers == 1),
        ),
    }
    return ModelConfig(**{**values, **own[family]})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "family",
    ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "SmolLM3", "GPT2", "Mixtral", "Qwen3Moe"],
)
def test_random_families(family: str, seed: int) -> None:
    "Logits, loss and gradients on random shapes and options, with both kinds of attention."
    config = random_config(family, seed)
    assert hf_architecture(config).startswith(family)
    ours = Transformer(config)
    for n, p in ours.named_parameters():
        if "norm" in n or "bias" in n:
            p.data.add_(torch.randn_like(p) * 0.2)
    theirs = to_hf(ours)
    theirs.set_attn_implementation("eager")  # The only one of theirs that knows soft caps
    if config.n_experts:
        theirs.set_experts_implementation("eager")  # The only one that takes any width
    ids = torch.randint(config.vocab_size, (2, 5 + 7 * (seed % 3)))
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    labels[0, -1] = ids[0, -1]
    b = theirs(input_ids=ids, labels=labels)
    b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for how in ("sdpa", "eager"):
        for block in ours.model.layers:
            block.self_attn.implementation = how
        ours.zero_grad()
        a = ours(ids, labels=labels)
        close(a.logits, b.logits)
        close(a.loss, b.loss)
        a.loss.backward()
        got = {n: p.grad for n, p in ours.named_parameters()}
        got = in_stacks(config, got) if config.n_experts else to_hf_weights(config, got)
        assert set(got) == set(want)
        for n, g in got.items():
            close(g, want[n])
    home = from_hf(theirs)
    assert home.config.layer_windows == config.layer_windows or not any(config.layer_windows or [0])
    close(home(ids).logits, b.logits)


def test_dynamic_scaling_with_a_cache() -> None:
    """Beyond the trained length, each token is rotated for the length at its time.

    As in transformers.
    """
    ours, theirs = pair("llama, dynamic")
    ids, _ = batch()
    cache, their_cache, steps = (
        KVCache(3, 24),
        None,
        [(0, 10), *((i, i + 1) for i in range(10, 24))],
    )
    with torch.no_grad():
        for begin, end in steps:
            out = theirs(input_ids=ids[:, begin:end], past_key_values=their_cache, use_cache=True)
            their_cache = out.past_key_values
            close(ours(ids[:, begin:end], past_key_values=cache).logits, out.logits)


@pytest.mark.parametrize("name", [n for n in FAMILIES if "dynamic" not in n])
def test_cache_padding_and_packing(name: str) -> None:
    ours, theirs = pair(name)
    ours.eval()
    theirs.eval()
    ids, _ = batch()
    with torch.no_grad():
        # Left padding, whole and in parts with a cache: every real token as in transformers
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        mask[2, :1] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        want, real = (
            theirs(input_ids=ids, attention_mask=mask, position_ids=positions).logits,
            mask.bool(),
        )
        close(ours(ids, attention_mask=mask).logits[real], want[real])
        close(ours(ids, attention_mask=mask, position_ids=positions).logits[real], want[real])
        for ends in ([9, 10, 11, 24], [1, 17, 18, 24]):
            cache, parts = KVCache(ours.config.n_layers, 24), []
            for begin, end in zip([0, *ends], ends, strict=False):
                parts.append(
                    ours(
                        ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache
                    ).logits
                )
            close(torch.cat(parts, 1)[real], want[real])
        # A cache that was cut back, as a draft that was refused
        cache = KVCache(ours.config.n_layers, 24)
        ours(ids[:, :15], past_key_values=cache)
        cache.crop(10)
        close(ours(ids[:, 10:], past_key_values=cache).logits, theirs(input_ids=ids).logits[:, 10:])
        # Two documents in a row (transformers tells them apart only where there is no cache)
        packed = torch.cat((torch.arange(10), torch.arange(14)))[None].expand(3, -1)
        close(
            ours(ids, position_ids=packed).logits,
            theirs(input_ids=ids, position_ids=packed, use_cache=False).logits,
        )


@pytest.mark.parametrize("step", [1, 3, 30])
@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_cache_with_a_window_is_cut_back_as_far_as_its_tokens_reach(window, step) -> None:
    "The next token sees its whole window then; one token further back the cache refuses."
    for end in range(step, 121, step):
        cache = KVCache(1, 130, [window])

        def add(first: int, last: int, cache: KVCache = cache) -> torch.Tensor:
            "Keys that are their own positions."
            x = torch.arange(first, last)[None, None, :, None]
            keys, _ = cache.update(0, x, x)
            cache.length = last
            return keys.flatten()

        for begin in range(0, end, step):
            add(begin, begin + step)
        least = min(n for n in range(end + 1) if max(0, n - window + 1) >= cache.first[0])
        assert end - least >= min(end, MAX_CROP - 1)
        if least:
            with pytest.raises(ValueError, match="cannot go back"):
                cache.crop(least - 1)
        cache.crop(least)
        seen = add(least, least + 1)[-window:]
        assert seen.tolist() == [*range(max(0, least - window + 1), least + 1)]


def gpt_names(name: str, first: bool) -> str:
    for ours, theirs in {
        "model.": "transformer.",
        "layers": "h",
        "self_attn.": "attn.",
        "o_proj": "c_proj",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "embed_tokens": "tokens_embed" if first else "wte",
        "embed_positions": "positions_embed" if first else "wpe",
        ".norm.": ".ln_f.",
    }.items():
        name = name.replace(ours, theirs)
    for part in "qkv":
        name = name.replace(f"{part}_proj", "c_attn")
    return name


def from_gpt(name: str, theirs: dict, first: bool):
    x = theirs[gpt_names(name, first)]
    for i, part in enumerate("qkv"):
        if f"{part}_proj" in name:
            x = x.chunk(3, -1)[i]
    return x.T if x.ndim == 2 and "proj" in name else x


@pytest.mark.parametrize(
    "family, activation", [("GPT2", "gelu_tanh"), ("GPT2", "gelu"), ("OpenAIGPT", "gelu_tanh")]
)
def test_gpt(family: str, activation: str) -> None:
    "LayerNorm, learned positions, biases; GPT-1 normalises after the sum."
    first = family == "OpenAIGPT"
    shape = dict(
        vocab_size=61, n_embd=32, n_head=4, n_layer=3, n_positions=64, initializer_range=0.3
    )
    shape |= (
        dict(afn="gelu")
        if first
        else dict(activation_function="gelu_new" if activation == "gelu_tanh" else "gelu")
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}LMHeadModel")(
        getattr(transformers, f"{family}Config")(**shape)
    )
    for p in theirs.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    config = ModelConfig.preset(
        "gpt2", **{**OURS, "d_ff": 128}, activation=activation, pre_norm=not first
    )
    ours = Transformer(config)
    weights = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        p.data.copy_(from_gpt(name, weights, first))
    ids, labels = batch()
    a, b = ours.eval()(ids, labels=labels), theirs.eval()(input_ids=ids, labels=labels)
    close(a.logits, b.logits)
    close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        close(p.grad, from_gpt(name, gradients, first))
    if first:
        return  # Its attention draws dropout in another order
    torch.manual_seed(3)
    a = ours.train()(ids, labels=labels).loss
    torch.manual_seed(3)
    b = theirs.train()(input_ids=ids, labels=labels).loss
    close(a, b)


def test_softcaps() -> None:
    "Gemma 2's attention function and its rule for logits."
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, requires_grad=True) for h in (4, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    module = torch.nn.Module()
    module.num_key_value_groups, module.head_dim = 2, 8
    bias = torch.zeros(9, 9).masked_fill(~mask, float("-inf"))
    want, _ = eager_attention_forward(
        module, q, k, v, bias[None, None], scaling=8**-0.5, softcap=0.7
    )
    for padding in (None, mask[None, None]):
        got = attend(q, k, v, padding, softcap=0.7)
        close(got.transpose(1, 2), want)
        a, b = (
            torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
            for out in (got, want)
        )
        for x, y in zip(a, b, strict=True):
            close(x, y)
    model = Transformer(ModelConfig(**OURS, logit_softcap=0.5, init_std=0.5))
    plain = copy.deepcopy(model)
    plain.config.logit_softcap = None
    ids, labels = batch()
    out, raw = model(ids, labels=labels), plain(ids).logits
    close(out.logits, 0.5 * torch.tanh(raw / 0.5))
    assert out.logits.abs().max() <= 0.5 < raw.abs().max()
    out.loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    chunked = model(ids, labels=labels, return_logits=False).loss
    chunked.backward()
    close(chunked, out.loss)
    for p, g in zip(model.parameters(), want, strict=True):
        close(p.grad, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab, chunk_size", [(300, None), (300, 7), (17, 1), (40_000, None)])
def test_chunked_cross_entropy(dtype, vocab: int, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 30, 16).to(dtype), torch.randn(vocab, 16).to(dtype)
    labels = torch.randint(vocab, (4, 30))
    labels[1] = -100
    labels[2, ::3] = -100
    results = []
    for loss in (
        lambda h, w: chunked_cross_entropy(h, w, labels, chunk_size=chunk_size),
        lambda h, w: F.cross_entropy((h @ w.T).float().flatten(0, 1), labels.flatten()),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = loss(h, w)
        out.backward()
        assert out.dtype == torch.float32 and h.grad.dtype == w.grad.dtype == dtype
        results.append((out, h.grad.float(), w.grad.float()))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, tolerance)
    with torch.no_grad():
        close(chunked_cross_entropy(hidden, weight, labels), results[1][0], tolerance)


def test_small_gradients_survive_fp16() -> None:
    "Under a loss scale, gradients that fp16 could not hold by themselves are right."
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16) * 0.1, torch.randn(300, 16) * 0.1
    labels = torch.randint(300, (64,))
    gradients = []
    for dtype, scale in ((torch.float16, 2.0**14), (torch.float32, 1.0)):
        h = hidden.to(dtype).requires_grad_()
        (
            chunked_cross_entropy(h, weight.to(dtype), labels, reduction="sum") * scale / 2**20
        ).backward()
        gradients.append(h.grad.double() / scale)
    relative = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert relative < 5e-3, relative


def test_batch_equals_its_pieces() -> None:
    """`num_items_in_batch`: the gradient of three rows is the sum of their gradients.

    Also with unequal numbers of labels.
    """
    ours, theirs = pair("llama, tied, grouped")
    ids, labels = batch()
    count = (labels[:, 1:] != -100).sum()
    for model in (ours, theirs):
        for row, wanted in zip(ids, labels, strict=True):
            model(
                input_ids=row[None], labels=wanted[None], num_items_in_batch=count
            ).loss.backward()
    pieces = {n: p.grad.clone() for n, p in ours.named_parameters()}
    for n, p in theirs.named_parameters():
        close(pieces[n], p.grad)
    ours.zero_grad()
    ours(ids, labels=labels, return_logits=False).loss.backward()
    for n, p in ours.named_parameters():
        close(p.grad, pieces[n], 1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing(frozen: bool) -> None:
    "The same gradients, dropout included, with less kept; also where only a late layer learns."
    ids, labels = batch()
    memory, results = [], []
    for again in (False, True):
        torch.manual_seed(0)
        model = Transformer(
            ModelConfig(**OURS, dropout=0.2, attention_dropout=0.2, gradient_checkpointing=again)
        )
        if frozen:
            model.requires_grad_(False)
            model.model.layers[2].mlp.requires_grad_(True)
            model.model.layers[0].self_attn.q_proj.requires_grad_(True)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t
        ):
            torch.manual_seed(5)
            loss = model(ids, labels=labels, return_logits=False).loss
        loss.backward()
        memory.append(sum(sizes))
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 1
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-6)
    assert memory[1] < memory[0] / (1.5 if frozen else 3), memory


def test_autocast_and_half_weights() -> None:
    "bf16 by autocast and by weights: the loss near fp32's, gradients in the weights' own dtype."
    ours, _ = pair("llama, tied, grouped")
    for p in ours.parameters():
        p.data.mul_(0.5)
    ids, labels = batch()
    want = ours(ids, labels=labels).loss
    half = copy.deepcopy(ours).to(torch.bfloat16)
    for kwargs in (dict(), dict(return_logits=False)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(ids, labels=labels, **kwargs).loss
        loss.backward()
        assert loss.dtype == torch.float32 and all(
            p.grad.dtype == torch.float32 for p in ours.parameters()
        )
        close(loss, want, 2e-2)
        loss = half(ids, labels=labels, **kwargs).loss
        loss.backward()
        assert loss.dtype == torch.float32 and all(
            p.grad.dtype == torch.bfloat16 for p in half.parameters()
        )
        close(loss, want, 3e-2)
    for base, frequencies in ours.model.frequencies.items():  # Rounded, far positions would be off
        assert torch.equal(half.model.frequencies[base], frequencies)


def test_a_wrapped_head_is_called() -> None:
    "An adapter on the head counts in the loss, with and without logits."
    ours, _ = pair("llama")
    ids, labels = batch()
    before = ours(ids, labels=labels).loss

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x):
            return 1.5 * self.base(x)

    ours.lm_head = Adapted(ours.lm_head)
    full, short = ours(ids, labels=labels), ours(ids, labels=labels, return_logits=False)
    close(full.loss, short.loss)
    assert short.logits is None and abs(full.loss - before) > 1e-3


@pytest.mark.slow
def test_compile() -> None:
    "One graph, no breaks, the same gradients."
    ours, _ = pair("llama 3")
    ids, labels = batch()
    for kwargs in (dict(), dict(return_logits=False)):
        ours.zero_grad()
        want = ours(ids, labels=labels, **kwargs).loss
        want.backward()
        gradients = [p.grad.clone() for p in ours.parameters()]
        ours.zero_grad()
        got = torch.compile(ours, backend="aot_eager", fullgraph=True)(
            ids, labels=labels, **kwargs
        ).loss
        got.backward()
        close(got, want)
        for p, g in zip(ours.parameters(), gradients, strict=True):
            close(p.grad, g)


KNOWN = {  # From the config.json of each model
    "smollm2-135m": dict(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=50257,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_positions=1024,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        attn_pdrop=0.1,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
    ),
    "llama-3.2-1b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=dict(
            factor=32.0,
            high_freq_factor=4.0,
            low_freq_factor=1.0,
            rope_type="llama3",
            original_max_position_embeddings=8192,
        ),
    ),
    "qwen2.5-0.5b": dict(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=24,
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=28,
        attention_bias=False,
    ),
    "mistral-7b": dict(
        model_type="mistral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "gemma-2-2b": dict(
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma-3-270m": dict(
        model_type="gemma3_text",
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rms_norm_eps=1e-6,
        sliding_window=512,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
    ),
    "smollm3-3b": dict(
        model_type="smollm3",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        rope_theta=5000000.0,
        rms_norm_eps=1e-6,
        no_rope_layers=[1, 1, 1, 0] * 9,
        tie_word_embeddings=True,
    ),
}


@pytest.mark.parametrize("name", [n for n, values in PRESETS.items() if "vocab_size" in values])
def test_presets_are_the_real_models(name: str) -> None:
    "The models' own files give our presets and back, with the same parameter names and shapes."
    config = ModelConfig.preset(name)

    def plain(c: ModelConfig) -> dict:
        return {**vars(c), "n_kv_heads": c.kv_heads, "head_dim": c.head_width}

    assert plain(from_hf_config(dict(KNOWN[name]))) == plain(config)
    there = to_hf_config(config)
    rope = there.to_dict().get("rope_parameters") or {}
    for key, value in KNOWN[name].items():
        if key in ("sliding_window", "max_window_layers") and not any(config.layer_windows or [0]):
            continue
        if key == "rope_local_base_freq":
            assert rope["sliding_attention"]["rope_theta"] == value
        elif key == "rope_theta":
            assert rope.get("full_attention", rope)[key] == value
        elif key == "rope_scaling":
            assert value.items() <= rope.items()
        else:
            assert getattr(there, key) == value, key
    with torch.device("meta"):
        want = {
            n: p.shape
            for n, p in getattr(transformers, hf_architecture(config))(there).named_parameters()
        }
        ours = Transformer(config)
        got = {n: p.shape for n, p in to_hf_weights(config, dict(ours.named_parameters())).items()}
    assert got == want and count_parameters(config) == ours.num_parameters()


@pytest.mark.slow
def test_every_choice_is_counted() -> None:
    "Parameters in closed form, for every combination of the choices that change them."
    import itertools

    choices = dict(
        bias=["none", "qkv", "all"],
        norm=["rmsnorm", "layernorm", "rmsnorm1p"],
        activation=["swiglu", "relu2"],
        qk_norm=[True, False],
        position=["rope", "learned"],
        tie_embeddings=[True, False],
        norms=[dict(), dict(sandwich_norm=True), dict(pre_norm=False)],
    )
    for values in itertools.product(*choices.values()):
        knobs = dict(zip(choices, values, strict=True))
        config = ModelConfig(
            **OURS,
            **{k: v for k, v in knobs.items() if k != "norms"},
            **knobs["norms"],
            n_kv_heads=2,
        )
        with torch.device("meta"):
            assert count_parameters(config) == Transformer(config).num_parameters(), config


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(n_kv_heads=1, head_dim=12),
        dict(activation="relu2", bias="all"),
        dict(tie_embeddings=False, bias="qkv"),
        dict(layer_windows=[100, 0, 700], attn_softcap=9.0),
        dict(qk_norm=True, sandwich_norm=True),
    ],
)
def test_flops(changes: dict) -> None:
    "The closed form equals torch's counter: forward, training, blocks, with a cache, packed."
    config = ModelConfig(**{**OURS, "max_seq_len": 1024}, attention="eager", **changes)
    model = Transformer(config)

    def counted(ids, training=False, **inputs):
        with FlopCounterMode(display=False) as counter:
            out = model(ids, **inputs)
            if training:
                out.logits.sum().backward()
        return counter.get_total_flops()

    for rows, length in ((1, 7), (3, 40), (1, 600)):  # more than two blocks
        ids = torch.randint(61, (rows, length))
        for training in (False, True):
            assert counted(ids, training) == count_flops(config, rows, length, training=training)
    cache = KVCache(3, 64)
    model(ids[:, :30], past_key_values=cache)
    assert counted(ids[:, 30:34], past_key_values=cache) == count_flops(config, 1, 4, cached=30)
    lengths = [280, 20, 300]  # One row of three documents: the sum of what they take
    packed = torch.cat([torch.arange(n) for n in lengths])[None]
    assert counted(ids, position_ids=packed) == sum(count_flops(config, 1, n) for n in lengths)


@pytest.mark.parametrize("activation", ["relu2", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_block_is_torchs_layer(activation: str, pre_norm: bool) -> None:
    "Norm before and after the sum, and the plain activations, against nn.TransformerEncoderLayer."
    torch.manual_seed(0)
    config = ModelConfig(
        **OURS,
        activation=activation,
        pre_norm=pre_norm,
        norm="layernorm",
        bias="all",
        position="learned",
    )
    theirs = torch.nn.TransformerEncoderLayer(
        32,
        4,
        56,
        0.0,
        ACTIVATIONS[activation] if activation != "relu2" else lambda x: x.relu() ** 2,
        batch_first=True,
        norm_first=pre_norm,
    )
    for p in theirs.parameters():
        p.data.normal_(0, 0.3)
    theirs.double()
    ours, weights = Block(config, 0).double(), dict(theirs.named_parameters())
    places = {
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "linear1",
        "mlp.down_proj": "linear2",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }

    def place(name: str, source: dict):
        for i, part in enumerate("qkv"):
            if f"{part}_proj" in name:
                return source["self_attn.in_proj_" + name.rpartition(".")[2]].chunk(3)[i]
        for a, b in places.items():
            name = name.replace(a, b)
        return source[name]

    for n, p in ours.named_parameters():
        p.data.copy_(place(n, weights))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    got, want = ours(x), theirs(x, src_mask=future)
    close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for n, p in ours.named_parameters():
        close(p.grad, place(n, gradients), 1e-10)


LENGTHS = [[40, 3, 3, 150, 1, 403], [599, 1], [7, 7, 7, 579]]


@pytest.mark.parametrize("dense", [0, 10**9])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(n_kv_heads=2, layer_windows=[0, 20, 300]),
        dict(attn_softcap=2.0, layer_windows=[30, 0, 0]),
        dict(attention="eager"),
        dict(position="learned", norm="layernorm"),
    ],
    ids=str,
)
def test_packed_rows(changes: dict, dense: int, monkeypatch) -> None:
    "Packed equals separate: logits, loss, gradients; no document sees the first, bit for bit."
    monkeypatch.setattr(attention, "MAX_DENSE_MASK", dense)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**OURS, "max_seq_len": 600}, init_std=0.2, **changes))
    ids, rows = torch.randint(61, (3, 600)), []
    labels, positions = (
        ids.clone(),
        torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]),
    )
    labels[positions == 0] = -100  # A document's first token is no other's next one
    packed = model(ids, position_ids=positions, labels=labels, num_items_in_batch=1)
    packed.loss.backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    total = 0
    for row, lengths in zip(ids, LENGTHS, strict=True):
        outs = [
            model(part[None], labels=part[None], num_items_in_batch=1)
            for part in row.split(lengths)
        ]
        rows.append(torch.cat([out.logits for out in outs], 1))
        total = total + sum(out.loss for out in outs if out.loss.isfinite())
    total.backward()
    close(packed.logits, torch.cat(rows))
    close(packed.loss, total)
    scale = max(g.abs().max().item() for g in together.values())
    for n, p in model.named_parameters():
        close(together[n] / scale, p.grad / scale)
    with torch.no_grad():
        for row, lengths in enumerate(LENGTHS):
            first = lengths[0]
            edited = ids.clone()
            edited[row, :first] = (edited[row, :first] + 1) % 61
            after = model(edited, position_ids=positions).logits
            assert not torch.equal(after[row, :first], packed.logits[row, :first])
            assert torch.equal(after[row, first:], packed.logits[row, first:])


@pytest.mark.parametrize("window", [1, 2, 200, 256, 300, 650])
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_long_rows_under_a_window(window: int, how: str) -> None:
    "Rows longer than two windows go in blocks: as Mistral, gradients too, also after a cache."
    theirs = hf_model(
        "Mistral",
        num_key_value_heads=2,
        sliding_window=window,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    config = from_hf_config(theirs.config)
    config.attention = how
    ours = Transformer(config)
    ours.load_state_dict(theirs.state_dict())
    assert 700 > 2 * attention.QUERY_BLOCK
    ids = torch.randint(61, (1, 700))
    a, b = ours(ids, labels=ids), theirs(input_ids=ids, labels=ids)
    close(a.logits, b.logits)
    a.loss.backward()
    b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for n, p in ours.named_parameters():
        close(p.grad, want[n])
    with torch.no_grad():
        cache = KVCache(2, 700, config.layer_windows)
        parts = [
            ours(ids[:, i:j], past_key_values=cache).logits
            for i, j in ((0, 600), (600, 601), (601, 640), (640, 700))
        ]
    close(torch.cat(parts, 1), b.logits)


@pytest.mark.parametrize("side", ["left", "right", "both", "documents"])
def test_long_padded_rows(side: str, monkeypatch) -> None:
    "Padding as a list of lengths: real tokens as without it, gradients too."
    monkeypatch.setattr(attention, "MAX_DENSE_MASK", 0)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**OURS, layer_windows=[0, 5, 0], init_std=0.2))
    ids = torch.randint(61, (2, 30))
    mask = torch.ones_like(ids)
    if side != "right":
        mask[0, :11] = 0
    if side != "left":
        mask[1, 25:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 11 if side != "right" else 0] = -100
    more, cuts = {}, ([30], [30])
    if side == "documents":  # Their positions do not show the padding; the second row has two
        more, cuts = (
            dict(position_ids=torch.stack((torch.arange(30), torch.arange(30) % 15))),
            ([30], [15, 15]),
        )
        labels[1, 15] = -100
    got = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=1, **more)
    got.loss.backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for row, present, scores, sizes in zip(ids, mask.bool(), got.logits, cuts, strict=True):
        for part, real, logits in zip(
            row.split(sizes), present.split(sizes), scores.split(sizes), strict=True
        ):
            alone = model(part[real][None], labels=part[real][None], num_items_in_batch=1)
            close(logits[real], alone.logits[0])
            alone.loss.backward()
    for n, p in model.named_parameters():
        close(together[n], p.grad, 1e-4)


class Largest(TorchDispatchMode):
    "Remembers the largest tensor, in numbers, that any operation made."

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("windows", [None, [100, 0, 300]])
def test_packed_rows_make_no_square(windows) -> None:
    "Forward and backward over 3,000 packed tokens: nothing of the size of a mask."
    model = Transformer(ModelConfig(**{**OURS, "max_seq_len": 4096}, layer_windows=windows))
    ids = torch.randint(61, (1, 3000))
    positions = torch.cat([torch.arange(n) for n in (700, 300, 1000, 1000)])[None]
    with Largest() as seen:
        model(ids, position_ids=positions, labels=ids, return_logits=False).loss.backward()
    assert seen.numbers < 3000**2 / 20, seen.numbers
    if windows:  # Windows alone, nothing packed
        model.config.layer_windows = [100, 200, 300]
        with Largest() as seen:
            model(ids, labels=ids, return_logits=False).loss.backward()
        assert seen.numbers < 3000**2 / 20, seen.numbers


@pytest.mark.slow
def test_packed_rows_take_less_memory() -> None:
    "The peak of a process that trains on a long packed row, against one that makes the mask."
    code = """
import sys, torch
from trainkit.model import attention
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
attention.MAX_DENSE_MASK = int(sys.argv[1])
shape = dict(vocab_size=61, d_model=32, n_heads=2, n_layers=4, d_ff=32, max_seq_len=4096)
model = Transformer(ModelConfig(**shape))
ids, positions = torch.randint(61, (1, 4096)), torch.arange(512).repeat(8)[None]
model(ids, position_ids=positions, labels=ids, return_logits=False).loss.backward()
print(peak_memory())
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    peaks = [int(run_measured(code, dense)) / 2**20 for dense in (attention.MAX_DENSE_MASK, 10**9)]
    mask = (
        4096**2 / 2**20
    )  # MB of one mask in bytes; as numbers to add it is four times that, in each layer
    assert peaks[0] < peaks[1] - 4 * mask, peaks


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(n_kv_heads=2, layer_windows=[5, 0, 9]),
        dict(attn_softcap=1.5, query_pre_attn_scalar=30.0),
        dict(GEMMA2, layer_windows=[5, 0, 5], attn_softcap=1.5),
    ],
    ids=str,
)
def test_implementations_agree(changes: dict) -> None:
    "By hand and by torch: logits, gradients, packed, padded, and with a cache."
    torch.manual_seed(0)
    base = Transformer(ModelConfig(**OURS, init_std=0.3, **changes))
    ids, labels = batch()
    packed = torch.cat((torch.arange(10), torch.arange(14)))[None].expand(3, -1)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    results = []
    for how in ("sdpa", "eager"):
        model = Transformer(ModelConfig(**OURS, init_std=0.3, attention=how, **changes))
        model.load_state_dict(base.state_dict())
        outputs = []
        for inputs in (dict(), dict(position_ids=packed), dict(attention_mask=mask)):
            model.zero_grad()
            out = model(ids, labels=labels.masked_fill(mask == 0, -100), **inputs)
            out.loss.backward()
            outputs += [out.logits * mask[..., None], *(p.grad.clone() for p in model.parameters())]
        cache = KVCache(3, 24)
        with torch.no_grad():
            outputs += [
                model(ids[:, a:b], past_key_values=cache).logits
                for a, b in ((0, 9), (9, 17), (17, 18), (18, 24))
            ]
        results.append(outputs)
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is here")
def test_flash_attention_is_refused_where_it_is_not() -> None:
    "The knob has the names that others use, and says what is missing before any weight is made."
    for available, want in ((True, "flash_attention_2"), (False, "sdpa")):
        assert load_config(ModelConfig, {"use_flash_attention": available}).attention == want
    assert load_config(ModelConfig, {"attn_implementation": "eager"}).attention == "eager"
    with pytest.raises(ConfigError, match="must be one of 'sdpa', 'eager', 'flash_attention_2'"):
        ModelConfig(attention="flash")
    with pytest.raises(ImportError, match="pip install flash-attn.*or set attention to 'sdpa'"):
        Transformer(ModelConfig(**OURS, attention="flash_attention_2"))


@pytest.mark.parametrize(
    "learns", ["all", "no embedding", "one late layer", "one early bias", "an added matrix"]
)
def test_checkpointing_with_a_frozen_base(learns: str, monkeypatch) -> None:
    "With frozen weights, packed documents and dropout: same gradients, none for the frozen."
    monkeypatch.setattr(attention, "MAX_DENSE_MASK", 0)
    ids, labels = batch()
    packed, results = torch.cat((torch.arange(10), torch.arange(14)))[None].expand(3, -1), []
    for again in (False, True):
        torch.manual_seed(0)
        model = Transformer(
            ModelConfig(
                **OURS,
                dropout=0.2,
                attention_dropout=0.3,
                bias="all",
                init_std=0.2,
                gradient_checkpointing=again,
            )
        )
        if learns == "no embedding":
            model.model.embed_tokens.requires_grad_(False)
        elif learns != "all":
            model.requires_grad_(False)
            if learns == "one late layer":
                model.model.layers[2].requires_grad_(True)
            if learns == "one early bias":
                model.model.layers[0].self_attn.q_proj.bias.requires_grad_(True)
            if learns == "an added matrix":  # As LoRA does it
                layer = model.model.layers[1].self_attn
                layer.q_proj = torch.nn.Sequential(layer.q_proj, torch.nn.Linear(32, 32))
        torch.manual_seed(5)
        loss = model(ids, position_ids=packed, labels=labels, return_logits=False).loss
        loss.backward()
        results.append(
            [
                loss.detach(),
                torch.rand(()),
                *(p.grad for p in model.parameters() if p.grad is not None),
            ]
        )  # And the random states are equal
    assert len(results[0]) == len(results[1]) > 2
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-6)
    assert len(results[0]) - 2 == {"one early bias": 1, "an added matrix": 2}.get(
        learns, len(results[0]) - 2
    )


def test_a_row_of_documents_may_be_longer_than_the_longest_document():
    "Padding-free rows: the limit is one of positions, not of the row."
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=50, d_model=16, n_heads=2, n_layers=2, d_ff=32, max_seq_len=16)
    ).eval()
    parts = [torch.randint(0, 50, (1, n)) for n in (16, 9, 14)]
    places = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    with torch.no_grad():
        row = model(torch.cat(parts, 1), position_ids=places).logits
        alone = torch.cat([model(p).logits for p in parts], 1)
    torch.testing.assert_close(row, alone, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="max_seq_len"):
        model(torch.cat(parts, 1), position_ids=torch.arange(39)[None])
    with pytest.raises(ValueError, match="max_seq_len"):
        model(torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("kind", "sizes", "text"),
    [
        ("yarn", dict(rope_theta=1), "rope_theta = 1.*: must be above 1 for rope_scaling of type"),
        ("dynamic", dict(d_model=4), "head_dim = 2: must be 4 or more for rope_scaling of type"),
    ],
)
def test_rotary_scaling_that_would_divide_by_zero_is_refused(kind, sizes, text):
    scaling = dict(rope_type=kind, factor=2.0, original_max_position_embeddings=8)
    with pytest.raises(ConfigError, match=text):
        ModelConfig(n_heads=2, rope_scaling=scaling, **sizes)
    ModelConfig(n_heads=2, rope_scaling=scaling, position="learned", **sizes)  # No use of it


def test_weights_that_write_to_the_stream_begin_smaller():
    "GPT-2's rule: the root of twice the layers, since each adds two times."
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=64, d_model=256, n_heads=4, n_layers=8, d_ff=512, init_std=0.04)
    )
    for name, smaller in (("self_attn.o_proj", 4), ("mlp.down_proj", 4), ("mlp.up_proj", 1)):
        stds = [block.get_submodule(name).weight.std().item() for block in model.model.layers]
        assert stds == pytest.approx([0.04 / smaller] * 8, rel=0.02)
