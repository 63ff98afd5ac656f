"Generation against transformers, token for token, on both kinds of model and any prompt."

import math

from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.config import ConfigError
from trainkit.model.generation import TextStreamer, ThinkingBudget, document_ids, generate, stream
from trainkit.model.generation import text_to_ids
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.model.generation import (
    SamplingConfig,
    _ModelStep,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)

VOCAB = 99
LLAMA = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_ff=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    max_seq_len=64,
    norm_eps=1e-6,
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)  # Far from ties between the best two logits
    return model


@pytest.fixture(scope="module")
def ours(llama):
    model = Transformer(ModelConfig(**LLAMA)).eval()
    model.load_state_dict(llama.state_dict())
    return model


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def theirs(model, ids, **kwargs):
    ids = torch.as_tensor(ids)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **kwargs
    )


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_that_of_transformers_on_both_models(llama, ours, gpt2, penalty):
    prompts = torch.randint(VOCAB, (5, 9), generator=torch.Generator().manual_seed(2))
    for peer, models in ((llama, (llama, ours)), (gpt2, (gpt2,))):
        want = theirs(peer, prompts, max_new_tokens=50, repetition_penalty=penalty)
        for model in models:
            got = generate(model, prompts, 50, temperature=0, repetition_penalty=penalty)
            assert got.dtype == prompts.dtype and torch.equal(got, want)


@pytest.mark.parametrize("kind", ["llama", "ours", "gpt2"])
def test_without_a_cache_all_is_read_again_and_the_text_is_the_same(request, kind, monkeypatch):
    "Of rows of unequal lengths, two of them alike; and by a config of samples."
    from trainkit.recipes.evaluation import make_sampler

    model, seen, forward = request.getfixturevalue(kind), [], None
    rows = [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5]]
    want = generate(model, rows, 12, temperature=0)
    forward = model.forward
    from functools import wraps

    @wraps(forward)
    def watched(*args, **kwargs):
        seen.append((kwargs["input_ids"].shape[1], kwargs["use_cache"], kwargs["past_key_values"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    assert generate(model, rows, 12, temperature=0, use_cache=False) == want
    assert seen == [(5 + i, False, None) for i in range(12)]
    seen.clear()

    class Letters:  # One for each id
        def encode(self, text):
            return [ord(c) - 32 for c in text]

        def decode(self, ids, **_):
            return "".join(chr(i + 32) for i in ids)

    warned = [
        make_sampler(
            Letters(), ["abc"], SamplingConfig(max_new_tokens=6, temperature=0, use_cache=keep)
        )(model, 0)
        for keep in (True, False)
    ]
    assert warned[0] == warned[1] and [n for n, *_ in seen[-6:]] == [*range(3, 9)]
    assert ["".join(stream(model, "abc", 6, 0, tokenizer=Letters(), use_cache=False))] == [
        warned[0][0][1]
    ]
    with pytest.raises(ValueError, match="compiled step"):
        generate(model, rows, 2, compile="eager", use_cache=False)
    with pytest.warns(UserWarning, match="use_cache is False"):
        generate(model, rows[:1], 2, weights="bfloat16", use_cache=False)


def test_eos_and_padding_are_those_of_transformers(llama, ours):
    prompts = torch.randint(VOCAB, (16, 5), generator=torch.Generator().manual_seed(3))
    free = theirs(llama, prompts, max_new_tokens=40)
    eos = (
        free[:, 5:].flatten().bincount(minlength=VOCAB).topk(2).indices.tolist()
    )  # Two ids that rows do reach
    want = llama.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    assert (want[:, -1] == eos[0]).any()
    for model in (llama, ours):
        assert torch.equal(generate(model, prompts, 40, temperature=0, eos_token_id=eos), want)


def test_eos_comes_from_the_generation_config_and_can_be_turned_off(llama):
    prompt = torch.tensor([[1, 2, 3]])
    free = generate(llama, prompt, 20, temperature=0)
    llama.generation_config.eos_token_id = free[0, 6].item()
    try:
        assert generate(llama, prompt, 20, temperature=0).shape[1] <= 7
        assert torch.equal(generate(llama, prompt, 20, temperature=0, eos_token_id=()), free)
    finally:
        llama.generation_config.eos_token_id = None


@pytest.mark.parametrize("kind", ["llama", "ours", "gpt2"])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(request, kind):
    model, rng = request.getfixturevalue(kind), torch.Generator().manual_seed(4)
    rows = [torch.randint(VOCAB, (n,), generator=rng).tolist() for n in (1, 13, 4, 7, 13)]
    for knobs in (dict(), dict(repetition_penalty=1.5), dict(eos_token_id=[5, 17, 40])):
        together = generate(model, rows, 25, temperature=0, **knobs)
        assert together == [generate(model, row, 25, temperature=0, **knobs) for row in rows]
        for row, out in zip(rows, together, strict=True):
            assert out[: len(row)] == row


def test_ragged_rows_are_those_of_transformers_alone(llama, ours):
    for row, out in zip(
        rows := [[3], [9, 8, 7, 6], [1, 2]], generate(ours, rows, 30, temperature=0), strict=True
    ):
        assert out == theirs(llama, [row], max_new_tokens=30)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_number_formats(dtype):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**LLAMA)).to(dtype)
    a, b = (generate(model, [[1, 2, 3], [4]], 20, top_k=5, seed=7) for _ in range(2))
    assert a == b and {len(row) for row in a} == {23, 21}


def test_post_norm_windows_and_learned_positions():
    for knobs in (
        dict(pre_norm=False, init_std=0.3),
        dict(layer_windows=[6, 0]),
        dict(position="learned", norm="layernorm", activation="gelu"),
        dict(attn_softcap=5.0, logit_softcap=9.0),
        dict(qk_norm=True),
    ):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(**{**LLAMA, **knobs})).eval()
        rows, new = [[1, 2, 3, 4, 5], [6, 7]], 20
        got = generate(model, rows, new, temperature=0)
        for row, out in zip(rows, got, strict=True):  # Without cache, without batch
            ids = torch.tensor([row])
            for _ in range(new):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            assert out == ids[0].tolist()


