"What each judge says of a model before and after its training, where the answers are given."

import re
from types import SimpleNamespace

import pytest
import torch
from support.snapshots import compare

from trainkit.model.generation import SamplingConfig
from trainkit.recipes import evaluation as e

HELD_OUT = [
    dict(
        prompt=f"q{i}", expected=f"a{i}", ids=[i] * (i + 1), tokens=i + 2, row=dict(prompt=f"q{i}")
    )
    for i in range(10)
]


def answer(text, ended=True):
    said = e.ModelAnswer(text)
    said.ended = ended
    return said


def plain(page):
    "A page without its marks."
    return " ".join(re.sub(r"<style.*?</style>|<[^>]+>", " ", str(page), flags=re.S).split())


@pytest.fixture(autouse=True)
def charts(monkeypatch):
    "Each chart as what it is made of."

    def told(chart, *args, **knobs):
        return f"[{chart.__name__} {args} {knobs}]"

    monkeypatch.setattr(e, "draw_svg", told)


def story(judge, evaluation, run=None):
    "All that a judge says, in its order."
    lines = [*judge.begin()]
    metrics, words = judge.end(evaluation)
    lines += [f"{name} = {value:.6g}" for name, value in metrics.items()]
    lines += [*words, *(f"{title}: {plain(page)[:900]}" for title, page in judge.sections(run))]
    return "\n".join(lines)


@pytest.fixture
def asked(monkeypatch):
    "Answers to be given, one list for each time that a model is asked."
    given = []
    monkeypatch.setattr(e, "ask", lambda model, tokenizer, asked: given.pop(0)[: len(asked)])
    monkeypatch.setattr(e, "mask_picture", lambda examples, tokenizer: "examples")
    return given


def made(kind, **inputs):
    judge = object.__new__(kind)
    inputs.setdefault("config", SimpleNamespace()).sft = SimpleNamespace(samples=0)
    judge.inputs = SimpleNamespace(tokenizer=None, model=None, causal=None, **inputs)
    judge.before, judge.after, judge.callbacks, judge.marks = [], [], [], {}
    return judge


def test_answers(asked, monkeypatch):
    monkeypatch.setattr(e, "AnswerInputs", SimpleNamespace)
    parts = []
    for right, ended in [(3, 10), (9, 5), (10, 4)]:
        asked += [
            [answer(f"a{i}" if i < 2 else "x") for i in range(10)],
            [answer(f" a{i}\n" if i < right else "y", i < ended) for i in range(10)],
        ]
        data = SimpleNamespace(train_rows=1234, kind="messages")
        examples = SimpleNamespace(report=SimpleNamespace(_repr_html_=lambda: "report"))
        judge = made(
            e.AnswerEvaluator, questions=HELD_OUT, data=data, examples=examples, objective=None
        )
        parts.append(story(judge, dict(eval_loss=0.5)))
    compare("\n\n".join(parts) + "\n", "judge_answers.txt")


class Log:
    "A run with some series."

    def __init__(self, *names):
        self.names = names

    def keys(self):
        return self.names

    def series(self, key):
        return [1, 2], [0.5, len(key)]


def test_pairs(monkeypatch):
    rights = iter([0.5, 0.75, 0.25, 1.0])
    monkeypatch.setattr(e.PairEvaluator, "right", lambda self: next(rights))
    pairs = SimpleNamespace(report=SimpleNamespace(_repr_html_=lambda: "report"))
    parts = []
    for n, run in [(300, Log("rewards/chosen", "rewards/margins")), (20, Log())]:
        judge = made(e.PairEvaluator, eval_pairs=[0] * n, pairs=pairs)
        record = {"eval_loss": 0.5, "eval_rewards/margins": 0.25, "eval_rewards/accuracies": 0.6}
        parts.append(story(judge, record | {"eval_kl/exact": 2.0, "loss": 9}, run))
    judge = made(e.LabelEvaluator, eval_pairs=[0] * 9, pairs=None)
    monkeypatch.setattr(e.LabelEvaluator, "right", lambda self: 0.375)
    parts.append(story(judge, {"eval_loss": 0.5, "eval_rewards/margins": 0.25, "eval_kl": 3}))
    parts.append(story(judge, {"eval_loss": 0.5}))
    compare("\n\n".join(parts) + "\n", "judge_pairs.txt")


