from . import (
    code_eval as code_eval,
    evaluator as evaluator,
    lm_eval as lm_eval,
    metrics as metrics,
    scoring as scoring,
    stats as stats,
)
from .code_eval import human_eval as human_eval, pass_at_k as pass_at_k, run_code as run_code
from .evaluator import EvalReport as EvalReport, evaluate as evaluate, side_by_side as side_by_side
from .lm_eval import run_harness as run_harness
from .metrics import (
    bert_score as bert_score,
    bleu as bleu,
    chrf as chrf,
    compute_metrics as compute_metrics,
    exact_match as exact_match,
    rouge as rouge,
    token_f1 as token_f1,
)
from .scoring import (
    bits_per_byte as bits_per_byte,
    multiple_choice as multiple_choice,
    perplexity as perplexity,
    score_choices as score_choices,
    score_texts as score_texts,
)
from .stats import (
    Interval as Interval,
    bootstrap as bootstrap,
    compare as compare,
    proportion as proportion,
    win_rate as win_rate,
)
