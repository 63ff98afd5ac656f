"The chunked cross-entropy against the plain one: loss and gradients for all its options."

import pytest
import torch
import torch.nn.functional as F

from trainkit.model.transformer import check_ids, chunked_cross_entropy
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer

torch.set_num_threads(1)


def plain(hidden, weight, labels, ignore_index=-100, reduction="mean", softcap=None, z_loss=0.0):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    flat = labels.flatten()
    loss = F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction=reduction)
    if not z_loss:
        return loss
    squares = wide.logsumexp(-1).square()[flat != ignore_index]
    return loss + z_loss * (squares.mean() if reduction == "mean" else squares.sum())


def example(dtype=torch.float32, ignore_index=-100, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(3, 21, 24, generator=g).to(dtype),
        (torch.randn(130, 24, generator=g) / 2).to(dtype),
    )
    labels = torch.randint(130, (3, 21), generator=g).masked_fill(
        torch.rand(3, 21, generator=g) < 0.3, ignore_index
    )
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def error(value, wanted):
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("chunk_size", [None, 1, 10, 1000])
def test_float32(chunk_size, ignore_index, reduction, softcap, z_loss):
    hidden, weight, labels = example(ignore_index=ignore_index)
    knobs = dict(ignore_index=ignore_index, reduction=reduction, softcap=softcap, z_loss=z_loss)
    wanted, ours = (
        plain(hidden, weight, labels, **knobs),
        chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, **knobs),
    )
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-6)
    for a, b in zip(
        *(torch.autograd.grad(x, (hidden, weight)) for x in (ours, wanted)), strict=True
    ):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype, softcap, z_loss):
    """The loss is that of the same rounded logits.

    Gradients are no farther from the exact ones than the plain formula's.
    """
    hidden, weight, labels = example(dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(
        plain(*exact_inputs, labels, softcap=softcap, z_loss=z_loss), exact_inputs
    )
    loss = chunked_cross_entropy(
        hidden, weight, labels, softcap=softcap, z_loss=z_loss, chunk_size=10
    )
    wanted = plain(hidden, weight, labels, softcap=softcap, z_loss=z_loss)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(
        wanted.item(), rel=1e-6 if softcap is None else 5e-3
    )
    ours, theirs = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, wanted))
    for a, b, true in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype and error(a, true) < 1.2 * error(b, true) + 1e-4


def test_autocast():
    hidden, weight, labels = example()
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked_cross_entropy(hidden, weight, labels)
        logits = hidden @ weight.T
    wanted = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-6)
    for a, b in zip(
        *(torch.autograd.grad(x, (hidden, weight)) for x in (ours, wanted)), strict=True
    ):
        assert error(a, b) < 1e-2


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_pieces_divided_by_the_count_of_all(z_loss):
    "num_items_in_batch: the gradient of a batch is the sum of those of its pieces."
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=61, d_model=16, n_heads=2, n_layers=1, d_ff=24, max_seq_len=32)
    )
    ids = torch.randint(61, (4, 20))
    labels = ids.masked_fill(torch.arange(20) < torch.tensor([[1], [5], [9], [16]]), -100)

    def grads(batches, n):
        model.zero_grad()
        for rows in batches:
            model(
                ids[rows],
                labels=labels[rows],
                num_items_in_batch=n,
                return_logits=False,
                z_loss=z_loss,
            ).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    n = (labels[:, 1:] != -100).sum()
    whole = grads([slice(0, 4)], None)
    assert error(grads([slice(0, 1), slice(1, 4)], n), whole) < 1e-6
    assert error(grads([slice(i, i + 1) for i in range(4)], n), whole) < 1e-6


def test_no_tensor_of_all_logits():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.numel())
            return out

    hidden, weight = (
        torch.randn(2048, 8, requires_grad=True),
        torch.randn(4096, 8, requires_grad=True),
    )
    for dtype in (torch.float32, torch.bfloat16):
        with Largest() as seen:
            chunked_cross_entropy(
                hidden.to(dtype),
                weight.to(dtype),
                torch.randint(4096, (2048,)),
                softcap=3.0,
                z_loss=0.1,
            ).backward()
        assert seen.size < 2048 * 4096 / 3