def test_sampling_follows_the_distribution(ours):
    "One step from one prompt, 40,000 rows: a chi-square test against the model's probabilities."
    n, knobs = 40_000, dict(temperature=0.7, top_k=12, top_p=0.95)
    with torch.no_grad():
        logits = ours(torch.tensor([[5, 6]])).logits[:, -1]
    want = keep_top_p(keep_top_k(logits / 0.7, 12), 0.95).softmax(-1)[0]
    got = generate(ours, torch.tensor([[5, 6]]).expand(n, -1), 1, seed=0, **knobs)[:, -1].bincount(
        minlength=VOCAB
    )
    assert (got[want == 0] == 0).all()
    possible = want > 0
    chi2 = ((got - n * want)[possible].square() / (n * want)[possible]).sum().item()
    assert 3 <= possible.sum() <= 12 and chi2 < possible.sum() + 5 * math.sqrt(2 * possible.sum())


def test_seed_and_global_state(ours):
    prompt = torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a, b, c = (generate(ours, prompt, 30, seed=s) for s in (1, 1, 2))
    free = [generate(ours, prompt, 30) for _ in range(2)]
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(*free)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(
        generate(ours, prompt, 10, seed=1), a[:, :13]
    )  # A longer text begins like the shorter one


def test_models_that_name_their_cache_differently_keep_it(llama):
    "From transformers 5.24 on, models call `past_key_values` `cache`."
    read = []

    class Renamed(transformers.LlamaForCausalLM):
        def forward(self, input_ids, cache=None, attention_mask=None, **more):
            read.append(input_ids.shape[1])
            out = super().forward(input_ids, attention_mask, past_key_values=cache, **more)
            return SimpleNamespace(logits=out.logits, cache=out.past_key_values)

    renamed = Renamed(llama.config).eval()
    renamed.load_state_dict(llama.state_dict())
    prompts = [[1, 2, 3, 4], [5, 6]]
    assert generate(renamed, prompts, 5, temperature=0) == generate(
        llama, prompts, 5, temperature=0
    )
    assert read[0] == 4 and {*read[1:]} == {1}


def test_the_context_is_never_exceeded(llama, ours, gpt2):
    for model in (llama, ours, gpt2):
        assert generate(
            model, torch.ones(1, 60, dtype=torch.int64), 100, temperature=0, eos_token_id=()
        ).shape == (1, 64)
        assert len(generate(model, [1] * 63, 100, temperature=0)) == 64
        rows = generate(model, [[1] * 60, [1]], 100, temperature=0)
        assert [len(row) for row in rows] == [64, 64]  # Each row has a context of its own
        with pytest.raises(ValueError, match="keep the last 63 at most"):
            generate(model, [1] * 64)


def test_transformers_processors_work_as_ours(ours, llama):
    prompt = torch.tensor([[1, 2, 3], [7, 7, 7]])
    ban = transformers.NoRepeatNGramLogitsProcessor(2)
    want = theirs(llama, prompt, max_new_tokens=40, no_repeat_ngram_size=2)
    assert torch.equal(generate(ours, prompt, 40, temperature=0, processors=[ban]), want)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_equal_transformers(data):
    size, rows = data.draw(st.sampled_from([2, 17, 200, 3000])), data.draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = data.draw(st.floats(0.01, 30)) * torch.randn(
        rows, size, generator=rng, dtype=torch.float64
    )
    ids = torch.randint(size, (rows, 8), generator=rng)
    k, p = data.draw(st.integers(1, size + 5)), data.draw(st.floats(1e-6, 0.9999))
    penalty = data.draw(st.floats(0.1, 5))
    assert torch.equal(keep_top_k(logits, k), transformers.TopKLogitsWarper(k)(ids, logits))
    assert torch.equal(keep_top_p(logits, p), transformers.TopPLogitsWarper(p)(ids, logits))
    assert torch.equal(keep_min_p(logits, p), transformers.MinPLogitsWarper(p)(ids, logits))
    assert torch.equal(
        penalize_repetition(logits, ids, penalty),
        transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits),
    )


def test_a_nucleus_may_be_large():
    "Flat logits: most of the vocabulary belongs to it."
    logits = 0.1 * torch.randn(
        2, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    logits[1] *= 100  # And in one batch with a row where it is small
    for p in (0.03, 0.2, 0.99):
        nucleus = keep_top_p(logits, p)
        assert (
            torch.equal(nucleus, transformers.TopPLogitsWarper(p)(None, logits))
            and nucleus[1].isfinite().sum() < 200 * p + 9
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(2**-24, 1))
def test_draw_never_takes_what_was_cut(seed, u):
    logits = keep_top_k(8 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed)), 3)
    for each in (u, 1.0, 2**-24):
        assert logits[0, draw(logits, torch.tensor([each]))].isfinite().all()


class Bytes:
    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)),
    st.lists(st.text(min_size=1, max_size=3), max_size=1),
)
def test_pieces_join_to_the_text_up_to_a_stop_string(data, stop):
    pieces, text = TextStreamer(Bytes(), [104, 105], stop), data.decode(errors="replace")
    shown = [pieces.push(i) for i in data]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)
    cut = text.find(stop[0]) if stop and stop[0] in text else len(text)
    assert "".join(shown) + pieces.finish() == text[:cut] and pieces.stopped == (cut < len(text))


