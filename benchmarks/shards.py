"""A corpus to shards of ids: how fast compared with the encoder alone, and in how much memory.

The corpus is one file a part (stdlib and bible text again and again, each time with other
noise, so that words are not all cached) made in a temporary folder. Three ways take turns:
the encoder alone on one thread (`encode_flat`, text in memory), `tokenize_to_disk` with one
process and with several. Speed is also given per CPU second of the processes that encode,
which other programs on the machine do not change. All run in processes of their own, whose
peak resident memory is read at the end; the ids are compared.

    python benchmarks/shards.py [--gb 0.1] [--processes 2] [--rounds 3]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bpe_train import machine

from trainkit.data.sources import CORPORA
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

CODE = """
import hashlib, json, resource, sys, time
from pathlib import Path
from trainkit.data.shards import encode_texts, read_pieces, tokenize_to_disk
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
if __name__ == '__main__':
    way, source, tokenizer, folder = sys.argv[1:]
    tok, size = BPETokenizer.load(tokenizer), 0
    tok.encoder.requested = 'numba'
    encode_texts(['warm'], tok)
    def cpu(who): return sum(resource.getrusage(who)[:2])
    began = cpu(resource.RUSAGE_SELF)
    if way == 'encoder': # the time of encode_flat, text read before the clock starts
        seconds = work = 0.
        for text, _ in read_pieces(source):
            size += len(text.encode())
            start, before = time.perf_counter(), cpu(resource.RUSAGE_SELF)
            tok.encoder.encode_flat([text])
            seconds += time.perf_counter() - start
            work += cpu(resource.RUSAGE_SELF) - before
        digest = ''
    else:
        start = time.perf_counter()
        shards = tokenize_to_disk(source, tok, folder, int(way), progress=False)
        seconds = time.perf_counter() - start
        work = cpu(resource.RUSAGE_CHILDREN) or cpu(resource.RUSAGE_SELF) - began
        size = sum(r['text_bytes'] for r in shards.index['shards'])
        hashes = ''.join(r['sha256'] for r in shards.index['shards'])
        digest = hashlib.sha256(hashes.encode()).hexdigest()
    def peak(who): return resource.getrusage(who).ru_maxrss / 1024
    own, child = peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)
    print(json.dumps([size/1e6/seconds, own, child, digest, size/1e6/work]))
"""


def make_corpus(folder: Path, gb: float) -> None:
    "Files of 64 MB of real text with noise in it."
    texts = [row["text"] for name in ("stdlib", "bible") for row in _rows(name)]
    draw, number, left = random.Random(0), 0, int(gb * 1e9)
    while left > 0:
        with open(folder / f"{number:03}.txt", "w", encoding="utf-8") as file:
            room = min(left, 64_000_000)
            while room > 0:
                text = draw.choice(texts)
                noise = "".join(
                    draw.choices("abcdefghijklmnopqrstuvwxyz0123456789 \n", k=len(text) // 20)
                )
                room -= file.write(f"{text}\n{noise}\n")
        left -= (folder / f"{number:03}.txt").stat().st_size
        number += 1


def _rows(name: str):
    try:
        yield from CORPORA[name]()
    except FileNotFoundError:
        return


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--gb", type=float, default=0.1)
    args.add_argument("--processes", type=int, default=2)
    args.add_argument("--rounds", type=int, default=3)
    args = args.parse_args()
    with tempfile.TemporaryDirectory() as home:
        corpus = Path(home) / "corpus"
        corpus.mkdir()
        make_corpus(corpus, args.gb)
        size = sum(file.stat().st_size for file in corpus.iterdir())
        sample = [row["text"] for name in ("stdlib", "bible") for row in _rows(name)][::20]
        BPETokenizer.train(sample, 8192, special_tokens=["<|endoftext|>"], progress=False).save(
            Path(home) / "tokenizer"
        )
        results: dict[str, list] = {way: [] for way in ("encoder", "1", str(args.processes))}
        for number in range(args.rounds):
            for way in results:
                done = subprocess.run(
                    [
                        sys.executable,
                        "-c",
                        CODE,
                        way,
                        str(corpus),
                        f"{home}/tokenizer",
                        f"{home}/{way}-{number}",
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                results[way].append(json.loads(done.stdout))
                subprocess.run(["rm", "-rf", f"{home}/{way}-{number}"], check=True)
        assert len({row[3] for way in results if way != "encoder" for row in results[way]}) == 1, (
            "the bytes differ"
        )
    print(machine())
    print(f"\n{size / 1e9:.2f} GB, {args.rounds} rounds; the bytes are equal\n")
    print(
        "| way | MB/s | MB per CPU second of an encoding process | × the encoder | "
        "largest memory of a process, MB |\n"
        "|---|---|---|---|---|"
    )
    for way, rows in results.items():
        share = statistics.median(
            row[4] / base[4] for row, base in zip(rows, results["encoder"], strict=True)
        )
        name = (
            "encoder alone, one thread"
            if way == "encoder"
            else f"tokenize_to_disk, {way} process{'es' * (way != '1')}"
        )
        print(
            f"| {name} | {statistics.median(row[0] for row in rows):.1f} | "
            f"{statistics.median(row[4] for row in rows):.1f} | {share:.2f} "
            f"| {max(max(row[1:3]) for row in rows):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
