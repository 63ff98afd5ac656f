"Evaluation: scores, verdicts, comparisons, the harness, each against an oracle; bounded memory."

import copy
import functools
import gc
import json
import math
import random
import tracemalloc

import numpy as np
import pytest
import torch
from support.processes import call

from trainkit.eval.metrics import bert_score
from trainkit.data.dataloader import Batches
from trainkit.eval import scoring
from trainkit.eval.scoring import perplexity
from trainkit.eval.lm_eval import HarnessBackend, run_harness
from trainkit.interop.hf import save_pretrained
from trainkit.interop.families import to_hf
from trainkit.eval.stats import bootstrap, compare
from trainkit.eval.metrics import compute_metrics
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss
from trainkit.eval.scoring import TextScore, multiple_choice, read_choices, score_pieces
from trainkit.eval.scoring import score_texts, split_head
from trainkit.eval.evaluator import Sample, kl_at_each, side_by_side
from trainkit.tokenizer.chat_template import TEMPLATES
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.eval.evaluator import AnswerMetrics, RatioSum, evaluate, compare_streams
from trainkit.eval.evaluator import ask_row, load_questions
from trainkit.tokenizer.chat import render, set_template
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer

WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then".split()


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(60)]


@pytest.fixture(scope="module")
def tok(texts):
    tok = BPETokenizer.train(texts, 300, special_tokens=("<|end|>",), progress=False)
    tok.eos_token = "<|end|>"
    return tok


def test_an_answer_is_scored_as_it_is_learned(texts):
    "Up to the token that ends it: the new line after it is not learned."
    chat = BPETokenizer.train(texts, 300, special_tokens=("<|end|>",), progress=False)
    set_template(chat, "chatml")
    question = ask_row(dict(prompt="the cat", completion="sat"), chat)
    turns = [dict(role="user", content="the cat"), dict(role="assistant", content="sat")]
    ids, learned = render(turns, chat)
    answer = [i for i, on in zip(ids, learned, strict=True) if on]
    assert question.ids[len(question.head) :] == answer
    assert chat.decode(answer) == "sat<|im_end|>"


@pytest.fixture(scope="module")
def models(tok, texts):
    "A model before and after a little training."
    config = ModelConfig(
        vocab_size=tok.vocab_size, d_model=32, n_heads=2, n_layers=2, d_ff=64, max_seq_len=64
    )
    torch.manual_seed(0)
    fresh, trained = Transformer(config).eval(), Transformer(config)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    stream = torch.tensor(tok.encode("\n".join(texts)))
    for step in range(40):
        rows = stream[
            torch.randint(len(stream) - 64, (8, 1), generator=torch.Generator().manual_seed(step))
            + torch.arange(64)
        ]
        trained(rows, labels=rows).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    return fresh, trained.eval()


def plain(model, ids, first):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    lp = torch.log_softmax(logits, -1)
    return sum(lp[t - 1, ids[t]].item() for t in range(first, len(ids))), sum(
        int(logits[t - 1].argmax() == ids[t]) for t in range(first, len(ids))
    )


@pytest.mark.parametrize("where", ["ours", "transformers", "peft"])
def test_pieces_of_any_length_score_as_one_at_a_time(models, where):
    model = models[1] if where == "ours" else to_hf(models[1]).eval()
    if where == "peft":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        ).eval()
    draw = random.Random(1)
    pieces = []
    for _ in range(50):
        n = draw.randint(2, 64)
        pieces.append(([draw.randrange(300) for _ in range(n)], draw.randint(1, n - 1)))
    pieces.insert(3, ([5], 1))  # Nothing counts
    assert split_head(model) is not None
    for (ids, first), (value, hits) in zip(pieces, score_pieces(model, pieces), strict=True):
        want, right = plain(model, ids, first)
        assert value == pytest.approx(want, abs=2e-4) and hits == right


