"""Training of a byte-level BPE tokenizer compared with `tokenizers` and `rustbpe`.

The time runs from texts to merges. The systems take turns, so that a busy machine slows all
of them; medians of the rounds, and of the ratios of neighbours in one round. The first round,
in which numba loads or compiles, is not counted. With --big, one process for each system
learns from 100 MB of Python source that it reads file by file, and reports its CPU seconds and
its peak memory; gigatoken takes part if it can be imported, from one string and by its own
pattern, which is GPT-2's.

With `--text FILE` they learn from that file, and with `--distinct` it is written first: the texts
that Python, its packages and the system have (sources, headers, documentation, JSON, web pages),
each content once, in mixed order. `--limit` stops a system after so many CPU seconds.

    python benchmarks/bpe_train.py [--megabytes 5] [--vocab 8192] [--rounds 7]
    python benchmarks/bpe_train.py --big [--megabytes 100] [--vocab 8192] [--systems NAME ...]
    python benchmarks/bpe_train.py --big --megabytes 1000 --vocab 32768 --distinct --text FILE \\
        --limit 900
"""

import argparse
import datetime
import hashlib
import importlib.util
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path


def python_source(size: int) -> Iterator[str]:
    "Python source of `size` bytes: the standard library and installed packages, repeated."
    skip = {"test", "tests", "idlelib", "encodings", "site-packages", "__pycache__"}
    stdlib = [
        path
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        if not skip & {*path.parts}
    ]
    for path in (
        *stdlib,
        *sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")),
        *stdlib * 100,
    ):
        text = path.read_bytes().decode("utf-8", "ignore")
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


KINDS = "py pyi h hpp c cpp cuh md rst txt json js ts css html xml svg pm csv ipynb".split()
SEPARATOR = "\0"  # Between the texts of a file


def write_distinct(path: Path, size: int) -> None:
    "Write `size` bytes of texts that this machine has, no content twice; raises if it has fewer."
    paths = sysconfig.get_paths()
    roots = (paths["stdlib"], paths["purelib"], "/usr/share", "/usr/include", "/usr/lib")
    names = sorted(
        os.path.join(folder, name)
        for root in roots
        for folder, _, files in os.walk(root)
        for name in files
        if name.rpartition(".")[2] in KINDS
    )
    random.Random(0).shuffle(names)
    known = set()
    with open(path, "wb") as out:
        for name in names:
            try:
                data = Path(name).read_bytes()
            except OSError:  # A link to nothing
                continue
            data = data.decode("utf-8", "ignore").replace(SEPARATOR, "").encode()
            key = hashlib.blake2b(data, digest_size=16).digest()
            if key not in known:
                known.add(key)
                size -= out.write(data + SEPARATOR.encode())
            if size <= 0:
                return
    raise SystemExit(f"{size / 1e6:.0f} MB are missing: this machine has no more text")


def read_texts(path: Path) -> Iterator[str]:
    "The texts of a file, which is read a few megabytes at a time."
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            *whole, rest = (rest + block).split(SEPARATOR.encode())
            yield from (text.decode() for text in whole)
    if rest:
        yield rest.decode()


def train(system: str, texts, vocab: int, path: Path | None = None):
    "Learn `vocab` tokens from texts by GPT-4's pattern; returns their bytes."
    from trainkit.tokenizer.pretokenize import PATTERNS

    pattern = PATTERNS["cl100k"]
    if system.startswith("trainkit"):
        from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

        tok = BPETokenizer.train(
            texts, vocab, backend=system.split()[1], num_proc=1, progress=False
        )
        return [*tok.tokens]
    if system == "gigatoken":
        from gigatoken import TextFileSource, train_bpe

        if path is not None:
            return train_bpe(TextFileSource([path], SEPARATOR), vocab, [])[0]
        return train_bpe("\n".join(texts).encode(), vocab, [])[0]
    if system == "rustbpe":
        import rustbpe

        tok = rustbpe.Tokenizer()
        tok.train_from_iterator(iter(texts), vocab, pattern=pattern)
        return [
            bytes(token) for token, _ in sorted(tok.get_mergeable_ranks(), key=lambda item: item[1])
        ]
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "true" if system.endswith("2 threads") else "false"
    )  # read at each call
    from tokenizers import Regex, Tokenizer, models, trainers
    from tokenizers import pre_tokenizers as pre

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre.Sequence(
        [pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(False, use_regex=False)]
    )
    tok.train_from_iterator(
        iter(texts),
        trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        ),
    )
    return tok.get_vocab_size()