def test_pieces_with_a_tokenizer_that_joins_words():
    "As in sentencepiece, a leading space belongs to its word and is dropped at a text's start."

    class Words:
        words = ["▁Hello", "▁world", "!", "▁again"]

        def decode(self, ids):
            return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    pieces = TextStreamer(Words(), [0])
    assert [pieces.push(i) for i in (1, 2, 3)] == [" world", "!", " again"]


class Emoji(Bytes):
    "A model that writes the same text whatever it is asked."

    def __init__(self, text):
        self.bytes = list(text.encode())

    def processor(self, start):
        def force(ids, logits):
            logits = torch.full_like(logits, -torch.inf)
            logits[:, self.bytes[ids.shape[1] - start]] = 0
            return logits

        return force


def test_stream_shows_whole_characters_and_stops():
    model = Transformer(ModelConfig(**{**LLAMA, "vocab_size": 256})).eval()
    tokenizer = Emoji("naïve 😀 — stop here")
    options = dict(
        max_new_tokens=len(tokenizer.bytes),
        temperature=0,
        tokenizer=tokenizer,
        processors=[tokenizer.processor(2)],
    )
    pieces = list(stream(model, "ab", **options))
    assert "".join(pieces) == "naïve 😀 — stop here" and "😀" in pieces and all(pieces)
    assert "".join(stream(model, "ab", stop=" stop", **options)) == "naïve 😀 —"
    assert generate(model, "ab", stop=[" stop", "x"], **options) == "abnaïve 😀 —"
    assert generate(model, ["ab", "cd"], stop=" stop", **options) == [
        "abnaïve 😀 —",
        "cdnaïve 😀 —",
    ]
    ids = generate(model, list(b"ab"), stop=" stop", **options)
    assert bytes(ids).decode() == "abnaïve 😀 — stop"
    assert (
        bytes(stream(model, list(b"ab"), **{**options, "tokenizer": None})).decode()
        == "naïve 😀 — stop here"
    )


def test_texts_of_a_batch_end_each_in_its_place(ours):
    "Rows that have ended write nothing more, while the others continue."

    class Letters:
        def encode(self, text):
            return [ord(c) - 32 for c in text]

        def decode(self, ids):
            return "".join(chr(i + 32) for i in ids)

    prompts, free = ["abc", "x", "Hello there"], dict(temperature=0, tokenizer=Letters())
    ends = [
        ord(generate(ours, prompt, 12, eos_token_id=(), **free)[len(prompt) + n]) - 32
        for prompt, n in zip(prompts, (2, 5, 9), strict=True)
    ]
    texts = generate(ours, prompts, 40, eos_token_id=ends, **free)
    assert texts == [generate(ours, prompt, 40, eos_token_id=ends, **free) for prompt in prompts]
    assert texts == [
        prompt + "".join(stream(ours, prompt, 40, eos_token_id=ends, **free)) for prompt in prompts
    ]
    assert len({len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)}) > 1


def test_no_work_is_done_for_nothing(ours):
    "Logits of the last position only, one new token a step, and no step after the end."
    seen = []
    hook = ours.register_forward_hook(
        lambda m, args, kwargs, output: seen.append(
            (kwargs["input_ids"].shape[1], output.logits.shape[1])
        ),
        with_kwargs=True,
    )
    try:
        generate(ours, [1, 2, 3, 4], 5, temperature=0)
        assert seen == [(4, 1)] + [(1, 1)] * 4
        tokenizer = Emoji("one stop and more")
        steps = []

        def count(ids, logits):
            steps.append(1)
            return logits

        model = Transformer(ModelConfig(**{**LLAMA, "vocab_size": 256})).eval()
        list(
            stream(
                model,
                "ab",
                17,
                temperature=0,
                tokenizer=tokenizer,
                stop="stop",
                processors=[tokenizer.processor(2), count],
            )
        )
        assert len(steps) == len("one stop")
    finally:
        hook.remove()


def test_modes_come_back_even_after_an_error(ours):
    ours.train()
    ours.model.layers[0].eval()

    def broken(ids, logits):
        raise RuntimeError("broken")

    try:
        with pytest.raises(RuntimeError, match="broken"):
            generate(ours, [1], processors=[broken])
        assert (ours.training, ours.model.layers[0].training, ours.model.layers[1].training) == (
            True,
            False,
            True,
        )
    finally:
        ours.eval()


def test_no_graph_is_kept(ours):
    seen = []

    def look(ids, logits):
        seen.append(logits.requires_grad)
        return logits

    generate(ours, [1, 2], 3, processors=[look])
    assert seen == [False] * 3 and torch.is_grad_enabled()


