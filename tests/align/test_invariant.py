"Attention in blocks is attention: what `batch_invariant` computes, and its gradients."

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainkit.align.invariant import batch_invariant

SEEN = torch.rand(5, 70, generator=torch.Generator().manual_seed(1)) > 0.4
SEEN[:, 0] = True  # A query that sees nothing has no attention


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    "queries, keys, more",
    [
        (70, 70, dict(is_causal=True)),
        (5, 70, {}),
        (5, 70, dict(scale=0.3)),
        (5, 70, dict(attn_mask=SEEN[None, None])),
        (5, 70, dict(attn_mask=SEEN[None, None].float(), scale=0.1)),
        (1, 3, {}),
    ],
)
def test_attention_in_blocks_is_that_of_torch(queries, keys, more, heads):
    torch.manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, heads, keys, 8), (2, heads, keys, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    goal = torch.randn(2, 4, queries, 8)
    results = []
    for blocks in (False, True):
        with batch_invariant(blocks):
            out = scaled_dot_product_attention(*inputs, enable_gqa=heads < 4, **more)
        results.append([out, *torch.autograd.grad((out * goal).sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
