"µP against the rules of its paper written out by hand, and laws whose numbers are known."

import math
import re

import numpy as np
import pytest
import torch

from trainkit.config import ConfigError
from trainkit.model.config import ModelConfig, mup_scales
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig, make_optimizer
from trainkit.train.scaling import ScalingLaw, bootstrap_laws, coordinate_check, fit_law
from trainkit.train.scaling import fit_power, interval

SHAPE = dict(vocab_size=64, n_layers=2, max_seq_len=16)
IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


def model(width, base=None, heads=None, **changes):
    torch.manual_seed(1)
    return Transformer(
        ModelConfig(
            **SHAPE,
            d_model=width,
            n_heads=heads or width // 8,
            d_ff=3 * width,
            mup_base_width=base,
            **changes,
        )
    )


def train(model, optimizer, steps=6):
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CHANGES = [
    dict(),
    dict(tie_embeddings=False),
    dict(norm="layernorm", bias="all", activation="gelu", position="learned"),
    dict(norm="rmsnorm1p", sandwich_norm=True, activation="geglu"),
    dict(qk_norm=True, n_kv_heads=2),
    dict(bias="qkv"),
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_mup_is_that_of_the_paper(changes):
    "Without folding: multipliers in the forward pass, rates and decays of table 8, by hand."
    width, base, heads = 64, 16, 4  # Heads of 16, and of 4 at the base width
    m, score = width / base, math.sqrt(4 / 16)
    ours = model(width, base, heads, mup_base_head_dim=4, **changes).double()
    theirs = model(width, None, heads, **changes).double()
    with torch.no_grad():
        for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            matrix = re.search(r"_proj\.weight$", name)
            if matrix:
                p.div_(math.sqrt(m))  # Variance 1 / fan-in
                fold = score if "q_proj" in name and not changes.get("qk_norm") else 1
                assert torch.allclose(fold * p, q, rtol=1e-6)
            elif "norm" not in name:
                assert torch.equal(p, q)
    theirs.model.norm.register_forward_hook(lambda _, args, out: out / m)
    for layer in theirs.model.layers:
        layer.self_attn.scale *= score
    rate, decay = 1e-2, 0.1
    groups = []
    for name, p in theirs.named_parameters():
        hidden = bool(re.search(r"_proj\.weight$", name))
        groups.append(
            dict(
                params=[p],
                lr=rate / m if hidden else rate,
                weight_decay=decay * (m if hidden else 1) * (p.ndim >= 2),
            )
        )
    by_hand = torch.optim.AdamW(groups, eps=1e-30)
    config = OptimConfig(
        learning_rate=rate, weight_decay=decay, adam_epsilon=1e-20, optim="adamw_torch"
    )
    expected = train(theirs, by_hand)
    assert train(ours, make_optimizer(ours, config)) == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_at_the_base_width_nothing_changes(optim):
    plain, scaled = model(32), model(32, 32)
    config = OptimConfig(learning_rate=1e-2, optim=optim)
    assert all(map(torch.equal, plain.state_dict().values(), scaled.state_dict().values()))
    runs = [train(one, make_optimizer(one, config)) for one in (plain, scaled)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "knobs",
    [
        dict(optim="adamw_torch"),
        dict(optim="muon"),
        dict(optim="muon", muon_adjust_lr="original"),
    ],
    ids=str,
)
def test_activations_change_by_as_much_at_every_width(knobs):
    "With µP no exponent is far from 0; without it some activations explode with the width."
    config = OptimConfig(learning_rate=1e-2, **knobs)
    widths = (16, 32, 64, 128)
    found = {
        base: coordinate_check(lambda w, b=base: model(w, b), widths, IDS, config, 3, (0, 1))
        for base in (None, 16)
    }
    worst = {base: max(check.exponents().values()) for base, check in found.items()}
    assert worst[16] < 0.25, found[16].exponents()
    if knobs != dict(optim="muon", muon_adjust_lr="original"):  # µP in the matrices as it is
        assert worst[None] > 0.5, found[None].exponents()
    assert max(found[16].exponents("size").values()) < 0.25


def test_what_mup_cannot_have():
    for changes, words in (
        (dict(pre_norm=False), "needs pre_norm: true"),
        (dict(scale_embeddings=True), "needs scale_embeddings: false"),
    ):
        with pytest.raises(ConfigError, match=words):
            ModelConfig(mup_base_width=64, **changes)
    with pytest.raises(ConfigError, match="needs mup_base_width"):
        ModelConfig(mup_base_head_dim=64)
    with pytest.raises(ValueError, match="known here for AdamW and Muon"):
        make_optimizer(model(32, 16), OptimConfig(optim="sgd"))
    assert mup_scales(ModelConfig()) == {}


def test_rules_of_the_user_count_on_top():
    config = OptimConfig(
        learning_rate=1e-2, optim="adamw_torch", lr_factors={"q_proj": 3.0, "embed": 2.0}
    )
    groups = make_optimizer(model(32, 16), config).param_groups
    rates = {name: g["lr"] for g in groups for name in g["param_names"]}
    assert rates["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(1.5e-2)
    assert rates["model.layers.0.self_attn.k_proj.weight"] == pytest.approx(0.5e-2)
    assert rates["model.embed_tokens.weight"] == pytest.approx(2e-2)
    assert rates["model.layers.0.input_layernorm.weight"] == pytest.approx(1e-2)
    assert rates["model.norm.weight"] == pytest.approx(0.5e-2)


def test_a_trained_model_is_a_plain_llama():
    from trainkit.interop.families import hf_architecture, to_hf

    ours = model(64, 16, heads=4, mup_base_head_dim=4)
    train(ours, make_optimizer(ours, OptimConfig(learning_rate=1e-2)))
    assert hf_architecture(ours.config) == "LlamaForCausalLM"
    ours.eval()
    with torch.no_grad():
        assert torch.allclose(to_hf(ours)(IDS).logits, ours(IDS).logits, atol=1e-5)


TRUE = ScalingLaw(1.7, 400.0, 0.34, 410.0, 0.28)
RUNS = [(n, d) for n in (1e5, 2e5, 4e5, 8e5) for d in (3e4, 1e5, 3e5, 1e6)]


def test_a_law_is_found_again():
    N, D = zip(*RUNS, strict=True)
    law = fit_law(N, D, [TRUE.loss(n, d) for n, d in RUNS])
    assert vars(law) == pytest.approx(vars(TRUE), rel=1e-3)
    n, d = law.best_split(1e15)
    assert 6 * n * d == pytest.approx(1e15)
    best = law.loss(n, d)
    assert all(best <= law.loss(n * f, d / f) for f in (0.9, 1.1))


def test_the_intervals_hold_what_they_should():
    "The loss of a run ten times larger lies in the 90 % interval in most repetitions."
    N, D = zip(*RUNS, strict=True)
    hits = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        losses = [TRUE.loss(n, d) * math.exp(0.01 * rng.normal()) for n, d in RUNS]
        laws = bootstrap_laws(N, D, losses, rounds=60, seed=seed)
        low, high = interval([law.loss(3e6, 3e6) for law in laws], 0.9)
        hits += low <= TRUE.loss(3e6, 3e6) <= high
    assert 13 <= hits < 21, hits


def test_a_law_needs_runs_that_differ():
    with pytest.raises(ValueError, match="at least 6"):
        fit_law([1e5] * 5, [1e5] * 5, [3.0] * 5)
    with pytest.raises(ValueError, match="at least 2 sizes"):
        fit_law([1e5] * 6, [1e5 * n for n in range(1, 7)], [3.0] * 6)
    flat = fit_law(*zip(*RUNS, strict=True), [3.0] * len(RUNS))
    assert flat.loss(1e7, 1e7) == pytest.approx(3.0, rel=1e-3)
    with pytest.raises(ValueError, match="term of this law is 0"):
        ScalingLaw(3.0, 0.0, 0.3, 1.0, 0.3).best_split(1e12)


def test_a_power_law_with_its_interval():
    xs = [1.0, 2.0, 4.0, 8.0, 16.0]
    law = fit_power(xs, [3 * x**0.7 for x in xs])
    assert (law.a, law.b) == pytest.approx((3, 0.7)) and law.interval(100) == pytest.approx(
        (law(100), law(100))
    )
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        xs = np.exp(rng.uniform(0, 3, 12))
        law = fit_power(xs, 3 * xs**0.7 * np.exp(0.1 * rng.normal(size=12)))
        low, high = law.interval(100.0)
        hits += low <= 3 * 100**0.7 * math.exp(0.1 * rng.normal()) <= high
    assert 0.91 < hits / 300 < 0.985
    with pytest.raises(ValueError, match="at least 3"):
        fit_power([1.0, 2.0], [1.0, 2.0])
