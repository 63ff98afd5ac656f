"""The transformer against transformers' own, family by family: logits, loss and the gradient of every parameter."""
import copy

import pytest
import torch
import torch.nn.functional as F

from trainkit.model import KVCache, ModelConfig, Transformer, attend, chunked_cross_entropy

transformers = pytest.importorskip('transformers')
HF = dict(vocab_size=61, hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=56,
          max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.3, attn_implementation='sdpa',
          bos_token_id=None, eos_token_id=None, pad_token_id=None)
OURS = dict(vocab_size=61, d_model=32, n_heads=4, n_layers=3, d_ff=56, max_seq_len=64)
LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)

# name -> (transformers' family, changes to its config, changes to ours)
FAMILIES = {
    'llama': ('Llama', dict(num_key_value_heads=4, tie_word_embeddings=False), dict(tie_embeddings=False)),
    'llama, tied, grouped': ('Llama', dict(num_key_value_heads=2, tie_word_embeddings=True), dict(n_kv_heads=2)),
    'llama, one kv head, wide heads': ('Llama', dict(num_key_value_heads=1, head_dim=12, tie_word_embeddings=True),
                                       dict(n_kv_heads=1, head_dim=12)),
    'llama, biases': ('Llama', dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
                      dict(bias='all')),
    'llama, theta': ('Llama', dict(num_key_value_heads=4, rope_parameters=dict(rope_type='default', rope_theta=77.0),
                                   tie_word_embeddings=True), dict(rope_theta=77.0)),
    'llama, linear': ('Llama', dict(num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=dict(
        rope_type='linear', factor=4.0, rope_theta=1e4)), dict(rope_scaling=dict(rope_type='linear', factor=4.0))),
    'llama 3': ('Llama', dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=dict(LLAMA3, rope_theta=5e5)),
                dict(n_kv_heads=2, rope_theta=5e5, rope_scaling=LLAMA3)),
    'mistral, window': ('Mistral', dict(num_key_value_heads=2, sliding_window=6, tie_word_embeddings=False),
                        dict(n_kv_heads=2, layer_windows=[6, 6, 6], tie_embeddings=False)),
    'qwen2': ('Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True), dict(n_kv_heads=2, bias='qkv')),
    'qwen2, windows in the upper layers': (
        'Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5,
                      layer_types=['full_attention', 'sliding_attention', 'sliding_attention']),
        dict(n_kv_heads=2, bias='qkv', layer_windows=[0, 5, 5])),
    'qwen3': ('Qwen3', dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
              dict(n_kv_heads=2, head_dim=16, qk_norm=True)),
}
TOLERANCE = 1e-5


def hf_model(family: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**{**HF, **changes})
    model = getattr(transformers, f'{family}ForCausalLM')(config)
    with torch.no_grad():
        for name, p in model.named_parameters(): # Norms and biases start as ones and zeros, which would hide mistakes
            if 'norm' in name or 'bias' in name: p.add_(torch.randn_like(p) * 0.2)
    return model


def pair(name: str):
    "transformers' model and ours with its weights, which fit by name."
    family, theirs, ours = FAMILIES[name]
    theirs = hf_model(family, **theirs)
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


