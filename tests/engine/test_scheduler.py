"Continuous batching: every row gets its own text, no matter what else is in the batch."

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.engine.scheduler import BatchEngine, QueueFull, Scheduler
from trainkit.lora.adapters import use_adapter
from trainkit.lora.inject import add_lora
from trainkit.lora.inject import LoRAConfig
from trainkit.model.config import ModelConfig
from trainkit.model.generation import generate
from trainkit.model.speculative import Drafter
from trainkit.model.transformer import Transformer
from trainkit.quant.quantize import QuantConfig, quantize_model


def make_model(**knobs):
    torch.manual_seed(0)
    shape = dict(vocab_size=60, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=96)
    model = Transformer(ModelConfig(**shape | knobs)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)  # Large enough for clear preferences
    return model


MODEL = make_model()
request = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),  # Few ids, so that beginnings are shared
    st.integers(1, 30),  # max_new_tokens
    st.sampled_from([None, 0, 1]),  # Seed; None is greedy
    st.integers(0, 12),  # The round in which it comes
    st.one_of(st.none(), st.integers(1, 15)),  # The round after which it is cancelled
)


@settings(max_examples=10)
@given(
    st.lists(request, min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 50),
    st.sampled_from([None, 5]),
)
def test_a_row_is_alone_in_any_company(wanted, rows, prefill, guesses):
    """Whatever comes, goes and is cancelled, a row gets what `generate` gives it alone.

    Also if its text is guessed ahead whenever it is alone."""
    options = dict(prefill_tokens=prefill, prompt_lookup_num_tokens=guesses)
    scheduler = Scheduler(MODEL, rows=rows, **options)
    requests = {}
    for turn in range(2000):
        for i, (ids, limit, seed, at, _) in enumerate(wanted):
            if at == turn:
                temperature = 0.0 if seed is None else 0.9
                requests[i] = scheduler.add(ids, limit, temperature, eos_token_id=7, seed=seed)
        for i, own in requests.items():
            if wanted[i][4] is not None and turn > wanted[i][3] + wanted[i][4]:
                own.cancel()
        if not scheduler.step() and turn > 12:
            break
    assert not scheduler.running and not scheduler.waiting
    for i, (ids, limit, seed, _, _) in enumerate(wanted):
        alone = generate(MODEL, ids, limit, 0.0 if seed is None else 0.9, seed=seed, eos_token_id=7)
        own = requests[i].tokens
        assert own == alone[len(ids) : len(ids) + len(own)]
        if requests[i].finish_reason != "cancelled":
            assert len(own) == len(alone) - len(ids)


KINDS = {
    "window": dict(layer_windows=[5, 0], layer_rope_theta=[1e2, 1e4]),
    "no positions": dict(layer_rope_theta=[1e4, 0.0]),
    "learned": dict(position="learned", norm="layernorm", activation="gelu", bias="all"),
    "gemma": dict(n_kv_heads=2, scale_embeddings=True, logit_softcap=5.0, attn_softcap=9.0),
    "dynamic": dict(
        rope_scaling=dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)
    ),
    "qk_norm": dict(qk_norm=True, n_kv_heads=1),
}


@pytest.mark.parametrize("kind", [*KINDS, "int8", "nf4"])
def test_kinds_of_models(kind):
    model = make_model(**KINDS.get(kind, {}))
    if kind in ("int8", "nf4"):
        quantize_model(model, QuantConfig(bits=8 if kind == "int8" else 4))
    scheduler = Scheduler(model, rows=3, prefill_tokens=5)
    prompts = [[1, 2, 3], [4] * 11, [5, 6], [1, 2, 3, 9, 8, 7, 6, 5, 4], [3]]
    limits = [12, 5, 9, 7, 3]
    requests = [scheduler.add(p, n, 0.0) for p, n in zip(prompts, limits, strict=True)]
    while scheduler.step():
        pass
    for own, prompt, limit in zip(requests, prompts, limits, strict=True):
        assert prompt + own.tokens == generate(model, prompt, limit, temperature=0.0)