@pytest.mark.parametrize(
    "knobs",
    [
        dict(norm="layernorm", activation="gelu", position="learned", bias="all"),
        dict(layer_windows=[8, 0]),
        dict(attn_softcap=5.0, qk_norm=True),
        dict(attention="eager"),
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_texts_stand_side_by_side(knobs):
    """Packed texts: each token but the last is read once, and no text sees another.

    Also in rows too long for a mask.
    """
    torch.manual_seed(0)
    model, draw = (
        Transformer(
            ModelConfig(
                vocab_size=300, d_model=32, n_heads=2, n_layers=2, d_ff=64, max_seq_len=64, **knobs
            )
        ).eval(),
        random.Random(1),
    )
    pieces, read = (
        [
            ([draw.randrange(300) for _ in range(draw.choice((2, 3, 20, 33, 64)))], 1)
            for _ in range(60)
        ],
        [],
    )
    hook = model.model.embed_tokens.register_forward_hook(lambda m, x, y: read.append(y.shape[:2]))
    scores = score_pieces(model, pieces)
    hook.remove()
    assert (
        sum(rows * length for rows, length in read[2:]) == sum(len(ids) - 1 for ids, _ in pieces)
        and max(length for _, length in read) > 512
    )
    for (ids, first), (value, hits) in zip(pieces, scores, strict=True):
        want, right = plain(model, ids, first)
        assert value == pytest.approx(want, abs=2e-4) and hits == right


def test_a_model_that_is_more_than_body_and_head_is_asked_itself(models, tok, texts):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            final_logit_softcapping=2.0,
            max_position_embeddings=64,
        )
    ).eval()
    assert split_head(gemma) is None
    ids = tok.encode(texts[0])[:40]
    assert score_pieces(gemma, [(ids, 3)])[0][0] == pytest.approx(plain(gemma, ids, 3)[0], abs=1e-3)


def test_logits_are_never_whole(models, monkeypatch):
    "The head sees only tokens that count, a few at a time."
    from trainkit.eval import scoring as scores

    monkeypatch.setattr(scores, "LOGITS", (300 * 7, 300 * 7))
    model, seen = models[1], []
    hook = model.lm_head.register_forward_hook(lambda m, x, y: seen.append(y.numel()))
    score_pieces(model, [(list(range(60)), 50), (list(range(20)), 1)])
    hook.remove()
    assert max(seen[2:]) <= 300 * 7 and sum(seen[2:]) == 300 * (
        10 + 19
    )  # The first two are the trial


def test_scores_stream_in_constant_memory(models, tok, texts):
    def endless(n):
        for i in range(n):
            yield texts[i % len(texts)][:40]

    def alive():
        return (
            gc.collect()
            and 0
            or sum(o.numel() for o in gc.get_objects() if type(o) is torch.Tensor)
        )

    sizes, tracked = [], []
    tracemalloc.start()
    for i, _ in enumerate(score_texts(models[0], tok, endless(4096))):
        if i in (600, 4000):
            sizes.append(alive()), tracked.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (
        sizes[1] <= sizes[0] + 10_000 and tracked[1] <= tracked[0] + 100_000
    )  # 3,400 texts later; kept losses alone would be more


def test_tally_keeps_few_and_agrees_with_the_bootstrap():
    draw, tally, rows = random.Random(0), RatioSum(), []
    for _ in range(3 * RatioSum.KEEP):
        w = draw.uniform(1, 9)
        tally.add(v := w * draw.gauss(2, 1), w)
        rows.append((v, w))
    assert len(tally.kept) == RatioSum.KEEP
    assert tally.value == pytest.approx(sum(v for v, _ in rows) / sum(w for _, w in rows))
    r = tally.value
    linear = [r + (v - r * w) * len(rows) / sum(w for _, w in rows) for v, w in rows]
    want = bootstrap(linear, resamples=1000)
    assert tally.interval().low == pytest.approx(
        want.low, abs=4e-3
    ) and tally.interval().high == pytest.approx(want.high, abs=4e-3)


def test_two_models_are_told_apart_as_compare_does():
    draw = random.Random(0)
    a, b = [draw.random() for _ in range(50)], [draw.random() + 0.2 for _ in range(50)]
    tally = RatioSum()
    for x, y in zip(a, b, strict=True):
        tally.add(y - x)
    ours, want = compare_streams(tally, ("a", "b"), True), compare(a, b)
    assert ours.better == want.better == "b" and ours.p_value == want.p_value
    assert ours.difference.value == pytest.approx(want.difference.value)


