"Search at inference: samples equal those of `generate`, ties count honestly, budgets hold."

import io
import itertools
import math

import pytest
import torch
import transformers

from trainkit import ModelConfig, SamplingConfig, Transformer, generate, load_pretrained
from trainkit.align import RewardModel, token_scores
from trainkit.align.search import (
    Candidate,
    accuracy_chart,
    accuracy_curve,
    best_of_n,
    budget_forcing,
    mean_probability,
    pass_at_k_intervals,
    sample_candidates,
    self_consistency,
    weighted_vote,
)
from trainkit.eval.code_eval import pass_at_k

SYMBOLS = "0123456789=#W."


class Letters:
    eos_token_id = SYMBOLS.index(".")

    def encode(self, text):
        return [SYMBOLS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(SYMBOLS[i] for i in ids)


def ours():
    torch.manual_seed(0)
    shape = dict(d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=64)
    return Transformer(ModelConfig(vocab_size=14, **shape)).eval()


def theirs():
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlamaConfig(
        vocab_size=14, max_position_embeddings=64, pad_token_id=13, eos_token_id=13, **shape
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[ours, theirs])
def model(request):
    return request.param()


def answer(text, ids=(1,), log_prob=0.0):
    return Candidate("?", [0], [*ids], text, log_prob, len(ids))


PROMPTS = ["12=", "7=", "3456="]


def test_samples_are_those_of_generate_and_log_probs_those_of_the_trainer(model):
    tok, sampling = Letters(), SamplingConfig(max_new_tokens=12, seed=5, top_k=8)
    groups = sample_candidates(model, tok, PROMPTS, 4, sampling)
    prompts = [tok.encode(prompt) for prompt in PROMPTS for _ in range(4)]
    rows = generate(model, prompts, 12, top_k=8, seed=5, eos_token_id=13)
    every = [c for group in groups for c in group]
    assert [c.prompt_ids + c.ids for c in every] == rows
    assert all(c.text == tok.decode(c.ids).split(".")[0] for c in every)
    assert all(c.spent == len(c.ids) for c in every)
    free = sample_candidates(model, None, prompts[::4], 2, SamplingConfig(max_new_tokens=6, seed=1))
    for c in itertools.chain(*free):
        ids = torch.tensor([c.prompt_ids + c.ids])
        labels = ids.clone()
        labels[0, : len(c.prompt_ids)] = -100
        scores = token_scores(model, dict(input_ids=ids, labels=labels))
        assert c.log_prob == pytest.approx(scores.log_probs.sum().item(), abs=1e-4)
        assert c.text == ""


def test_batches_have_other_random_numbers_and_stop_strings_end_an_answer(model):
    tok, sampling = Letters(), SamplingConfig(max_new_tokens=12, seed=5)
    halves = sample_candidates(model, tok, PROMPTS[:1], 8, sampling, batch_size=4)[0]
    assert [c.ids for c in halves[:4]] != [c.ids for c in halves[4:]]
    again = sample_candidates(model, tok, PROMPTS[:1], 8, sampling, batch_size=4)[0]
    assert [c.ids for c in halves] == [c.ids for c in again]
    stopped = sample_candidates(model, tok, PROMPTS, 4, sampling, stop=["3", "W"])
    for c in itertools.chain(*stopped):
        assert not {*c.text} & {"3", "W", "."}
        assert len(c.ids) == 12 or SYMBOLS[c.ids[-1]] in "3W."
    with pytest.raises(ValueError, match="equal answers"):
        sample_candidates(model, tok, PROMPTS, 2, SamplingConfig(temperature=0.0))
    with pytest.raises(ValueError, match="n = 0"):
        sample_candidates(model, tok, PROMPTS, 0)


def test_best_of_n_scores_ids_with_a_reward_model(model):
    tok = Letters()
    groups = sample_candidates(model, tok, PROMPTS, 4, SamplingConfig(max_new_tokens=8, seed=2))
    torch.manual_seed(1)
    judge = RewardModel(type(model)(model.config)).eval()
    results = best_of_n(groups, judge)
    with torch.no_grad():
        for result in results:
            alone = [judge(torch.tensor([c.prompt_ids + c.ids])).item() for c in result.candidates]
            assert result.scores == pytest.approx(alone, abs=1e-5)
            assert result.winners == [alone.index(max(alone))]
            assert result.tokens == sum(len(c.ids) for c in result.candidates)


def test_best_of_n_breaks_ties_at_random_and_skips_what_has_no_score():
    group = [answer("1"), answer("2"), answer("3")]

    def score(completions, right, **columns):
        return [None if text == "3" else 1.0 for text in completions]

    (result,) = best_of_n([group], score, [dict(right="2")])
    assert result.winners == [0, 1] and math.isnan(result.scores[2])
    assert result.credit(lambda text: text == "2") == 0.5
    with pytest.raises(ValueError, match="no candidate of prompt 0"):
        best_of_n([group[2:]], score, [dict(right="2")])


def test_majority_with_ties_equals_a_count_of_all_cases():
    chances = {"1": 0.5, "2": 0.3, "no": 0.2}  # The last has no number, and does not vote
    expected = 0.0
    counted = 0.0
    for case in itertools.product(chances, repeat=4):
        (result,) = self_consistency([[answer(text) for text in case]])
        p = math.prod(chances[text] for text in case)
        counted += p * result.credit(lambda value: value == 1.0)
        ones, twos = case.count("1"), case.count("2")
        expected += p * (1.0 if ones > twos else 0.5 if ones == twos and ones else 0.0)
    assert counted == pytest.approx(expected, abs=1e-12)
    (silent,) = self_consistency([[answer("no"), answer("none")]])
    assert silent.value is None and silent.credit(lambda value: True) == 0.0


def test_weights_turn_a_vote():
    group = [
        answer("1", [1, 2], math.log(0.01)),
        answer("1", [1, 2], math.log(0.01)),
        answer("2", [1], math.log(0.5)),
    ]
    (vote,), (weighted,) = self_consistency([group]), weighted_vote([group], mean_probability)
    assert (vote.value, weighted.value) == (1.0, 2.0)
    assert weighted.scores == pytest.approx([0.2, 0.2, 0.5])
    with pytest.raises(ValueError, match="negative"):
        weighted_vote([group], lambda completions, **columns: [-1.0, 0.0, 0.0])


@pytest.mark.parametrize("waits", [0, 2])
def test_thoughts_keep_their_budget(model, waits):
    tok, sampling = Letters(), SamplingConfig(max_new_tokens=3, seed=4)
    groups = budget_forcing(model, tok, PROMPTS, 10, 6, "#", "W=", waits, sampling, batch_size=9)
    assert [len(group) for group in groups] == [6, 6, 6]
    written = 0
    for c in itertools.chain(*groups):
        thought, _, rest = tok.decode(c.ids).partition("#")
        assert len(thought) <= 10 and "." not in thought and len(rest) <= 3
        assert c.text.partition("#")[0] == thought
        assert c.spent >= len(c.ids) - 1 - 2 * waits  # The end and each wait were not sampled
        written += "W=" in thought
    assert bool(written) >= bool(waits)
    again = budget_forcing(model, tok, PROMPTS, 10, 6, "#", "W=", waits, sampling, batch_size=9)
    assert again == groups
    with pytest.raises(ValueError, match="budget = 60"):
        budget_forcing(model, tok, PROMPTS, 60, 1, "#", sampling=sampling)


def test_pass_at_k_is_the_mean_over_problems():
    correct = [[True, False, False, True], [False] * 4, [True] * 4, [True, False, False, False]]
    for k, interval in pass_at_k_intervals(correct, (1, 2, 4)).items():
        shares = [pass_at_k(4, sum(right), k) for right in correct]
        # By all ways to pick k of the samples
        picks = [[any(p) for p in itertools.combinations(right, k)] for right in correct]
        assert shares == pytest.approx([sum(p) / len(p) for p in picks])
        assert interval.value == pytest.approx(sum(shares) / 4) and interval.n == 4
        assert interval.low <= interval.value <= interval.high
    certain = pass_at_k_intervals([[True, True]] * 30, (1,))[1]
    assert certain.value == 1 and 0.8 < certain.low < 0.95
    with pytest.raises(ValueError, match="no problems"):
        pass_at_k_intervals([])


def test_a_curve_is_measured_from_one_sample():
    rows = [dict(right=1.0), dict(right=2.0)]
    groups = [[answer(t) for t in texts] for texts in (["1", "1", "3", "1"], ["2", "1", "1", "1"])]

    def search(parts, rows):
        assert len(parts) == len(rows)
        return self_consistency(parts)

    points = accuracy_curve(
        groups, rows, search, lambda value, row: value == row["right"], (1, 2, 4)
    )
    assert [p.accuracy.value for p in points] == [0.5, (0.75 + 0.25) / 2, 0.5]
    assert [p.tokens for p in points] == [1, 2, 4]
    ax = accuracy_chart({"majority": points}, "Votes")
    assert ax.get_xscale() == "log" and len(ax.collections) == 1
    with pytest.raises(ValueError, match="size 8"):
        accuracy_curve(groups, rows, search, lambda value, row: True, (8,))


def test_a_chat_answers_with_the_best_of_several(tmp_path, monkeypatch, capsys):
    from trainkit import BPETokenizer, save_pretrained
    from trainkit.recipes.commands import chat
    from trainkit.recipes.conversation import Conversation
    from trainkit.recipes.saving import load_reward_model, save_reward_model, score_answers
    from trainkit.tokenizer import set_template

    torch.manual_seed(0)
    tok = BPETokenizer.train(["hello you"] * 9, 262, special_tokens=["<|endoftext|>"])
    shape = dict(d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=96)
    model = Transformer(ModelConfig(vocab_size=tok.vocab_size, **shape))
    set_template(tok, "chatml", model)
    save_pretrained(model, tok, tmp_path / "model")
    base = Transformer(model.config)
    save_reward_model(RewardModel(base), tok, tmp_path / "judge", base)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    knobs = dict(max_new_tokens=6, temperature=1.0, seed=3)
    chat(tmp_path / "model", best_of=4, reward_model=tmp_path / "judge", **knobs)
    judge = load_reward_model(tmp_path / "judge")
    seen = []

    def score(messages, answers):
        seen.append((score_answers(*judge, [messages] * len(answers), answers), answers))
        return seen[0][0]

    talk = Conversation(*load_pretrained(tmp_path / "model"), best_of=4, score=score, **knobs)
    answer = "".join(piece for _, piece in talk.say("hello"))
    scores, answers = seen[0]
    assert answer == answers[scores.index(max(scores))] and len({*scores}) == 4
    assert capsys.readouterr().out.rstrip("\n") == answer.rstrip("\n")
    with pytest.raises(ValueError, match="belong together"):
        chat(tmp_path / "model", best_of=4, **knobs)