def test_each_chat_keeps_its_slot():
    "Also below one system prompt, and while the rows of two chats are written next to each other."
    scheduler = Scheduler(MODEL, rows=4)
    chats = [[9, 9, 9, *range(10 * i, 10 * i + 9)] for i in (1, 2, 3)]
    for turn in range(3):
        groups = [[0], [1], [2]] if turn == 0 else [[0, 2], [1]]
        for group in groups:
            requests = scheduler.generate([chats[i] for i in group], 6, temperature=0.0)
            for i, own in zip(group, requests, strict=True):
                held = 3 * (i > 0) if turn == 0 else len(chats[i]) - 4
                assert own.cached == held, (turn, i)
                alone = generate(MODEL, chats[i], 6, temperature=0.0)
                assert own.prompt + own.tokens == alone
                chats[i] = [*alone, 5, 6, 7]


def test_a_rotation_by_the_length_reads_a_prompt_as_a_whole():
    model = make_model(**KINDS["dynamic"])
    scheduler = Scheduler(model, rows=2, prefill_tokens=5)
    generator = torch.Generator().manual_seed(0)
    for length in (14, 30, 60):
        prompt = torch.randint(60, (length,), generator=generator).tolist()
        alone = generate(model, prompt, 12, temperature=0.0)
        for own in scheduler.generate([prompt, prompt], 12, temperature=0.0):
            assert own.prompt + own.tokens == alone and own.cached == 0


@pytest.mark.parametrize("kind", ["plain", "window", "gemma", "nf4", "lora", "q4_0"])
def test_guesses_for_a_request_that_is_alone(kind):
    model = make_model(**KINDS.get(kind, {}))
    if kind == "nf4":
        quantize_model(model, QuantConfig(bits=4))
    weights = kind if kind == "q4_0" else None
    adapter = ""
    if kind == "lora":
        adapter = "a"
        add_lora(model, LoRAConfig(r=3), adapter)
        for path, weight in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(weight, std=0.3)
        model.eval()
    for draft in (make_model(n_layers=1), model if kind == "plain" else None):
        drafter = Drafter(draft, 5)
        scheduler = Scheduler(model, rows=2, weights=weights, assistant_model=drafter)
        options = dict(adapter=adapter, logprobs=1)
        long = scheduler.add([1, 2, 3, 1, 2], 40, 0.0, **options)
        for turn in range(1000):
            if turn == 9:  # A second one comes, and shares the steps for a while
                short = scheduler.add([7, 8], 6, 0.0, **options)
            if not scheduler.step() and turn > 9:
                break
        for own in (long, short):
            plain = generate(model, own.prompt, own.limit, temperature=0.0, weights=weights)
            assert own.prompt + own.tokens == plain and own.ahead is None
        assert drafter.passes + drafter.accepted >= 25
        if draft is model:
            assert drafter.accepted > 20