def test_bad_input(ours):
    for error, words, prompt, knobs in [
        (ValueError, "prompt 0 is empty", [], {}),
        (ValueError, "prompt 1 is empty", [[1], []], {}),
        (ValueError, "prompt 0 is empty", "", dict(tokenizer=Bytes())),
        (ValueError, "the id 99, but ids go from 0 to 98", [98, 99], {}),
        (ValueError, "the id -1", [-1], {}),
        (ValueError, "pass tokenizer=", "text", {}),
        (ValueError, "need a tokenizer", [1], dict(stop="a")),
        (ValueError, "stop contains ''", [1], dict(stop="", tokenizer=Bytes())),
        (TypeError, "float", torch.ones(1, 2), {}),
        (TypeError, "input_ids", transformers.BatchEncoding({"input_ids": [[1]]}), {}),
        (ConfigError, "temperature = -0.1", [1], dict(temperature=-0.1)),
        (ConfigError, "temperature = nan", [1], dict(temperature=math.nan)),
        (ConfigError, "top_p = 0", [1], dict(top_p=0.0)),
        (ConfigError, "top_p = 1.01", [1], dict(top_p=1.01)),
        (ConfigError, "min_p = 2", [1], dict(min_p=2)),
        (ConfigError, "top_k = -3", [1], dict(top_k=-3)),
        (ConfigError, "repetition_penalty = 0", [1], dict(repetition_penalty=0)),
        (ConfigError, "max_new_tokens = 0", [1], dict(max_new_tokens=0)),
        (ConfigError, "seed = -1", [1], dict(seed=-1)),
    ]:
        with pytest.raises(error, match=words):
            generate(ours, prompt, **knobs)
        with pytest.raises(error, match=words):
            stream(ours, prompt, **knobs)  # At the call, not at the first piece
    with pytest.raises(ValueError, match="one prompt, not 2"):
        stream(ours, [[1], [2]])


def test_broken_weights_are_an_error(ours):
    with torch.no_grad():
        sick = Transformer(ours.config).eval()
    sick.lm_head.weight.data[3] = torch.nan
    for temperature in (0, 1):
        with pytest.raises(FloatingPointError, match="nan"):
            generate(sick, [1], temperature=temperature)
    logits = torch.full((2, 9), -torch.inf)
    with pytest.raises(FloatingPointError, match="left no token"):
        choose(logits, torch.ones(2, 1, dtype=torch.int64), SamplingConfig(), torch.ones(2))


# What the knobs of the families change in a step; each must be the same with a plan as without
FAMILIES = {
    "llama": {},
    "mha": dict(n_kv_heads=4),
    "mqa": dict(n_kv_heads=1),
    "odd": dict(vocab_size=101, d_model=30, head_dim=6, d_ff=70),
    "llama3": dict(
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        )
    ),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
    "yarn": dict(
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "mistral": dict(layer_windows=[6, 6]),
    "qwen2": dict(bias="qkv", layer_windows=[0, 5]),
    "qwen3": dict(qk_norm=True, head_dim=16),
    "gpt2": dict(
        norm="layernorm",
        position="learned",
        activation="gelu_tanh",
        bias="all",
        n_kv_heads=4,
        dropout=0.1,
    ),
    "post": dict(pre_norm=False, init_std=0.3),
    "relu2": dict(activation="relu2", tie_embeddings=True),
    "gemma2": dict(
        norm="rmsnorm1p",
        sandwich_norm=True,
        activation="geglu",
        scale_embeddings=True,
        query_pre_attn_scalar=20.0,
        attn_softcap=5.0,
        logit_softcap=9.0,
        layer_windows=[6, 0],
    ),
    "gemma3": dict(layer_windows=[6, 0], layer_rope_theta=[1e2, 1e4], qk_norm=True),
    "smollm3": dict(layer_rope_theta=[0.0, 1e4]),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "rows", [[[1, 2, 3]], [[1, 2, 3], [4], [5, 6]], [[i % 40, 7] for i in range(16)]]
)
def test_a_plan_writes_what_the_model_writes(name, rows):
    from trainkit.model.decoding import unsupported_reason

    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**LLAMA, **FAMILIES[name]})).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
    assert unsupported_reason(model) == ""
    greedy = generate(
        model, rows, 30, temperature=0, fast=False
    )  # longer than windows of 5, 6 and 8
    for weights in (None, "packed"):
        assert generate(model, rows, 30, temperature=0, weights=weights) == greedy
    a, b = (
        generate(model, rows, 12, fast=fast, seed=1, temperature=0.7, repetition_penalty=1.1)
        for fast in (True, False)
    )
    assert a == b


SOME = (
    "qwen2",
    "gpt2",
    "gemma2",
)  # Between them every knob that a step compiles otherwise; tracing is slow


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SOME)) for n in FAMILIES]
)
def test_a_compiled_step_writes_what_the_model_writes(name):
    "Traced as for the compiler; 50 tokens, so that windows of 5 and 6 move, with and without gaps."
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**LLAMA, **FAMILIES[name]})).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
    for rows in ([[1, 2, 3]], [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12]]):
        for knobs in (dict(temperature=0), dict(seed=1, temperature=0.7, repetition_penalty=1.1)):
            assert generate(model, rows, 50, compile="eager", **knobs) == generate(
                model, rows, 50, fast=False, **knobs
            )