def test_rewards_are_drawn_once(monkeypatch):
    "Where evaluations were made on the way, the curves of the run show them."
    monkeypatch.setattr(e.PairEvaluator, "right", lambda self: 0.5)
    judge = made(e.PairEvaluator, eval_pairs=[0] * 9, pairs=None)
    trained = ("rewards/chosen", "rewards/margins")
    for run, times in ((Log(*trained), 1), (Log(*trained, "eval_rewards/margins"), 0)):
        assert [title for title, _ in judge.sections(run)].count("Rewards") == times


def test_prompts(asked, monkeypatch):
    seen = []

    def score(rewards, weights, columns):
        seen.append((rewards, weights, columns))
        total = torch.tensor([1.0, float("nan"), 0.5])
        return total, dict(
            right_length=total * 0, right_answer=torch.tensor([0.0, 1.0, float("nan")])
        )

    monkeypatch.setattr(e, "score", score)
    monkeypatch.setattr(e, "text_to_ids", lambda text, tokenizer, plain: [len(text), plain])
    config = SimpleNamespace(rl=SimpleNamespace(reward_weights=[1, 2]))
    questions = [dict(q, row=dict(prompt=q["prompt"], more=i)) for i, q in enumerate(HELD_OUT[:3])]
    del questions[1]["row"]["more"]
    judge = made(e.PromptEvaluator, questions=questions, rewards=["r"], config=config)
    asked += [["one", "b", "c"], ["a0", "a1", "two"]]
    record = dict(eval_loss=0.5, eval_reward=0.75, eval_kl=0.125)
    text = story(judge, record, Log("reward", "completion_length"))
    assert seen[0] == (
        ["r"],
        [1, 2],
        dict(
            more=[0, None, 2],
            prompts=["q0", "q1", "q2"],
            completions=["one", "b", "c"],
            contents=["one", "b", "c"],
            completion_ids=[[3, True], [1, True], [1, True]],
        ),
    )
    nothing = made(e.PromptEvaluator, questions=[], rewards=["r"], config=config, eval_batches=None)
    compare(f"{text}\n\n{story(nothing, dict(eval_loss=1.0))}\n", "judge_prompts.txt")


def test_the_tokens_an_answer_may_have(monkeypatch):
    "Half as many again as the longest expected one, and no more than there is room for."
    calls = []

    def generate(model, rows, most, **knobs):
        calls.append((len(rows), most, knobs))
        return [[*row, 7, 9] if len(row) % 2 else [*row, 7] for row in rows]

    monkeypatch.setattr(e, "generate", generate)
    decode = lambda ids, skip_special_tokens: f" {ids[0]}{skip_special_tokens} "  # noqa: E731
    tokenizer = SimpleNamespace(eos_token_id=9, decode=decode)

    def ask(room, number, **more):
        calls.clear()
        model = SimpleNamespace(config=SimpleNamespace(max_seq_len=room))
        found = e.ask(model, tokenizer, HELD_OUT[:number], **more)
        return [call[:2] for call in calls], found

    assert ask(1000, 10)[0] == [(10, 16)] and ask(25, 10)[0] == [(10, 15)]
    assert ask(5, 10)[0] == [(10, 1)]
    sizes, found = ask(1000, 5, batch_size=2)
    assert sizes == [(2, 4), (2, 7), (1, 9)] and found == ["7True"] * 5
    assert [said.ended for said in found] == [True, False, True, False, True]
    assert calls[0][2] == dict(temperature=0, tokenizer=tokenizer)
    assert e.count_exact([" a0 ", "a1", "x"], HELD_OUT[:3]) == 2 / 3 and e.count_exact([], []) == 0


