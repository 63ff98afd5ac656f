"The kernels that only a GPU has get the documents and windows that the CPU's attention gets."

import math
import sys
from types import ModuleType

import pytest
import torch
from torch.nn.attention import varlen

from trainkit.model import attention
from trainkit.model.attention import attend, make_mask, make_masks


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