def test_a_compiled_step_is_kept_and_is_given_up(ours, llama, monkeypatch):
    import trainkit.model.decoding

    steps, original = [], trainkit.model.decoding.CompiledStep.__init__
    monkeypatch.setattr(
        trainkit.model.decoding.CompiledStep,
        "__init__",
        lambda self, *args: (steps.append(args[2:4]), original(self, *args))[1],
    )
    want = generate(ours, [1, 2], 40, temperature=0)
    with torch.no_grad():
        sick = Transformer(ours.config).eval()
    good = generate(sick, [1, 2], 40, temperature=0)
    for _ in range(2):
        assert generate(sick, [1, 2], 40, temperature=0, compile="eager") == good
    assert steps == [(1, 64)]  # The second text made none
    sick.model.layers[0].self_attn.v_proj.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError):
        generate(sick, [1, 2, 3, 4], temperature=0, compile="eager")
    sick.model.layers[0].self_attn.v_proj.weight.data[0] = 0
    assert generate(sick, [1, 2], 40, temperature=0, compile="eager") == generate(
        sick, [1, 2], 40, temperature=0
    )  # No NaN is left behind
    assert generate(ours, [1, 2], 40, temperature=0, compile="eager") == want
    before, other = len(steps), generate(ours, [3, 4], 40, temperature=0)
    both = [stream(ours, prompt, 40, temperature=0, compile="eager") for prompt in ([1, 2], [3, 4])]
    assert (
        list(zip(*both, strict=True)) == list(zip(want[2:], other[2:], strict=True))
        and len(steps) == before + 1
    )  # Each has its own cache
    with pytest.warns(UserWarning, match="compile is left out: LlamaForCausalLM is not"):
        assert generate(llama, [1, 2], 40, temperature=0, compile=True) == want
    with pytest.warns(UserWarning, match="a compiled step reads the weights"):
        assert generate(ours, [1, 2], 40, temperature=0, compile="eager", weights="int8") == want

    def broken(*args):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(trainkit.model.decoding, "fixed_step", broken)
    with pytest.warns(UserWarning, match="compile is left out: .*"):
        assert generate(ours, [1] * 20, 44, temperature=0, compile="aot_eager") == generate(
            ours, [1] * 20, 44, temperature=0
        )
    with pytest.raises(ValueError, match="must be True, False or one of"):
        stream(ours, [1], compile="inducter")


def test_a_plan_is_used_and_is_given_up(ours):
    from trainkit.model.decoding import DecodePlan

    steps, calls = [], []
    original = DecodePlan.step
    DecodePlan.step = lambda self, ids: (steps.append(1), original(self, ids))[1]
    try:
        generate(ours, [1, 2], 6, temperature=0)
        assert len(steps) == 5
        hook = ours.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
        generate(ours, [1, 2], 6, temperature=0)
        hook.remove()
        assert len(steps) == 5 and len(calls) == 6  # A hook sees every token
        with pytest.warns(UserWarning, match="weights='int8' is ignored: fast is False"):
            generate(ours, [1], 3, fast=False, weights="int8")
        with pytest.raises(ValueError, match="packed, bfloat16, int8"):
            generate(ours, [1], 3, weights="int3")
    finally:
        DecodePlan.step = original


def test_a_step_reads_the_weights_as_they_are_now(ours):
    "No copy survives a call: a model that trains on speaks with what it has learned."
    before = generate(ours, [1, 2, 3], 30, temperature=0)
    with torch.no_grad():
        ours.lm_head.weight.neg_()
    try:
        assert (
            generate(ours, [1, 2, 3], 30, temperature=0)
            == generate(ours, [1, 2, 3], 30, temperature=0, fast=False)
            != before
        )
    finally:
        with torch.no_grad():
            ours.lm_head.weight.neg_()


def test_memory_is_that_of_the_cache(monkeypatch):
    "A long text adds the bytes of the cache, with a window and without, and nothing else."
    import trainkit.model.generation

    caches, original = [], trainkit.model.generation.KVCache
    monkeypatch.setattr(
        trainkit.model.generation,
        "KVCache",
        lambda *args: caches.append(original(*args)) or caches[-1],
    )
    for windows, room in (([8, 8], 40), (None, 250)):
        model = Transformer(
            ModelConfig(**{**LLAMA, "max_seq_len": 300, "layer_windows": windows})
        ).eval()
        generate(model, [[1, 2], [3]], 249, temperature=0)
        stores = [t.untyped_storage().nbytes() for t in caches[-1].keys + caches[-1].values]
        assert (
            caches[-1].length == 250 and stores == [2 * 2 * room * 8 * 4] * 4
        )  # rows, heads, tokens, width, bytes
        assert caches[-1].nbytes == sum(stores)


@pytest.mark.parametrize("kind", ["llama", "ours"])
def test_lengths_are_constrained_as_by_transformers(request, llama, kind):
    model, prompts = (
        request.getfixturevalue(kind),
        torch.randint(VOCAB, (16, 5), generator=torch.Generator().manual_seed(3)),
    )
    free = theirs(llama, prompts, max_new_tokens=40)
    eos = free[:, 5:].flatten().bincount(minlength=VOCAB).topk(2).indices.tolist()
    want = llama.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=40,
        min_new_tokens=12,
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    got = generate(model, prompts, 40, temperature=0, min_new_tokens=12, eos_token_id=eos)
    assert (
        torch.equal(got, want)
        and not torch.isin(got[:, 5:17], torch.tensor(eos)).any()
        and torch.isin(got, torch.tensor(eos)).any()
    )


def test_a_text_cannot_forge_a_control_token():
    """Our tokenizer and one of transformers refuse the same texts wherever a prompt is read.

    Ids are used as they are.
    """
    from trainkit.align.rl import RLConfig
    from trainkit.align.rollouts import Rollouts
    from trainkit.eval.evaluator import ask_row
    from trainkit.eval.lm_eval import HarnessBackend
    from trainkit.eval.scoring import score_choices, score_texts
    from trainkit.interop.hf_bridge import fast_tokenizer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    native = BPETokenizer.train(
        ["spell zero and one and two"], 266, special_tokens=["<|end|>", "<|user|>"], progress=False
    )
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=native.vocab_size, d_model=32, d_ff=64, n_layers=1, n_heads=2, max_seq_len=64
        )
    ).eval()
    forged = "one<|user|>two"
    theirs = fast_tokenizer(native)
    for tokenizer in (native, theirs):
        assert native.special_tokens["<|user|>"] in (
            tokenizer.encode(forged, "all") if tokenizer is native else tokenizer.encode(forged)
        )
        readers = (
            lambda text, tokenizer=tokenizer: generate(model, text, 2, tokenizer=tokenizer),
            lambda text, tokenizer=tokenizer: HarnessBackend(model, tokenizer)._ids(text),
            lambda text, tokenizer=tokenizer: Rollouts(
                model,
                tokenizer,
                [text],
                lambda completions, **_: [0.0] * len(completions),
                RLConfig(max_completion_length=4),
            ),
            lambda text, tokenizer=tokenizer: ask_row(dict(prompt=text, completion="x"), tokenizer),
        )
        for read in readers:
            read("one two")
            with pytest.raises(ValueError, match=r"contains the special token '<\|user\|>'"):
                read(forged)
        # What is scored is read as in training: the mark is ordinary text
        ids = document_ids(forged, tokenizer)
        assert ids == text_to_ids(forged, tokenizer, plain=True)
        [score] = score_texts(model, tokenizer, [forged])
        assert score.tokens == len(ids) - 1
        [choices] = score_choices(model, tokenizer, [(forged, ["a", "b"])])
        assert len(choices) == 2
        # And what was typed on purpose is the token
        assert native.special_tokens["<|user|>"] in text_to_ids(forged, tokenizer, special=True)
        assert not {*ids} & {*native.special_tokens.values()} and tokenizer.decode(ids) == forged
        assert text_to_ids("one two", tokenizer) == native.encode("one two")