def test_a_report_counts_every_row_once_whatever_the_chunks(models, tok, texts):
    fresh, trained = models
    rows = [dict(text=t) for t in texts] * 3  # 180: chunks of 64 and a rest
    seen = []

    def read():
        for row in rows:
            seen.append(1)
            yield row

    report = evaluate(fresh, tok, read(), trained, names=("fresh", "trained"))
    assert len(seen) == report.rows == 180
    for model, name in ((fresh, 0), (trained, 1)):
        total = sum(score_texts(model, tok, [r["text"] for r in rows]), TextScore(0.0, 0, 0))
        assert report.measures["bits_per_byte"][name].value == pytest.approx(
            total.bits_per_byte, rel=1e-6
        )
        assert report.measures["perplexity"][name] == pytest.approx(total.perplexity, rel=1e-6)
        assert report.measures["token_accuracy"][name].value == pytest.approx(total.token_accuracy)
    assert report.comparisons["loss"].better == "b"
    assert "trained is better" in str(report) and "<table" in report.html()


def test_preferences_and_choices_are_those_of_their_rooms(models, tok):
    draw = random.Random(0)
    rows = [
        dict(
            question=draw.choice(WORDS),
            choices=[f" {w}" for w in draw.sample(WORDS, 3)],
            answer=draw.randrange(3),
        )
        for _ in range(30)
    ]
    report = evaluate(models[1], tok, rows)
    assert report.measures["choice_accuracy"][0].value == pytest.approx(
        multiple_choice(models[1], tok, rows)[0].value
    )
    pairs = [
        dict(prompt="the cat", chosen=f" {a}", rejected=f" {b}")
        for a, b in zip(WORDS, reversed(WORDS), strict=True)
    ]

    def mean(word):
        return plain(
            models[1], tok.encode("the cat") + tok.encode(f" {word}"), len(tok.encode("the cat"))
        )[0]

    want = sum(mean(a) > mean(b) for a, b in zip(WORDS, reversed(WORDS), strict=True)) / len(WORDS)
    assert evaluate(models[1], tok, pairs).metrics["preference_accuracy"] == pytest.approx(want)


def test_a_tie_among_choices_counts_as_a_guess(tok):
    """A model that finds all tokens equally likely has a third of three choices right.

    The position of the right one does not matter.
    """
    even = Transformer(
        ModelConfig(
            vocab_size=tok.vocab_size, d_model=16, n_heads=2, n_layers=1, d_ff=16, max_seq_len=64
        )
    )
    even.get_output_embeddings().weight.data.zero_()
    one = [w for w in WORDS if len(tok.encode(f" {w}")) == 1 and len(w) == 3][:4]
    assert len(one) == 4
    for rest, want in (
        (one[1:3], 1 / 3),
        ([one[1], one[1] + one[2]], 1 / 2),
    ):  # The second has a choice of two tokens, which is less likely
        rows = [
            dict(
                question="the",
                choices=[f" {w}" for w in [*rest[:at], one[0], *rest[at:]]],
                answer=at,
            )
            for at in range(3)
        ]
        got, chosen = multiple_choice(even, tok, rows, "none")
        assert got.value == pytest.approx(want), chosen
    rows = [dict(question="the", choices=[f" {w}" for w in one[:3]], answer=at) for at in range(3)]
    assert (
        multiple_choice(even, tok, rows[:1], "bytes")[0].value
        == multiple_choice(even, tok, rows[2:], "bytes")[0].value
        == pytest.approx(1 / 3)
    )
    assert [
        evaluate(even, tok, [row], max_length=16).metrics["choice_accuracy"] for row in rows
    ] == pytest.approx([1 / 3] * 3)
    assert multiple_choice(even, tok, [dict(rows[0], answer=2), dict(rows[0], answer=1)], "prior")[
        0
    ].value == pytest.approx(1 / 3)


def test_chats_are_rendered_and_long_questions_lose_their_beginning(models, tok, texts):
    tok.chat_template = TEMPLATES["chatml"] if isinstance(TEMPLATES, dict) else None
    try:
        with pytest.raises(ValueError):
            evaluate(
                models[0], tok, [dict(prompt="a", completion="b")]
            )  # Its marks are no tokens here
    finally:
        tok.chat_template = None
    report = evaluate(models[1], tok, [dict(prompt=" ".join(texts), completion=" the cat")])
    assert report.measures["loss"][0].n == 1 and not report.answers  # No room to answer


def test_answers_are_limited_and_metrics_see_all_of_them(models, tok):
    rows = [dict(prompt="the cat", completion=f" {w}") for w in WORDS]
    calls = []

    def mine(predictions, references):
        calls.append((len(predictions), len(references)))
        return {"mine": 0.5}

    report = evaluate(models[1], tok, rows * 8, metrics=[mine], answers=20)
    assert calls == [(20, 20)] and report.metrics["mine"] == 0.5 and len(report.answers) == 20
    same = evaluate(models[1], tok, rows, models[1], answers=4)
    assert same.comparisons["exact_match"].better == "" and "no difference seen with n = 4" in str(
        same
    )