def test_shares_of_pairs_and_twos(monkeypatch):
    model = torch.nn.Linear(1, 1)
    table = [(2, 1), (1, 2), (1, 1), (3, 1), (0, 5)]
    monkeypatch.setattr(e, "collate_pairs", lambda part: dict(x=torch.tensor(part)))
    monkeypatch.setattr(
        e,
        "pair_log_probs",
        lambda model, batch, share: SimpleNamespace(
            chosen=batch["x"][:, 0], rejected=batch["x"][:, 1]
        ),
    )
    for size in (1, 2, 8):
        assert e.preference_accuracy(model, table, size) == 0.5
    assert e.preference_accuracy(model, []) == 0
    rows = [dict(label=i % 2 == 0, total=float(t), count=c) for i, (t, c) in enumerate(table)]
    # Liked: 2, 1, 0 a token; not liked: 1/2 and 3
    monkeypatch.setattr(
        e,
        "collate_unpaired",
        lambda part: dict(
            total=torch.tensor([r["total"] for r in part] * 2),
            count=torch.tensor([r["count"] for r in part] * 2),
            liked=torch.zeros(2 * len(part)),
        ),
    )
    monkeypatch.setattr(
        e, "sequence_log_probs", lambda model, batch: (batch["total"], batch["count"])
    )
    for size in (1, 2, 8):
        assert e.pairwise_auc(model, rows, size) == pytest.approx(2 / 6)
    assert e.pairwise_auc(model, [dict(rows[0], count=0), dict(rows[1], total=4.0)]) == 0.5
    assert e.pairwise_auc(model, rows[:1]) != e.pairwise_auc(model, rows[:1])


def test_samples_begin_alike(monkeypatch):
    calls = []
    monkeypatch.setattr(
        e, "generate", lambda *args, **knobs: (calls.append(knobs), ["ab!", "c?"])[1]
    )
    sampler = e.make_sampler("tok", ["ab", "c"], SamplingConfig(temperature=0.5, seed=None))
    assert sampler(None, 3) == [("ab", "!"), ("c", "?")]
    assert calls[0]["seed"] == 0 and calls[0]["temperature"] == 0.5
    text = "  one two  three four\nfive six seven"
    assert e.opening(text) == "  one two  three four\nfive six" and e.opening(text, 1) == "  one"
    assert e.opening("one two") == "one two" and e.opening(" ") == " "


def test_samples_begin_with_no_more_than_the_model_reads(monkeypatch):
    "A text without blanks is one word."
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    monkeypatch.setattr(e, "generate", lambda model, prompts, **knobs: prompts)
    config = SimpleNamespace(prompts=[], sampling=SamplingConfig())
    judge = e.TextEvaluator(
        SimpleNamespace(
            config=config,
            tokenizer=BPETokenizer.train(["a b"], 256, progress=False),
            eval_rows=[dict(text="学而时习之" * 20), dict(text="one two")],
            model=SimpleNamespace(config=SimpleNamespace(max_seq_len=64)),
        )
    )
    (long, _), (short, _) = judge.sample(judge.inputs.model, 0)
    assert (
        "学而时习之" * 2 in long
        and len(long.encode()) < 64
        and ("学而时习之" * 20).startswith(long)
    )
    assert short == "one two"


def test_the_judge_of_each_kind_of_run(monkeypatch):
    for kind, judge in e.JUDGES.items():
        inputs = object.__new__(kind)
        inputs.eval_batches, inputs.questions = [1], [1]
        monkeypatch.setattr(judge, "__init__", lambda self, inputs: None)
        assert type(e.make_judge(inputs)) is judge
    inputs = object.__new__(e.AnswerInputs)
    inputs.eval_batches, inputs.questions = [1], []
    assert type(e.make_judge(inputs)) is e.TextEvaluator
    monkeypatch.setattr(e.NoEvaluator, "__init__", lambda self, inputs: None)
    inputs.eval_batches = None
    silent = e.make_judge(inputs)
    assert type(silent) is e.NoEvaluator and silent.end({})[0] == {}