def test_a_character_that_a_tokenizer_does_not_know_is_no_special_token():
    "Unless the text spells out the name of the unknown token; others are never written by a text."
    names = {0: "<unk>", 1: "<end>", 2: "a", 3: "b"}
    marks = {"?": 0, "U": 0, "E": 1}

    class Tokenizer:
        added_tokens_decoder = {
            i: type("Token", (), {"special": i < 2, "__str__": lambda self, i=i: names[i]})()
            for i in range(3)
        }
        unk_token_id = 0

        def encode(self, text, add_special_tokens=True):
            text = text.replace("<unk>", "U").replace("<end>", "E")
            ids = [marks.get(c, 2 + (c == "b")) for c in text]
            return [*ids, 1] if add_special_tokens else ids

    assert text_to_ids("ab", Tokenizer()) == [2, 3, 1]
    assert text_to_ids("a?b", Tokenizer()) == [2, 0, 3, 1]
    for text in ("a<unk>", "a<end>b"):
        with pytest.raises(ValueError, match="the text contains the special token '<...>'"):
            text_to_ids(text, Tokenizer())


class _Bytes:
    eos_token_id = None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_thought_is_closed_when_its_budget_is_used_up(budget):
    "Alone, in a batch and streamed; a text without a thought is left alone."
    tokenizer = _Bytes()
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=256, d_model=16, d_ff=32, n_layers=1, n_heads=2, max_seq_len=64)
    ).eval()
    prompts = ["q <think>\n", "longer <think>", "none"]
    how = dict(temperature=0, tokenizer=tokenizer, eos_token_id=(), fast=False)
    free = generate(model, prompts, 30, **how)
    closed = generate(model, prompts, 30, thinking_budget=budget, **how)
    for prompt, before, after in zip(prompts, free, closed, strict=True):
        assert after == generate(model, prompt, 30, thinking_budget=budget, **how)
        if prompt == "none":
            assert after == before
            continue
        ids = tokenizer.encode(after[len(prompt) :])
        assert tokenizer.decode(ids[budget:]).startswith("\n</think>\n\n") or budget
        assert "\n</think>\n\n" in after and after[: len(prompt)] == prompt
    pieces = stream(model, prompts[0], 30, thinking_budget=budget, **how)
    assert "".join(pieces) == closed[0][len(prompts[0]) :]
    with pytest.raises(ValueError, match="thinking_budget needs a tokenizer"):
        generate(model, [1, 2], 5, thinking_budget=1)
    with pytest.raises(ValueError, match="at_least"):
        ThinkingBudget(tokenizer, 1, at_least=2)
    longer = ThinkingBudget(tokenizer, 9, at_least=9)
    out = generate(model, prompts[0], 30, processors=[longer], **how)
    assert "<" not in out[len(prompts[0]) :][:4]


@pytest.mark.parametrize("kind", ["llama", "ours", "learned"])
@pytest.mark.parametrize("options", [{}, dict(fast=False), dict(use_cache=False)], ids=str)
def test_a_long_neighbour_cuts_no_answer(request, kind, options):
    "Each row ends where its own context of 64 tokens is full, or at EOS, as it does alone."
    if kind == "learned":
        shape = dict(LLAMA, position="learned", layer_windows=[7, 0])
        torch.manual_seed(3)
        model = Transformer(ModelConfig(**shape)).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.4)
    else:
        model = request.getfixturevalue(kind)
    generator = torch.Generator().manual_seed(4)
    sizes = (3, 50, 63, 50, 30)
    rows = [torch.randint(VOCAB, (size,), generator=generator).tolist() for size in sizes]
    texts = generate(model, rows, 200, temperature=0, eos_token_id=(), **options)
    assert [len(text) for text in texts] == [64] * 5
    for eos in ((), 7):
        got = generate(model, rows, 200, temperature=0, eos_token_id=eos, **options)
        assert got == [generate(model, row, 200, temperature=0, eos_token_id=eos) for row in rows]
    limited = generate(model, rows, 20, temperature=0, eos_token_id=(), **options)
    assert limited == [text[: size + 20] for text, size in zip(texts, sizes, strict=True)]


def test_the_first_draws_do_not_depend_on_the_room_of_the_others(ours):
    rows = [[1, 2, 3], [4] * 50]
    cut, whole = (generate(ours, rows, n, seed=5, eos_token_id=()) for n in (14, 60))
    assert [len(text) for text in cut] == [17, 64] and [len(text) for text in whole] == [63, 64]
    assert whole[0][:17] == cut[0] and whole[1] == cut[1]