def test_a_long_question_cuts_no_other_answer(models, tok):
    "Its own answer ends where the context of 64 tokens is full."
    questions = ["the cat", "the cat sees a dog " * 9]
    long = tok.decode(tok.encode(questions[1])[:50])
    rows = [dict(prompt=text, completion=" the cat") for text in (questions[0], long)]
    together = evaluate(models[0], tok, rows, max_new_tokens=40).answers
    alone = [evaluate(models[0], tok, [row], max_new_tokens=40).answers[0] for row in rows]
    assert together == alone, together
    assert len(tok.encode(together[0]["model"])) > len(tok.encode(together[1]["model"]))


def test_answer_metrics_never_overwrite_the_record(models, tok):
    class Fake:
        model = models[1]

    record = dict(eval_loss=1.0)
    AnswerMetrics(tok, [dict(prompt="the cat", completion=" sat")]).on_eval(Fake, record)
    assert record["eval_loss"] == 1.0 and "eval_f1" in record
    with pytest.raises(ValueError, match="every = 0"):
        AnswerMetrics(tok, [], every=0)


def test_a_number_of_yours_says_which_model_is_best(models, tok):
    marks = iter([1.0, 3.0, 2.0, 9.0])

    def mine(predictions, references):
        return dict(mine=next(marks))

    rows = [
        dict(
            input_ids=torch.tensor(tok.encode("the cat sat")),
            labels=torch.tensor(tok.encode("the cat sat")),
        )
    ] * 2
    config = TrainConfig(
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        metric_for_best_model="mine",
        progress=False,
        mixed_precision="no",
    )
    trainer = Trainer(
        copy.deepcopy(models[1]),
        lm_loss,
        Batches(rows, 2),
        Batches(rows, 2),
        config,
        [AnswerMetrics(tok, [dict(prompt="the cat", completion=" sat")], [mine])],
    )
    trainer.train()
    assert (trainer.state.best_step, trainer.state.best_metric) == (2, 3.0)
    assert [r["eval_mine"] for r in trainer.history if "eval_mine" in r] == [
        1.0,
        3.0,
        2.0,
    ]  # Asked once for each evaluation


def test_kl_is_torchs_and_survives_impossible_words():
    torch.manual_seed(0)
    p, q = torch.randn(2, 5, 9).log_softmax(-1)
    assert torch.allclose(
        kl_at_each(p, q),
        torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1),
        atol=1e-6,
    )
    masked = torch.tensor([[0.0, -math.inf]])
    assert kl_at_each(masked, masked).item() == 0
    assert kl_at_each(torch.tensor([[0.5, 0.5]]).log(), masked).item() == math.inf


def test_side_by_side_is_the_same_for_the_same_model(models, tok):
    comparison = side_by_side(
        {"a": models[1], "b": models[1], "fresh": models[0]}, tok, ["the cat", "a dog"], 6, seed=3
    )
    for a, b, fresh in comparison.samples:
        assert a.text == b.text and a.log_probs == b.log_probs and set(b.kl) == {0.0}
        assert all(k > 0 for k in fresh.kl)
    assert "each token" in comparison.html()


def test_the_harness_runs_a_local_task(models, tok, tmp_path):
    "The real lm-evaluation-harness agrees with `multiple_choice` and `perplexity`."
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    draw = random.Random(0)
    rows = [
        dict(question=draw.choice(WORDS), choices=draw.sample(WORDS, 3), answer=draw.randrange(3))
        for _ in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    results = run_harness(models[1], tok, ["tiny"], folder=tmp_path, bootstrap_iters=0)
    mine = [dict(row, choices=[f" {c}" for c in row["choices"]]) for row in rows]
    assert results["tiny"]["acc,none"] == pytest.approx(
        multiple_choice(models[1], tok, mine, "none")[0].value
    )
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=to_hf(models[1]), tokenizer=tok.to_hf(), max_length=20, batch_size=1)

    class Ask:
        def __init__(self, *args):
            self.args = args

    asks = [Ask(" ".join(WORDS * 4))]
    ours = HarnessBackend(models[1], tok, max_length=20)
    assert ours.loglikelihood_rolling(asks)[0] == pytest.approx(
        theirs.loglikelihood_rolling(asks, disable_tqdm=True)[0], abs=1e-3
    )
    pairs = [
        Ask("the cat sat ", "on the mat"),
        Ask("", "the dog"),
        Ask(" ".join(WORDS * 3), " cat"),
    ]
    for (a, g), (b, h) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True
    ):
        assert a == pytest.approx(b, abs=1e-4) and g == h