@pytest.mark.parametrize('name', FAMILIES)
def test_family(name: str) -> None:
    ours, theirs = pair(name)
    ids, labels = batch()
    a, b = ours(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    close(a.logits, b.logits); close(a.loss, b.loss)
    a.loss.backward(); b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    assert set(want) == {n for n, _ in ours.named_parameters()}
    for n, p in ours.named_parameters(): close(p.grad, want[n])
    # The chunked loss is the same loss
    ours.zero_grad()
    chunked = ours(ids, labels=labels, return_logits=False).loss
    chunked.backward()
    close(chunked, b.loss)
    for n, p in ours.named_parameters(): close(p.grad, want[n])


@pytest.mark.parametrize('seed', range(8))
def test_random_shapes(seed: int) -> None:
    "Llama again, with shapes, batch and labels drawn at random."
    draw = lambda *choices: choices[torch.randint(len(choices), ()).item()]
    torch.manual_seed(seed)
    heads, width, layers, vocab, ff = draw(2, 3, 4, 6), 2 * draw(2, 4, 8, 9), draw(1, 2, 5), draw(11, 64, 500), draw(8, 33, 100)
    shared, tied, rows, length = draw(*(n for n in range(1, heads + 1) if heads % n == 0)), draw(True, False), draw(1, 5), draw(2, 17, 40)
    theirs = hf_model('Llama', vocab_size=vocab, hidden_size=heads * width, num_attention_heads=heads, intermediate_size=ff,
                      num_key_value_heads=shared, num_hidden_layers=layers, tie_word_embeddings=tied)
    ours = Transformer(ModelConfig(vocab_size=vocab, d_model=heads * width, n_heads=heads, d_ff=ff, n_kv_heads=shared,
                                   n_layers=layers, tie_embeddings=tied, max_seq_len=64))
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(seed)
    ids = torch.randint(vocab, (rows, length))
    labels = torch.where(torch.rand(rows, length) < 0.3, -100, ids)
    labels[0, -1] = ids[0, -1]
    a, b = ours(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    close(a.logits, b.logits); close(a.loss, b.loss)
    a.loss.backward(); b.loss.backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for n, p in ours.named_parameters(): close(p.grad, want[n])


@pytest.mark.parametrize('name', FAMILIES)
def test_cache_padding_and_packing(name: str) -> None:
    ours, theirs = pair(name)
    ours.eval(); theirs.eval()
    ids, _ = batch()
    with torch.no_grad():
        # Left padding, all at once and in parts with a cache: every real token as transformers has it
        mask = torch.ones_like(ids); mask[0, :7] = 0; mask[2, :1] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        want, real = theirs(input_ids=ids, attention_mask=mask, position_ids=positions).logits, mask.bool()
        close(ours(ids, attention_mask=mask).logits[real], want[real])
        close(ours(ids, attention_mask=mask, position_ids=positions).logits[real], want[real])
        for ends in ([9, 10, 11, 24], [1, 17, 18, 24]):
            cache, parts = KVCache(ours.config.n_layers, 24), []
            for begin, end in zip([0, *ends], ends, strict=False):
                parts.append(ours(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
            close(torch.cat(parts, 1)[real], want[real])
        # A cache that was cut back, as a draft that was refused
        cache = KVCache(ours.config.n_layers, 24)
        ours(ids[:, :15], past_key_values=cache); cache.crop(10)
        close(ours(ids[:, 10:], past_key_values=cache).logits, theirs(input_ids=ids).logits[:, 10:])
        # Two documents in a row (transformers tells them apart only where there is no cache)
        packed = torch.cat((torch.arange(10), torch.arange(14)))[None].expand(3, -1)
        close(ours(ids, position_ids=packed).logits, theirs(input_ids=ids, position_ids=packed, use_cache=False).logits)


def gpt_names(name: str, first: bool) -> str:
    for ours, theirs in {'model.': 'transformer.', 'layers': 'h', 'self_attn.': 'attn.', 'o_proj': 'c_proj',
                         'up_proj': 'c_fc', 'down_proj': 'c_proj', 'input_layernorm': 'ln_1',
                         'post_attention_layernorm': 'ln_2', 'embed_tokens': 'tokens_embed' if first else 'wte',
                         'embed_positions': 'positions_embed' if first else 'wpe', '.norm.': '.ln_f.'}.items():
        name = name.replace(ours, theirs)
    for part in 'qkv': name = name.replace(f'{part}_proj', 'c_attn')
    return name


def from_gpt(name: str, theirs: dict, first: bool):
    x = theirs[gpt_names(name, first)]
    for i, part in enumerate('qkv'):
        if f'{part}_proj' in name: x = x.chunk(3, -1)[i]
    return x.T if x.ndim == 2 and 'proj' in name else x


@pytest.mark.parametrize('family, activation', [('GPT2', 'gelu_tanh'), ('GPT2', 'gelu'), ('OpenAIGPT', 'gelu_tanh')])
def test_gpt(family: str, activation: str) -> None:
    "LayerNorm, learned positions, biases; GPT-1 normalises after the sum."
    first = family == 'OpenAIGPT'
    shape = dict(vocab_size=61, n_embd=32, n_head=4, n_layer=3, n_positions=64, initializer_range=0.3)
    shape |= dict(afn='gelu') if first else dict(activation_function='gelu_new' if activation == 'gelu_tanh' else 'gelu')
    torch.manual_seed(0)
    theirs = getattr(transformers, f'{family}LMHeadModel')(getattr(transformers, f'{family}Config')(**shape))
    for p in theirs.parameters(): p.data.add_(torch.randn_like(p) * 0.1)
    config = ModelConfig.preset('gpt2', **{**OURS, 'd_ff': 128}, activation=activation, pre_norm=not first)
    ours = Transformer(config)
    weights = dict(theirs.named_parameters())
    for name, p in ours.named_parameters(): p.data.copy_(from_gpt(name, weights, first))
    ids, labels = batch()
    a, b = ours.eval()(ids, labels=labels), theirs.eval()(input_ids=ids, labels=labels)
    close(a.logits, b.logits); close(a.loss, b.loss)
    a.loss.backward(); b.loss.backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in ours.named_parameters(): close(p.grad, from_gpt(name, gradients, first))
    if first: return # Its attention draws dropout in another order
    torch.manual_seed(3); a = ours.train()(ids, labels=labels).loss
    torch.manual_seed(3); b = theirs.train()(input_ids=ids, labels=labels).loss
    close(a, b)


def test_softcaps() -> None:
    "Gemma 2's attention function and its rule for logits."
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, requires_grad=True) for h in (4, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    module = torch.nn.Module(); module.num_key_value_groups, module.head_dim = 2, 8
    bias = torch.zeros(9, 9).masked_fill(~mask, float('-inf'))
    want, _ = eager_attention_forward(module, q, k, v, bias[None, None], scaling=8**-0.5, softcap=0.7)
    for given in (None, mask[None, None]):
        got = attend(q, k, v, given, softcap=0.7)
        close(got.transpose(1, 2), want)
        a, b = (torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for out in (got, want))
        for x, y in zip(a, b, strict=True): close(x, y)
    model = Transformer(ModelConfig(**OURS, logit_softcap=0.5, init_std=0.5))
    plain = copy.deepcopy(model); plain.config.logit_softcap = None
    ids, labels = batch()
    out, raw = model(ids, labels=labels), plain(ids).logits
    close(out.logits, 0.5 * torch.tanh(raw / 0.5))
    assert out.logits.abs().max() <= 0.5 < raw.abs().max()
    out.loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    chunked = model(ids, labels=labels, return_logits=False).loss
    chunked.backward(); close(chunked, out.loss)
    for p, g in zip(model.parameters(), want, strict=True): close(p.grad, g)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('vocab, chunk_size', [(300, None), (300, 7), (17, 1), (40_000, None)])
def test_chunked_cross_entropy(dtype, vocab: int, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 30, 16).to(dtype), torch.randn(vocab, 16).to(dtype)
    labels = torch.randint(vocab, (4, 30)); labels[1] = -100; labels[2, ::3] = -100
    results = []
    for loss in (lambda h, w: chunked_cross_entropy(h, w, labels, chunk_size=chunk_size),
                 lambda h, w: F.cross_entropy((h @ w.T).float().flatten(0, 1), labels.flatten())):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = loss(h, w); out.backward()
        assert out.dtype == torch.float32 and h.grad.dtype == w.grad.dtype == dtype
        results.append((out, h.grad.float(), w.grad.float()))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for ours, theirs in zip(*results, strict=True): close(ours, theirs, tolerance)
    with torch.no_grad(): close(chunked_cross_entropy(hidden, weight, labels), results[1][0], tolerance)


def test_small_gradients_survive_fp16() -> None:
    "Under a loss scale, gradients that fp16 could not hold by themselves are right."
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16) * 0.1, torch.randn(300, 16) * 0.1
    labels = torch.randint(300, (64,))
    gradients = []
    for dtype, scale in ((torch.float16, 2.0**14), (torch.float32, 1.0)):
        h = hidden.to(dtype).requires_grad_()
        (chunked_cross_entropy(h, weight.to(dtype), labels, reduction='sum') * scale / 2**20).backward()
        gradients.append(h.grad.double() / scale)
    relative = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert relative < 5e-3, relative


def test_batch_equals_its_pieces() -> None:
    "`num_items_in_batch`: the gradient of three rows is the sum of three rows' gradients, unequal labels included."
    ours, theirs = pair('llama, tied, grouped')
    ids, labels = batch()
    count = (labels[:, 1:] != -100).sum()
    for model in (ours, theirs):
        for row, wanted in zip(ids, labels, strict=True):
            model(input_ids=row[None], labels=wanted[None], num_items_in_batch=count).loss.backward()
    pieces = {n: p.grad.clone() for n, p in ours.named_parameters()}
    for n, p in theirs.named_parameters(): close(pieces[n], p.grad)
    ours.zero_grad()
    ours(ids, labels=labels, return_logits=False).loss.backward()
    for n, p in ours.named_parameters(): close(p.grad, pieces[n], 1e-6)


@pytest.mark.parametrize('frozen', [False, True])
def test_gradient_checkpointing(frozen: bool) -> None:
    "The same gradients, dropout included, with less kept; also where only a late layer learns."
    ids, labels = batch()
    kept, results = [], []
    for again in (False, True):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(**OURS, dropout=0.2, attention_dropout=0.2, gradient_checkpointing=again))
        if frozen:
            model.requires_grad_(False)
            model.model.layers[2].mlp.requires_grad_(True)
            model.model.layers[0].self_attn.q_proj.requires_grad_(True)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            torch.manual_seed(5)
            loss = model(ids, labels=labels, return_logits=False).loss
        loss.backward()
        kept.append(sum(sizes)); results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 1
    for a, b in zip(*results, strict=True): close(a, b, 1e-6)
    assert kept[1] < kept[0] / (1.5 if frozen else 3), kept


def test_autocast_and_half_weights() -> None:
    "bf16 by autocast and by weights: the loss near fp32's, gradients in the weights' own dtype."
    ours, _ = pair('llama, tied, grouped')
    for p in ours.parameters(): p.data.mul_(0.5)
    ids, labels = batch()
    want = ours(ids, labels=labels).loss
    half = copy.deepcopy(ours).to(torch.bfloat16)
    for kwargs in (dict(), dict(return_logits=False)):
        with torch.autocast('cpu', torch.bfloat16): loss = ours(ids, labels=labels, **kwargs).loss
        loss.backward()
        assert loss.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in ours.parameters())
        close(loss, want, 2e-2)
        loss = half(ids, labels=labels, **kwargs).loss
        loss.backward()
        assert loss.dtype == torch.float32 and all(p.grad.dtype == torch.bfloat16 for p in half.parameters())
        close(loss, want, 3e-2)
    assert torch.equal(half.model.frequencies, ours.model.frequencies) # Rounded, far positions would be off


def test_a_wrapped_head_is_called() -> None:
    "An adapter on the head counts in the loss, with and without logits."
    ours, _ = pair('llama')
    ids, labels = batch()
    before = ours(ids, labels=labels).loss
    class Adapted(torch.nn.Module):
        def __init__(self, base): super().__init__(); self.base, self.weight = base, base.weight
        def forward(self, x): return 1.5 * self.base(x)
    ours.lm_head = Adapted(ours.lm_head)
    full, short = ours(ids, labels=labels), ours(ids, labels=labels, return_logits=False)
    close(full.loss, short.loss)
    assert short.logits is None and abs(full.loss - before) > 1e-3


@pytest.mark.slow
def test_compile() -> None:
    "One graph, no breaks, the same gradients."
    ours, _ = pair('llama 3')
    ids, labels = batch()
    for kwargs in (dict(), dict(return_logits=False)):
        ours.zero_grad()
        want = ours(ids, labels=labels, **kwargs).loss; want.backward()
        gradients = [p.grad.clone() for p in ours.parameters()]
        ours.zero_grad()
        got = torch.compile(ours, backend='aot_eager', fullgraph=True)(ids, labels=labels, **kwargs).loss
        got.backward(); close(got, want)
        for p, g in zip(ours.parameters(), gradients, strict=True): close(p.grad, g)


def test_smollm2_shape() -> None:
    "The preset is the real model's shape."
    config = ModelConfig.preset('smollm2-135m')
    theirs = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30,
        intermediate_size=1536, max_position_embeddings=8192, tie_word_embeddings=True)
    with torch.device('meta'):
        want = {n: p.shape for n, p in transformers.LlamaForCausalLM(theirs).named_parameters()}
        got = {n: p.shape for n, p in Transformer(config).named_parameters()}
    assert got == want