def machine() -> str:
    "One line about where and with what this was measured."
    names = (
        [
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ]
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    packages = ", ".join(
        f"{name} {version(name)}"
        for name in ("numba", "tokenizers", "tiktoken", "rustbpe", "regex")
    )
    return (
        f"{datetime.date.today()}, {names[0] if names else platform.processor()}, "
        f"{os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, {packages}"
    )


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--megabytes", type=int, help="5, or 100 with --big")
    args.add_argument("--vocab", type=int, default=8192)
    args.add_argument("--rounds", type=int, default=7)
    args.add_argument(
        "--big", action="store_true", help="100 MB, with the largest memory of each system"
    )
    args.add_argument("--systems", nargs="+", help="for --big; all if not given")
    args.add_argument("--text", type=Path, help="for --big: learn from this file")
    args.add_argument("--distinct", action="store_true", help="write --text first")
    args.add_argument("--limit", type=int, help="for --big: CPU seconds of one system")
    args.add_argument("--one", help=argparse.SUPPRESS)
    args = args.parse_args()
    megabytes = args.megabytes or (100 if args.big else 5)
    if args.one:  # a process of its own, for --big
        if args.limit:
            resource.setrlimit(resource.RLIMIT_CPU, (args.limit, args.limit))
        texts = read_texts(args.text) if args.text else python_source(megabytes * 10**6)
        start = time.perf_counter()
        train(args.one, texts, args.vocab, args.text)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
        return
    print(machine(), end="\n\n")
    systems = [
        "trainkit python",
        "trainkit numba",
        "rustbpe",
        "tokenizers, 1 thread",
        "tokenizers, 2 threads",
    ]
    if args.big:
        if args.distinct:
            write_distinct(args.text, megabytes * 10**6)
        print(f"| {megabytes} MB to {args.vocab:,} tokens | seconds | CPU s | largest memory, MB |")
        print("|---|---|---|---|")
        if importlib.util.find_spec("gigatoken"):
            systems.append("gigatoken")
        for system in args.systems or systems:
            command = [
                sys.executable,
                __file__,
                "--one",
                system,
                "--megabytes",
                str(megabytes),
                "--vocab",
                str(args.vocab),
            ]
            command += ["--text", str(args.text)] if args.text else []
            command += ["--limit", str(args.limit)] if args.limit else []
            child = subprocess.run(command, capture_output=True, text=True)
            if args.limit and child.returncode < 0:
                print(f"| {system} | | more than {args.limit} | |", flush=True)
                continue
            child.check_returncode()
            seconds, cpu, memory = map(float, child.stdout.splitlines()[-1].split())
            print(f"| {system} | {seconds:.1f} | {cpu:.1f} | {memory:.0f} |", flush=True)
        return
    texts = [*python_source(megabytes * 10**6)]
    times: dict[str, list[float]] = {system: [] for system in systems}
    learned = {}
    for _ in range(args.rounds + 1):
        for system in systems:
            start = time.perf_counter()
            learned[system] = train(system, texts, args.vocab)
            times[system].append(time.perf_counter() - start)
    assert learned["trainkit python"] == learned["trainkit numba"] == learned["rustbpe"]
    print(
        f"{sum(len(text.encode()) for text in texts) / 1e6:.1f} MB in {len(texts)} texts to "
        f"{args.vocab:,} tokens, {args.rounds} rounds; "
        "the merges of the first three are equal\n"
    )
    print(
        "| system | seconds | × tokenizers, 1 thread | × tokenizers, 2 threads | × rustbpe |\n"
        "|---|---|---|---|---|"
    )
    for system in systems:
        ratios = [
            statistics.median(
                a / b for a, b in zip(times[system][1:], times[other][1:], strict=True)
            )
            for other in ("tokenizers, 1 thread", "tokenizers, 2 threads", "rustbpe")
        ]
        print(
            f"| {system} | {statistics.median(times[system][1:]):.2f} | "
            + " | ".join(f"{r:.2f}" for r in ratios)
            + " |"
        )


if __name__ == "__main__":
    main()