def test_the_command(models, tok, tmp_path):
    for name, model in zip(("fresh", "trained"), models, strict=True):
        save_pretrained(model, tok, tmp_path / name, verify=False)
    rows = [dict(prompt="the cat", completion=f" {w}") for w in WORDS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = call(
        "eval",
        "trained",
        "rows.jsonl",
        "--base",
        "fresh",
        "--answers",
        "3",
        "--html",
        "page.html",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    want = evaluate(models[1], tok, rows, answers=3).metrics
    assert report["measures"]["bits_per_byte"]["trained"]["value"] == pytest.approx(
        want["bits_per_byte"], rel=1e-4
    )
    assert report["rows"] == len(WORDS) and report["comparisons"]["loss"]["better"] == "trained"
    assert "bits_per_byte" in (tmp_path / "page.html").read_text()
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=5 + len(WORDS),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    ).save_pretrained(tmp_path / "encoder")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "encoder")
    done = call(
        "eval",
        "trained",
        "rows.jsonl",
        "--answers",
        "3",
        "--metric",
        "bertscore",
        "--metric",
        "f1",
        "--encoder",
        "encoder",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    wanted = bert_score(
        [a["trained"] for a in report["answers"]],
        [a["expected"] for a in report["answers"]],
        tmp_path / "encoder",
    )
    for name, each in wanted.items():
        assert report["measures"][name]["trained"]["value"] == pytest.approx(
            sum(each) / 3, abs=1e-5
        )
    assert "f1" in report["measures"]
    for words, hint in (
        (["--metric", "bertscore"], "--encoder"),
        (["--metric", "f1", "--encoder", "encoder"], "add --metric bertscore"),
        (["--encoder", "nowhere"], "no model folder"),
    ):
        wrong = call("eval", "trained", "rows.jsonl", *words, cwd=tmp_path)
        assert wrong.returncode == 1 and hint in wrong.stderr, wrong.stderr
    wrong = call("eval", "trained", "rows.jsonl", "--metric", "exactmatch", cwd=tmp_path)
    assert wrong.returncode == 1 and "exact_match" in wrong.stderr


def test_numbers_of_metrics_may_be_numpys_or_torchs_and_none_is_lost():
    class Mine:
        def __call__(self, predictions, references):
            return [True, False]

    values = [np.float32(0.5), torch.tensor(0.25), np.array([1.0, 0.0]), torch.tensor([1.0, 0.0])]
    metrics = compute_metrics(
        ["a", "b"],
        ["a", "c"],
        [
            *((lambda p, r, x=x: x) for x in values),
            functools.partial(lambda p, r, k: [k, k], k=3),
            Mine(),
        ],
    )
    assert metrics == {
        "<lambda>": 0.5,
        "<lambda>_1": 0.25,
        "<lambda>_2": 0.5,
        "<lambda>_3": 0.5,
        "partial": 3.0,
        "Mine": 0.5,
    }
    with pytest.raises(ValueError, match="gave None"):
        compute_metrics(["a"], ["a"], [lambda p, r: None])
    assert math.isnan(perplexity(math.nan)) and perplexity(800) == math.inf


def test_an_answer_is_greedy_where_each_of_its_tokens_is_the_first_choice(models, tok, monkeypatch):
    "Its length is counted in bytes, and its tokens after those of the question."
    seen = []

    def scores(model, pieces):
        seen.extend(pieces)
        return [(-float(at), len(ids) - first - at % 2) for at, (ids, first) in enumerate(pieces)]

    monkeypatch.setattr(scoring, "score_pieces", scores)
    questions = [("the cat", [" sat", " flew over"]), ("", ["é"])]
    choices = scoring.score_choices(models[0], tok, questions)
    assert [[c.greedy for c in row] for row in choices] == [[True, False], [True]]
    assert [[c.log_prob for c in row] for row in choices] == [[0.0, -1.0], [-2.0]]
    assert [[c.n_bytes for c in row] for row in choices] == [[4, 10], [2]]
    assert [ids[first:] for ids, first in seen] == [
        tok.encode(a) for _, a_ in questions for a in a_
    ]


@pytest.mark.parametrize("size, first, ids", [(9, 3, 9), (8, 2, 8), (6, 1, 6), (7, 1, 7)])
def test_a_long_question_loses_its_beginning(size, first, ids, models, tok, monkeypatch):
    "One token of it has to stay before the answer; an answer that leaves no room is refused."
    whole, begins = list(range(100, 109)), {9: 3, 8: 3, 7: 3, 6: 4}[size]
    seen = []
    monkeypatch.setattr(scoring, "_encode_answer", lambda *_: (whole, begins))
    monkeypatch.setattr(
        scoring, "score_pieces", lambda model, pieces: seen.extend(pieces) or [(0.0, 1)]
    )
    scoring.score_choices(models[0], tok, [("q", ["a"])], max_length=size)
    assert seen == [(whole[-ids:], first)]
    with pytest.raises(ValueError, match=f"has {9 - begins} tokens, and {9 - begins} can be read"):
        scoring.score_choices(models[0], tok, [("q", ["a"])], max_length=9 - begins)


def test_a_row_of_a_sample_is_rounded():
    sample = Sample(
        "m", "p", "ab", ("a", "b"), (-0.123456, -2.0), (-1.234567, -3.0), (1.23456e-4, 2.0)
    )
    assert sample.table()[0] == {
        "token": "a",
        "log p": -0.1235,
        "log p, first model": -1.2346,
        "KL": 0.0001235,
    }
    assert sample.mean_kl == (1.23456e-4 + 2.0) / 2


CHOICES = ["Paris", "London", "Rome", "4"]


@pytest.mark.parametrize(
    ("row", "right"),
    [
        (dict(question="q", choices=CHOICES, answer=2), 2),
        (dict(question="q", choices=CHOICES, answer="2"), 2),
        (dict(question="q", choices=CHOICES, answer="c"), 2),
        (dict(question="q", choices=CHOICES, answer=" Rome "), 2),
        (dict(question="q", choices=CHOICES, answer="4"), 3),  # A text, before a number
        (dict(prompt="q", choices=json.dumps(CHOICES), label=0), 0),
        (dict(question="q", choices=dict(text=["x", "y"], label=["1", "2"]), answerKey="1"), 0),
        (dict(question="q", choices=dict(text=["B", "A"], label=["A", "B"]), answerKey="B"), 1),
    ],
)
def test_the_right_choice_is_a_number_a_letter_or_a_text(row, right):
    assert read_choices(row)[::2] == ("q", right)


@pytest.mark.parametrize("answer", [4, -1, True, "E", "Berlin", "-1", 1.5])
def test_an_answer_that_means_no_choice_names_its_row(models, tok, answer):
    rows = [dict(question="q", choices=[" a", " b", " c", " d"], answer=i) for i in (0, answer)]
    with pytest.raises(ValueError, match="row 1: answer = .* means none of the 4 choices"):
        multiple_choice(models[1], tok, rows)
    with pytest.raises(ValueError, match="means none of the 4 choices"):
        evaluate(models[1], tok, rows)


def test_questions_with_choices_are_read_from_a_file(tmp_path):
    file = tmp_path / "q.jsonl"
    rows = [dict(question="Say", choices=["a", " b"], answer="B"), dict(choices=["a"], answer=0)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert load_questions(file) == [dict(question="Say", choices=[" a", " b"], answer=1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load_questions(file, 1)) == 1
    with pytest.raises(ValueError, match="q.jsonl, line 2: a question with choices needs"):
        load_questions(file)
    (tmp_path / "q.csv").write_text('question,choices,answer\nSay,"[""x"", ""y""]",1\n')
    assert load_questions(tmp_path / "q.csv")[0]["choices"] == [" x", " y"]
    (tmp_path / "p.jsonl").write_text('{"question": "Say", "answer": "x"}\n')
    assert load_questions(tmp_path / "p.jsonl")[0]["completion"] == "x"


def test_one_example_has_no_interval():
    one, two = bootstrap([2.0]), bootstrap([2.0, 3.0])
    assert math.isnan(one.low) and str(one) == "2 (n = 1)"
    assert str(two) == "2.5 (2 to 3, n = 2)"
    assert str(compare([1.0], [2.0])) == "no difference seen with n = 1: b − a = +1, p = 1"