@pytest.mark.parametrize("count", [3, 11])  # More than 8 rows: those that have ended are left out
def test_quantized_steps_read_no_row_again(ours, count, monkeypatch):
    "What they wrote has other numbers than the same text as a prompt."
    sizes = [60 - 5 * i for i in range(count)]
    rows = [[i + 1] * size for i, size in enumerate(sizes)]
    options = dict(temperature=0, eos_token_id=(), weights="int8")
    calls = []
    read = _ModelStep.read

    def counted(*args):
        calls.append(1)
        return read(*args)

    monkeypatch.setattr(_ModelStep, "read", counted)
    texts = generate(ours, rows, 100, **options)
    assert len(calls) == 1 and [len(text) for text in texts] == [64] * count
    assert texts == [generate(ours, row, 100, **options) for row in rows]


def test_a_row_whose_constraint_is_complete_ends_before_its_least_length(ours):
    def only_eos(ids, logits):
        return logits.index_fill(1, torch.tensor([i for i in range(VOCAB) if i != 7]), -torch.inf)

    options = dict(min_new_tokens=5, eos_token_id=7, processors=[only_eos])
    assert generate(ours, [1, 2], 9, temperature=0, **options) == [1, 2, 7]


def test_invalid_bytes_are_released_in_time():
    "A streamer decodes a few ids at a time, however many of them are no characters."

    class Bytes:
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return bytes(ids).decode(errors="replace")

    for data in (b"a" + b"\x80" * 300 + "b€".encode(), b"\xe2\x82" * 200, b"\xe6\x97\xa5" * 90):
        tokenizer = Bytes()
        streamer = TextStreamer(tokenizer)
        text = "".join(streamer.push(byte) for byte in data) + streamer.finish()
        assert text == data.decode(errors="replace") and tokenizer.longest < 60


# --- the parts of fast decoding


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("sizes", [[63], [64], [65], [130, 64, 7], [1, 200]])
def test_products_of_several_layers_are_joined(rows, sizes):
    from trainkit.model.decoding import joint_product

    torch.manual_seed(0)
    weights = [torch.randn(size, 12) for size in sizes]
    product = joint_product(weights, rows)
    for _ in range(2):  # The second call writes over the memory of the first
        x = torch.randn(rows, 12)
        wanted = torch.cat([x @ w.T for w in weights], 1)
        assert torch.allclose(product(x), wanted, atol=1e-5)


def test_weights_of_8_bits_are_the_nearest():
    "Of a weight, 127 steps in each direction; a row of zeros stays one."
    from trainkit.model.decoding import PRODUCTS

    torch.manual_seed(0)
    weight = torch.randn(32, 64) * torch.logspace(-2, 1, 32)[:, None]
    weight[5] = 0
    x = torch.randn(3, 64).bfloat16().float()
    largest = weight.abs().amax(1, keepdim=True)
    steps = torch.round(weight / largest.clamp(min=1e-8) * 127)
    wanted = x @ (steps * (largest / 127).bfloat16().float()).T
    found = PRODUCTS["int8"](weight.clone(), 3)(x).float()
    assert torch.allclose(found, wanted, rtol=0.01, atol=0.01 * float(wanted.abs().mean()))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_quick_norm_is_the_norm(eps):
    from trainkit.model.decoding import quick_norm
    from trainkit.model.transformer import RMSNorm

    torch.manual_seed(0)
    norm = RMSNorm(24, eps)
    torch.nn.init.normal_(norm.weight)
    for x in (torch.randn(3, 24), 1e-3 * torch.randn(2, 24)):
        assert torch.allclose(quick_norm(norm)(x), norm(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        dict(position="learned", norm="layernorm", tie_embeddings=True),
        dict(logit_softcap=3.0, scale_embeddings=True, attn_softcap=5.0, sandwich_norm=True),
        dict(layer_windows=[3, 0], layer_rope_theta=[100.0, 10_000.0], qk_norm=True),
    ],
)
def test_a_step_of_fixed_shapes_is_the_model(shape):
    "Rows with 0, 2 and 4 empty places at their left, against rows without a cache."
    from trainkit.model.decoding import CompiledStep, fixed_step

    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=40)
    model = Transformer(ModelConfig(**sizes, max_seq_len=24, **shape)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids, gaps = torch.randint(30, (3, 14)), torch.tensor([0, 2, 4])
    mask = (torch.arange(6) >= gaps[:, None]).long()
    with torch.no_grad():
        step = CompiledStep(model.config, model.lm_head.weight, 3, 16, "eager")
        model(ids[:, :6], attention_mask=mask, past_key_values=step.cache)
        for t in range(6, 14):
            position = torch.tensor([t])
            found = fixed_step(model, ids[:, t], position, gaps, *step.tensors())
            for row, gap in enumerate(gaps.tolist()):
                wanted = model(ids[row : row + 1, gap : t + 1]).logits[0, -1]
                assert torch.allclose(found[row], wanted, atol=1e-4), (t, row)


# --- sampling and streaming against the slow way


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1500])
def test_what_is_cut_off_before_drawing(size, flat):
    "A flat distribution of many tokens needs more of them than are looked at first."
    torch.manual_seed(size)
    logits = torch.randn(3, size) * (0.01 if flat else 3)
    probabilities = logits.double().softmax(-1)
    for row, p in zip(logits, probabilities, strict=True):
        ranked = sorted(range(size), key=lambda i: -float(p[i]))  # noqa: B023
        for most in (1, 3, size, size + 1):
            kept = keep_top_k(row[None], most)[0].isfinite().nonzero()[:, 0].tolist()
            assert sorted(kept) == sorted(ranked[:most])
        for share in (0.1, 0.5, 0.95):
            total, wanted = 0.0, []
            for i in ranked:
                if total >= share:
                    break
                wanted.append(i)
                total += float(p[i])
            kept = keep_top_p(row[None], share)[0]
            found = kept.isfinite().nonzero()[:, 0].tolist()
            assert abs(len(found) - len(wanted)) <= (size > 1000)  # In 32 bits
            assert {*found} <= {*ranked[: len(found)]} and torch.equal(kept[found], row[found])
            low = (p >= share * p.max() * (1 - 1e-6)).nonzero()[:, 0].tolist()
            assert keep_min_p(row[None], share)[0].isfinite().nonzero()[:, 0].tolist() == low
    assert torch.equal(keep_top_p(logits, 1.0), logits)
    assert torch.equal(keep_min_p(logits, 0.0), logits)


