"The kernels that only a GPU has get the documents and windows that the CPU's attention gets."

import math
import sys
from collections import Counter
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from trainkit.model import attention
from trainkit.model.attention import attend, find_spans, make_mask, make_masks


def kernel(q, k, v, begins_q, begins_k, longest_q, longest_k, scale, window, softcap=0.0):
    "What the kernels compute, one document after the other: (tokens, heads, D)."
    assert torch.equal(begins_q, begins_k) and begins_q.dtype == torch.int32
    sizes = begins_q.diff().tolist()
    assert longest_q == longest_k == max(sizes) and sum(sizes) == len(q)
    pieces = []
    for parts in zip(*(x.split(sizes) for x in (q, k, v)), strict=True):
        one = [x.transpose(0, 1)[None] for x in parts]
        n = one[0].shape[2]
        back, ahead = window
        mask = make_mask(n, n, back + 1 if back >= 0 else 0)
        assert ahead in (0, -1)
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
        out = attention._by_hand(*one, mask, 0.0, softcap or None, scale)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture
def kernels(monkeypatch):
    "In place of those of torch and of the package flash-attn."

    def varlen_attn(q, k, v, *sizes, scale, window_size, enable_gqa, num_splits):
        assert enable_gqa == (q.shape[1] != k.shape[1]) and num_splits == 1
        return kernel(q, k, v, *sizes, scale, window_size)

    def dense(q, k, v, softmax_scale, causal, softcap, window_size, dropout_p):
        rows, length = q.shape[:2]
        begins = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        out = packed(
            *(x.flatten(0, 1) for x in (q, k, v)),
            *(begins, begins, length, length),
            **dict(softmax_scale=softmax_scale, causal=causal, softcap=softcap),
            **dict(window_size=window_size, dropout_p=dropout_p),
        )
        return out.unflatten(0, (rows, length))

    def packed(q, k, v, *sizes, softmax_scale, causal, softcap, window_size, dropout_p):
        assert causal and dropout_p == 0.25
        return kernel(q, k, v, *sizes, softmax_scale, window_size, softcap)

    flash = ModuleType("flash_attn")
    flash.flash_attn_func, flash.flash_attn_varlen_func = dense, packed
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setattr(attention, "need_flash", lambda: None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2]])


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [0, 2, 4])
@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["rows", "documents"])
def test_a_kernel_sees_the_same_tokens(document, window, scale, kernels):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 11, 8, generator=draw) for heads in (4, 2, 2))
    spans = make_masks(11, 11, [window], document=document, dense=0)[window]
    wanted = attend(q, k, v, make_mask(11, 11, window, None, document), scale=scale)
    torch.testing.assert_close(attend(q, k, v, spans, scale=scale), wanted)
    if spans is not None:
        torch.testing.assert_close(attention._varlen(q, k, v, spans, scale), wanted)
    flash = attention._by_flash(q, k, v, spans, 0.25, None, scale)
    torch.testing.assert_close(flash, wanted)
    capped = attend(q, k, v, make_mask(11, 11, window, None, document), softcap=1.5, scale=scale)
    torch.testing.assert_close(attention._by_flash(q, k, v, spans, 0.25, 1.5, scale), capped)
    assert not math.isclose(float(capped.sum()), float(wanted.sum()), rel_tol=1e-6)


# --- masks and spans entry by entry


def sees(row, query, key, window, padding, document):
    "Whether a token may look at another one; padding sees itself."
    allowed = key <= query and (not window or key > query - window)
    if padding is not None:
        allowed = allowed and bool(padding[row, key])
    if document is not None:
        allowed = allowed and bool(document[row, query] == document[row, key])
    return allowed or key == query


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 5), (5, 5), (3, 5), (2, 6)])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 6, 9])
def test_a_mask_entry_by_entry(queries, keys, window):
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])[:, :keys].bool()
    document = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])[:, :keys]
    for pad, doc in ((None, None), (padding, None), (None, document), (padding, document)):
        mask = make_mask(queries, keys, window, pad, doc)
        wanted = torch.tensor(
            [
                [[sees(row, keys - queries + q, k, window, pad, doc) for k in range(keys)]]
                for row in range(2)
                for q in range(queries)
            ]
        ).view(2, 1, queries, keys)
        if mask is None:
            assert pad is None and doc is None and (wanted.all() or queries == keys)
            assert torch.equal(wanted[0, 0], torch.ones(queries, keys).tril(keys - queries).bool())
        else:
            assert torch.equal(mask.expand_as(wanted), wanted)


