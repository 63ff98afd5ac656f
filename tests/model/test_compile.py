"The model compiles as one graph with the same results, and its own products are torch's."

import pytest
import torch

from trainkit.model import transformer as layers
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer

SHAPE = dict(vocab_size=61, d_model=32, n_heads=4, n_layers=1, d_ff=48, max_seq_len=160)
KINDS = {
    "llama": {},
    "gqa, qk norm": dict(n_kv_heads=2, qk_norm=True, tie_embeddings=False),
    "gpt2": dict(activation="gelu_tanh", norm="layernorm", position="learned", bias="all"),
    "window": dict(n_layers=2, layer_windows=[16, 0]),
}


def loss_and_gradients(call, model, ids, autocast: bool):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = call(ids)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


QUICK = ("gqa, qk norm", True), ("gpt2", False)  # Tracing is slow: each kind of product once


@pytest.mark.parametrize(
    "kind, autocast",
    [
        pytest.param(kind, narrow, marks=[pytest.mark.slow] * ((kind, narrow) not in QUICK))
        for kind in KINDS
        for narrow in (False, True)
    ],
)
def test_one_graph(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Transformer(ModelConfig(**{**SHAPE, **KINDS[kind]}))
    ids = torch.randint(61, (2, 150))

    def call(ids):
        return model(ids, labels=ids, return_logits=False).loss

    loss, gradients = loss_and_gradients(call, model, ids, autocast)
    ours, theirs = loss_and_gradients(
        torch.compile(call, fullgraph=True, backend="aot_eager"), model, ids, autocast
    )
    tolerance = 2e-2 if autocast else 1e-5
    assert (ours - loss).abs() <= tolerance
    for name, grad in gradients.items():
        assert (theirs[name] - grad).norm() <= tolerance * max(1e-3, grad.norm()), name


def test_logits_in_one_graph() -> None:
    torch._dynamo.reset()
    model = Transformer(ModelConfig(**SHAPE)).eval()
    ids = torch.randint(61, (2, 20))
    with torch.no_grad():
        compiled = torch.compile(lambda ids: model(ids).logits, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(ids), model(ids).logits, atol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_products_of_a_model(exact: bool, monkeypatch) -> None:
    "With either library, gradients agree with those of `nn.Linear` in double precision."
    if exact and not layers.onednn_is_exact():
        pytest.skip("this CPU rounds")
    monkeypatch.setattr(layers, "onednn_is_exact", lambda: exact)
    torch.manual_seed(0)
    model, ids = Transformer(ModelConfig(**SHAPE)), torch.randint(61, (2, 150))

    def call(model):
        return model(ids, labels=ids, return_logits=False).loss

    call(model).backward()
    wide = Transformer(ModelConfig(**SHAPE)).double()
    wide.load_state_dict(model.state_dict())
    call(wide).backward()
    for (name, p), q in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name
    if hasattr(torch.backends.mkldnn, "matmul"):
        assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # as it was


def test_short_rows_are_the_same_under_autocast() -> None:
    "With and without weights written down, bfloat16 attention is equally far from the truth."
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 150, 16) for _ in range(3))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = layers.short_attention(q, k, v, 0.25)
    assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.parametrize("by_float32", [False, True])
def test_which_attention_is_short(by_float32, monkeypatch):
    "Two tokens to `SHORT`, in bfloat16, where the machine multiplies it itself."
    from trainkit.model import transformer as layers

    monkeypatch.setattr(layers, "BY_FLOAT32", by_float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for length in (1, 2, layers.SHORT, layers.SHORT + 1):
            q = torch.empty(1, 1, length, 1, dtype=dtype)
            wanted = dtype == torch.bfloat16 and 2 <= length <= layers.SHORT and not by_float32
            assert layers.is_short(q) is wanted