def test_nothing_to_learn_is_not_a_number_and_wrong_labels_are_named():
    hidden, weight, labels = example()
    assert (
        chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction="sum").item()
        == 0
    )
    with pytest.raises(ValueError, match="labels contains 130"):
        chunked_cross_entropy(hidden, weight, labels.clamp(min=0) + 130 - labels.max())


@pytest.mark.parametrize(
    "capability, pays",
    [
        ("DEFAULT", False),
        ("AVX2", False),
        ("AVX512", True),
        ("AVX512_VNNI", True),
        ("SVE256", False),
    ],
)
def test_products_go_to_onednn_only_where_that_was_measured_to_be_faster(
    capability, pays, monkeypatch
):
    from trainkit.model import transformer as layers

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(layers, "onednn_is_exact", lambda: True)
    assert layers.onednn_pays() == pays


def test_ids_that_do_not_exist_are_named_with_their_range():
    check_ids("ids", torch.tensor([[0, 9], [3, 4]]), 10, "look")
    check_ids("ids", torch.zeros(0, 3, dtype=torch.long), 10, "look")
    for wrong in (10, 25, -1):
        with pytest.raises(ValueError, match=f"^ids contains {wrong}, but .* from 0 to 9: look$"):
            check_ids("ids", torch.tensor([0, wrong, 9]), 10, "look")
    with pytest.raises(ValueError, match="contains 12, but"):
        check_ids("ids", torch.tensor([-4, 12]), 10, "look")


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("count", [None, 2])
def test_a_z_loss_by_hand(logits, count):
    "Cross-entropy and 0.1·(log Z)² of the three tokens that are learned, divided by their number."
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=1, d_ff=24))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    labels = ids.clone()
    labels[0, 1] = -100
    out = model(ids, labels=labels, num_items_in_batch=count, return_logits=logits, z_loss=0.1)
    every = model(ids).logits[:, :-1].flatten(0, 1)[1:]
    squares = every.logsumexp(-1).square().sum()
    total = F.cross_entropy(every, torch.tensor([3, 5, 6]), reduction="sum") + 0.1 * squares
    assert torch.allclose(out.loss, total / (count or 3))
    assert torch.allclose(out.squares, squares / (count or 3)) and not out.squares.requires_grad


@pytest.mark.parametrize(("ids", "wrong"), [([0, 5], 5), ([-1, 4], -1), ([0, 4], None), ([], None)])
def test_ids_are_those_of_the_vocabulary(ids, wrong):
    if wrong is None:
        check_ids("labels", torch.tensor(ids), 5, "fix them")
        return
    with pytest.raises(ValueError) as error:
        check_ids("labels", torch.tensor(ids), 5, "fix them")
    assert str(error.value) == (
        f"labels contains {wrong}, but all values must be from 0 to 4: fix them"
    )


@pytest.mark.parametrize(("tokens", "fast"), [(63, False), (64, True), (70, True)])
def test_a_linear_layer_takes_the_faster_product_for_64_tokens_or_more(tokens, fast, monkeypatch):
    "With the values and gradients of the usual one."
    from trainkit.model import transformer

    taken, product = [], transformer._Product

    class Watched:
        @staticmethod
        def apply(*args):
            taken.append(args[0].shape)
            return product.apply(*args)

    monkeypatch.setattr(transformer, "onednn_pays", lambda: True)
    monkeypatch.setattr(transformer, "_Product", Watched)
    torch.manual_seed(0)
    layer = transformer.Linear(4, 3, bias=False)
    x = torch.randn(1, tokens, 4, requires_grad=True)
    y, wanted = layer(x), F.linear(x, layer.weight)
    assert torch.allclose(y, wanted, atol=1e-6) and taken == [(tokens, 4)] * fast
    inputs = x, layer.weight
    slopes = [torch.autograd.grad(out.square().sum(), inputs) for out in (y, wanted)]
    for ours, theirs in zip(*slopes, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_a_gate_lets_through_silu_of_it_times_the_rest(compiled, learned, monkeypatch):
    "2·σ(2)·3 and -1·σ(-1)·4; neither input changes."
    from trainkit.model.transformer import swiglu

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    gate, up = torch.tensor([2.0, -1.0]), torch.tensor([3.0, 4.0])
    with torch.set_grad_enabled(learned):
        y = swiglu(gate, up)
    assert torch.allclose(y, torch.tensor([6 * 0.880797, -4 * 0.268941]), atol=1e-5)
    assert gate.tolist() == [2, -1] and up.tolist() == [3, 4]