def test_a_sampled_text_with_a_draft_model_is_drawn_from_the_model():
    shape = dict(vocab_size=4, d_model=16, n_heads=2, n_layers=1, d_ff=16, max_seq_len=8)
    model = make_model(**shape)
    drafter = Drafter(make_model(**shape | dict(d_ff=32)), 2)
    scheduler = Scheduler(model, rows=1, assistant_model=drafter)
    seen = torch.zeros(4)
    for seed in range(300):
        [own] = scheduler.generate([[1, 2]], 3, seed=seed)
        seen[own.tokens[1]] += 1
    with torch.no_grad():
        first = model(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
        rows = torch.tensor([[1, 2, i] for i in range(4)])
        second = model(rows).logits[:, -1].softmax(-1)
    expected = 300 * first @ second
    assert ((seen - expected).square() / expected).sum() < 3 + 4 * 6**0.5
    assert 0 < drafter.accepted < drafter.guessed


def test_rows_of_one_batch_have_their_own_adapters():
    model = make_model(tie_embeddings=False)
    for seed, name in enumerate(("a", "b")):
        targets = ["q_proj", "v_proj"] if name == "a" else ["down_proj", "embed_tokens"]
        add_lora(model, LoRAConfig(r=3 + seed, target_modules=targets), name)
        torch.manual_seed(seed)
        for path, weight in model.named_parameters():
            if f".{name}." in path and "lora" in path:
                torch.nn.init.normal_(weight, std=0.3)
    names = ["", "a", "b", "a", ""]
    scheduler = Scheduler(model, rows=4)
    requests = [scheduler.add([1, 2, 3], 9, 0.0, adapter=name) for name in names]
    while scheduler.step():
        pass
    texts = []
    for own, name in zip(requests, names, strict=True):
        use_adapter(model, name or (), trainable=False)
        texts.append(generate(model, [1, 2, 3], 9, temperature=0.0))
        assert own.prompt + own.tokens == texts[-1]
    assert len({tuple(text) for text in texts}) == 3  # And no prefix of another adapter was used
    for layer in scheduler.layers:
        assert not layer.row_weights


def test_a_whole_layer_cannot_be_mixed():
    model = add_lora(make_model(), LoRAConfig(r=2, use_dora=True), "d")
    with pytest.raises(ValueError, match="use_dora.*Merge it"):
        Scheduler(model)


def test_nan_in_one_row_stays_there():
    scheduler = Scheduler(make_model(), rows=2)

    def poison(ids, logits):
        return logits * torch.nan

    bad = scheduler.add([1, 2], 5, processors=[poison])
    good = scheduler.add([1, 2, 3], 5, 0.0)
    while scheduler.step():
        pass
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert isinstance(bad.error, FloatingPointError)
    assert scheduler.generate([[1, 2]], 3, temperature=0.0)[0].finish_reason == "length"


def test_prefixes_are_forgotten_with_new_weights():
    model = make_model()
    scheduler = Scheduler(model, rows=2)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    scheduler.generate([prompt], 3, temperature=0.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    scheduler.forget()
    [own] = scheduler.generate([prompt], 6, temperature=0.0)
    assert own.cached == 0 and prompt + own.tokens == generate(model, prompt, 6, temperature=0.0)


def test_an_engine_survives_threads_errors_and_its_end(monkeypatch):
    scheduler = Scheduler(make_model(), rows=3)
    engine = BatchEngine(scheduler, max_waiting=40)
    texts = {}

    def client(i):
        done = threading.Event()
        own = engine.submit(
            [1, 2, i % 5], 8, 0.0, listener=lambda piece: piece.finish_reason and done.set()
        )
        assert done.wait(60)
        texts[i] = own.tokens

    threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = {i: generate(scheduler.model, [1, 2, i], 8, temperature=0.0)[3:] for i in range(5)}
    assert texts == {i: alone[i % 5] for i in range(24)}

    monkeypatch.setattr(scheduler, "_write", lambda: 1 / 0)  # A step fails: who was in it ends
    gone = threading.Event()
    own = engine.submit([1], 5, listener=lambda piece: piece.finish_reason and gone.set())
    assert gone.wait(60) and isinstance(own.error, ZeroDivisionError) and engine.alive
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0).result(60)
    hold = threading.Event()
    engine.call(lambda: hold.wait(60))
    waiting = []
    with pytest.raises(QueueFull):
        for _ in range(50):
            waiting.append(engine.submit([1], 90))
    hold.set()
    engine.close()
    assert len(waiting) >= 40 and {own.finish_reason for own in waiting} <= {"cancelled", "length"}
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1])


def test_a_stream_of_an_engine(monkeypatch):
    "It ends with its request, a closed one cancels it, and an error is raised at its end."
    scheduler = Scheduler(make_model(), rows=2)
    with BatchEngine(scheduler) as engine:
        pieces = list(engine.stream([1, 2, 3], 6, 0.0))
        assert [p.token for p in pieces] == generate(scheduler.model, [1, 2, 3], 6, 0.0)[3:]
        assert [bool(p.finish_reason) for p in pieces] == [False] * 5 + [True]
        stream = engine.stream([1], 60)
        next(stream)
        [request] = scheduler.running.values()
        stream.close()
        assert request.cancelled
        monkeypatch.setattr(scheduler, "_write", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(engine.stream([1], 5))
        monkeypatch.undo()


def test_the_tokens_of_a_prompt_are_scored():
    "In parts, next to others, and with the prompt in the cache already: as the model alone does."
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    scheduler = Scheduler(MODEL, rows=2, prefill_tokens=5)
    scheduler.generate([ids, ids], 2, temperature=0)
    scored = scheduler.add(ids, 2, 0.0, logprobs=2, score_prompt=True)
    plain = scheduler.add(ids, 2, 0.0, logprobs=2)
    while scheduler.step():
        pass
    with torch.no_grad():
        log_probs = MODEL(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert plain.prompt_scores is None and len(scored.prompt_scores) == len(ids) - 1
    for row, token, (value, top) in zip(log_probs, ids[1:], scored.prompt_scores, strict=False):
        assert abs(value - row[token]) < 1e-4
        assert [i for i, _ in top] == row.topk(2).indices.tolist()
    assert scored.tokens == plain.tokens