@pytest.mark.parametrize(
    "documents, padding, lengths",
    [
        ([[0, 0, 1, 1], [1, 1, 1, 2]], None, [2, 2, 3, 1]),
        ([[5, 5, 5, 5], [5, 5, 5, 5]], None, [4, 4]),
        (None, [[0, 0, 1, 1], [1, 1, 1, 1]], [2, 2, 4]),
        (None, [[1, 1, 1, 0], [0, 1, 1, 0]], [3, 1, 1, 2, 1]),
        (None, [[1, 0, 1, 1], [1, 1, 1, 1]], None),
        (None, [[0, 1, 0, 1], [1, 1, 1, 1]], None),
        ([[0, 0, 0, 1], [0, 1, 2, 2]], [[0, 1, 1, 1], [1, 1, 1, 0]], [1, 2, 1, 1, 1, 1, 1]),
    ],
)
def test_documents_become_lengths(documents, padding, lengths):
    spans = find_spans(
        None if documents is None else torch.tensor(documents),
        None if padding is None else torch.tensor(padding).bool(),
    )
    if lengths is None:
        assert spans is None
        return
    assert spans.lengths == lengths
    counts = Counter(lengths)
    assert spans.batches == [(counts[n], n) for n in sorted(counts)]
    starts = np.cumsum([0, *lengths])
    order = [
        int(starts[i]) + place
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i])
        for place in range(lengths[i])
    ]
    if spans.order is None:
        assert order == list(range(len(order))) and spans.order_back is None
    else:
        assert spans.order.tolist() == order
        assert torch.equal(spans.order[spans.order_back], torch.arange(len(order)))


@pytest.mark.parametrize("window", [0, 1, 3, 8, 9, 20, 21])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_windows_in_blocks_are_the_whole_matrix(length, window, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 4) for _ in range(3))
    shapes = []

    def engine(q, k, v, mask, *rest):
        shapes.append((q.shape[2], k.shape[2]))
        return attention._by_hand(q, k, v, mask, *rest)

    found = attention._windowed(engine, q, k, v, attention.Spans(window=window), 0.0, None, None)
    allowed = [[sees(0, i, j, window, None, None) for j in range(length)] for i in range(length)]
    scores = (q @ k.mT / 2).masked_fill(~torch.tensor(allowed), -torch.inf)
    assert torch.allclose(found, scores.softmax(-1) @ v, atol=1e-5)
    if 0 < window < length and length > 8:
        assert shapes == [
            (min(4, length - a), min(a + 4, length) - max(0, a - window + 1))
            for a in range(0, length, 4)
        ]
    else:
        assert len(shapes) == 1


@pytest.mark.parametrize(
    "rows, length, dense, spans", [(1, 4, 16, 0), (1, 5, 24, 1), (2, 3, 17, 1)]
)
def test_large_matrices_become_spans(rows, length, dense, spans):
    document = torch.zeros(rows, length, dtype=torch.long)
    masks = attention.make_masks(length, length, (0, 2), document=document, dense=dense)
    assert all(isinstance(mask, attention.Spans) == bool(spans) for mask in masks.values())
    if spans:
        assert {w: mask.window for w, mask in masks.items()} == {0: 0, 2: 2}
        few = attention.make_masks(1, length, (0,), document=document, dense=0)
        assert not isinstance(few[0], attention.Spans)
    plain = attention.make_masks(length, length, (0, 2, length), dense=1)
    assert plain[0] is None and plain[length] is None
    assert isinstance(plain[2], attention.Spans) and plain[2].lengths is None


@pytest.mark.parametrize("length", [513, 769])
def test_the_last_block_of_a_window_may_be_one_token(length):
    "Its keys are then its whole window, of which it saw the first one only."
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    wanted = attend(q, k, v, make_masks(length, length, (300,), dense=10**9)[300])
    found = attend(q, k, v, make_masks(length, length, (300,), dense=0)[300])
    assert torch.allclose(found, wanted, atol=1e-5)