def test_a_nucleus_ends_where_its_mass_is_reached():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for share, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.99, 4)):
        assert int(keep_top_p(logits, share).isfinite().sum()) == kept
    for share, kept in ((0.2, 4), (0.5, 2), (0.51, 1), (1.0, 1)):
        assert int(keep_min_p(logits, share).isfinite().sum()) == kept


def test_repetition_is_penalized_by_sign():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [4.0, 6.0, -8.0, 1.0]])
    ids = torch.tensor([[0, 1, 1], [2, 2, 2]])
    wanted = [[1, -4, 1, 0], [4, 6, -16, 1]]
    assert penalize_repetition(logits, ids, 2.0).tolist() == wanted


class ByteIds:
    "A tokenizer whose ids are bytes; what is no text becomes the sign for it."

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("prompt", [b"", b"Hello \xf0\x9f", bytes(range(60, 90))])
def test_bytes_that_are_no_characters_are_shown_a_dozen_at_a_time(prompt):
    "The last four may still become one; a text that is whole is shown at once."
    streamer = TextStreamer(ByteIds(), prompt)
    shown = [streamer.push(0xFF) for _ in range(40)]
    assert [i for i, text in enumerate(shown, 1) if text] == [16, 28, 40]
    assert {text for text in shown if text} == {"\ufffd" * 12}
    assert streamer.finish() == "\ufffd" * 4
    streamer = TextStreamer(ByteIds(), b"ab")
    shown = [streamer.push(byte) for byte in "aé日🏴b".encode()]
    assert shown == ["a", "", "é", "", "", "日", "", "", "", "🏴", "b"]


@pytest.mark.parametrize(
    "stops, pieces, rest",
    [
        (["END"], ["a", "b", "", "", "EN-", "-"], ""),
        (["b"], ["a", "", "", "", "", ""], ""),
        (["E", "N"], ["a", "b", "", "", "", ""], ""),
        (["--"], ["a", "b", "E", "N", "", ""], ""),
        (["-x", "--x"], ["a", "b", "E", "N", "", ""], "--"),
    ],
)
def test_what_may_begin_a_stop_is_held_back(stops, pieces, rest):
    streamer = TextStreamer(ByteIds(), b"", stops)
    assert [streamer.push(byte) for byte in b"abEN--"] == pieces
    assert streamer.finish() == rest


def test_prompts_that_cannot_be_read_are_named_with_their_limits():
    "A vocabulary of 7 has the ids 0 to 6; of 8 places one must be free."
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=7, d_model=8, n_heads=2, n_layers=1, d_ff=8, max_seq_len=8)
    )
    with pytest.raises(ValueError, match="prompt 1 contains the id 7, but ids go from 0 to 6:"):
        generate(model, [[1], [6, 7]], max_new_tokens=1)
    with pytest.raises(ValueError, match="prompt 0 has 8 tokens, .* at most 8, .* the last 7 at"):
        generate(model, [[1] * 8], max_new_tokens=1)
    assert len(generate(model, [[1] * 7], max_new_tokens=3)[0]) == 8


def test_the_ending_of_a_thought_closes_it():
    with pytest.raises(ValueError, match="the ending 'Stop.' does not contain '</think>'"):
        ThinkingBudget(None, 3, ending="Stop.")


@pytest.mark.parametrize(("length", "room"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_a_compiled_step_has_room_for_the_next_power_of_two(length, room, monkeypatch):
    "So that few shapes are compiled: of at least 64 tokens."
    from trainkit.model import decoding

    made = []

    class Compiled:
        def __init__(self, config, like, rows, length, backend):
            made.append((rows, length, backend))

        def step(self, model, ids):
            assert ids.tolist() == [0, 0, 0]

        clear = list

    monkeypatch.setattr(decoding, "CompiledStep", Compiled)
    model = Transformer(ModelConfig(vocab_size=7, d_model=8, n_heads=2, n_layers=1, d_ff=8)).eval()
    for _ in range(2):  # The second time it is there already
        with decoding.compiled_step(model, 3, length, "eager") as step:
            assert isinstance(step, Compiled)
    assert made == [(3, room, "eager")]


@pytest.mark.parametrize(
    ("ids", "wanted"), [([5, 7], [7, 5, 7]), ([7, 5], [7, 5]), ([], [7]), ([5], [7, 5])]
)
def test_a_text_begins_with_the_token_that_begins_every_text(ids, wanted):
    "Once: it is not put before itself."
    first = SimpleNamespace(
        special_tokens={}, cut=None, first_token_id=7, encode=lambda text, *_: [*ids]
    )
    assert text_to_ids("a text", first) == wanted
    assert text_to_ids("a text", SimpleNamespace(**vars(first) | dict(first_token_id=None))) == ids
