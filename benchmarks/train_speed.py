"""Training speed of `Transformer`, transformers' Llama, litgpt's and nanoGPT's model.

One step is forward, backward, fused AdamW. Each system lives in a process of its own and they
take turns, so that a busy machine slows all of them; medians of the rounds, and of the ratios
of neighbours, by the clock and by CPU seconds (which other processes disturb less). Shapes,
number of parameters, batch and optimizer are equal; trainkit, transformers and litgpt also
start from the same weights, and their first losses are compared. nanoGPT's MLP has two
matrices instead of three, so its matrices are widened to the same number of parameters.

`plain` is eager fp32. `best` is bf16 autocast for all, and for trainkit also torch.compile;
`best32` is the same in fp32, for a CPU without bf16. Peers run without compile, as the
question is what our best gains over their best eager loop. trainkit's steps keep freed memory
(`trainkit.system`), as its `Trainer` does on a CPU.

    python benchmarks/train_speed.py [--nanogpt FOLDER_WITH_MODEL_PY] [--setting plain best]
        [--rounds 9] [--threads 1]
    python benchmarks/train_speed.py --losses  # 200 steps on real text: the same losses?
    python benchmarks/train_speed.py --device cuda --shape 125m --setting compiled  # or 1b; MFU

litgpt is imported from the path; its model needs little of what the package requires, so
`pip install --no-deps --target FOLDER litgpt` and `PYTHONPATH=FOLDER` are enough. nanoGPT:
clone github.com/karpathy/nanoGPT.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import types

SHAPES = {  # layers, width, heads, mlp, vocabulary, batch, tokens
    "tiny": (2, 64, 2, 192, 512, 2, 64),  # to see that the script runs
    "bench": (6, 256, 4, 1024, 8192, 8, 256),
    "demo": (
        4,
        192,
        6,
        512,
        4096,
        16,
        256,
    ),  # as `trainkit demo` but for its vocabulary of 8,192 and batches of 8
    "125m": (12, 768, 12, 2048, 50304, 32, 1024),
    "1b": (16, 2048, 32, 8192, 32000, 8, 2048),
}
PEERS = ("transformers", "litgpt", "nanogpt")
SETTINGS = {  # autocast, and what each does besides
    "plain": dict(autocast=False),
    "autocast": dict(autocast=True),
    "best": dict(autocast=True, trainkit=("compile",)),
    "best32": dict(autocast=False, trainkit=("compile",)),
    "compiled": dict(autocast=True, trainkit=("compile",), peers=("compile",)),
}


# ---- the systems


def trainkit_model(shape: tuple, args):
    "Our model, and its loss on a batch of ids. The others take its weights."
    import torch
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    torch.manual_seed(0)
    layers, width, heads, mlp, vocab, _, length = shape
    model = Transformer(
        ModelConfig(
            vocab_size=vocab,
            d_model=width,
            n_heads=heads,
            n_layers=layers,
            d_ff=mlp,
            max_seq_len=length,
        )
    )
    return model, lambda ids: model(input_ids=ids, labels=ids, return_logits=False).loss


def transformers_model(shape: tuple, args):
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, mlp, vocab, _, length = shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_hidden_layers=layers,
            intermediate_size=mlp,
            max_position_embeddings=length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )
    model.load_state_dict(trainkit_model(shape, args)[0].state_dict())
    return model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


class Stub(importlib.machinery.SourceFileLoader):
    "Modules in which every name is there and does nothing, for imports that a model does not use."

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name: str, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in self.names
            else None
        )  # type: ignore

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def make(name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(
                name,
                (),
                {"__init__": lambda self, *args, **kwargs: None, "__bool__": lambda self: False},
            )

        module.__getattr__ = make  # type: ignore
        return module

    def exec_module(self, module):
        pass


def litgpt_parts():
    "litgpt's Config, GPT and loss, without `litgpt/__init__.py`, which loads its whole toolbox."
    spec = importlib.util.find_spec("litgpt")
    if spec is None:
        raise ImportError("litgpt is not importable: see the head of this script")
    package = types.ModuleType("litgpt")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["litgpt"] = package
    missing = tuple(
        n
        for n in ("lightning", "lightning_utilities", "psutil", "jsonargparse")
        if importlib.util.find_spec(n) is None
    )
    sys.meta_path.append(Stub(missing))  # type: ignore
    from litgpt.config import Config  # type: ignore

    package.Config = Config  # type: ignore
    from litgpt.model import GPT  # type: ignore
    from litgpt.utils import chunked_cross_entropy  # type: ignore

    return Config, GPT, chunked_cross_entropy


def litgpt_model(shape: tuple, args):
    import torch

    Config, GPT, cross_entropy = litgpt_parts()
    layers, width, heads, mlp, vocab, _, length = shape
    model = GPT(
        Config(
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            block_size=length,
            vocab_size=vocab,
            padded_vocab_size=vocab,
            bias=False,
            rotary_percentage=1.0,
            parallel_residual=False,
            norm_class_name="RMSNorm",
            norm_eps=1e-5,
            mlp_class_name="LLaMAMLP",
            intermediate_size=mlp,
        )
    )
    model.lm_head.weight = model.transformer.wte.weight
    ours, block = trainkit_model(shape, args)[0].state_dict(), "model.layers.{}."
    theirs = {
        "transformer.wte.weight": ours["model.embed_tokens.weight"],
        "lm_head.weight": ours["lm_head.weight"],
        "transformer.ln_f.weight": ours["model.norm.weight"],
    }
    for i in range(layers):
        here, there = block.format(i), f"transformer.h.{i}."
        theirs[there + "attn.qkv.weight"] = torch.cat(
            [ours[f"{here}self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        for a, b in (
            ("norm_1", "input_layernorm"),
            ("norm_2", "post_attention_layernorm"),
            ("attn.proj", "self_attn.o_proj"),
            ("mlp.fc_1", "mlp.gate_proj"),
            ("mlp.fc_2", "mlp.up_proj"),
            ("mlp.proj", "mlp.down_proj"),
        ):
            theirs[f"{there}{a}.weight"] = ours[f"{here}{b}.weight"]
    model.load_state_dict(theirs)
    return model, lambda ids: cross_entropy(
        model(ids)[:, :-1], ids[:, 1:]
    )  # as litgpt/pretrain.py calls it


def nanogpt_model(shape: tuple, args):
    import torch

    if not args.nanogpt:
        raise ImportError("nanoGPT is not there: give --nanogpt the folder with its model.py")
    spec = importlib.util.spec_from_file_location("nanogpt", os.path.join(args.nanogpt, "model.py"))
    module = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)  # type: ignore
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)  # type: ignore
        layers, width, heads, mlp, vocab, _, length = shape
        model = module.GPT(
            module.GPTConfig(
                block_size=length,
                vocab_size=vocab,
                n_layer=layers,
                n_head=heads,
                n_embd=width,
                dropout=0.0,
                bias=False,
            )
        )
    for block in model.transformer.h:  # As many parameters as three matrices of `mlp` hold
        block.mlp.c_fc, block.mlp.c_proj = (
            torch.nn.Linear(a, b, bias=False)
            for a, b in ((width, 3 * mlp // 2), (3 * mlp // 2, width))
        )
        for layer in (block.mlp.c_fc, block.mlp.c_proj):
            torch.nn.init.normal_(layer.weight, std=0.02)

    def pad(ids):
        return torch.nn.functional.pad(
            ids[:, 1:], (0, 1), value=-1
        )  # -1 is its label for 'nothing'

    return model, lambda ids: model(ids, pad(ids))[1]


MODELS = dict(
    trainkit=trainkit_model,
    transformers=transformers_model,
    litgpt=litgpt_model,
    nanogpt=nanogpt_model,
)


# ---- one system in its own process


def text_batches(shape: tuple):
    "Rows of a public-domain text in tokens of our own, the same for every system."
    import torch
    from trainkit.data.dataset import load_examples
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    vocab, batch, length = shape[4:]
    text = "\n".join(row["text"] for row in load_examples("bible"))[:3_000_000]
    ids = torch.tensor(BPETokenizer.train([text], vocab).encode(text))
    rows = ids[: len(ids) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    while True:
        for part in order.split(batch):
            if len(part) == batch:
                yield rows[part]


class Worker:
    "A system that is ready to take a step."

    def __init__(self, lane: str, setting: str, args):
        import torch

        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        self.args, self.shape, self.device = args, SHAPES[args.shape], torch.device(args.device)
        ours, knobs = lane == "trainkit", SETTINGS[setting]
        self.autocast, extras = knobs["autocast"], knobs.get("trainkit" if ours else "peers", ())
        with self.device:
            self.model, self.loss = MODELS[lane](self.shape, args)
        self.model.train()
        if "compile" in extras:
            self.loss = torch.compile(self.loss)
        matrices, vectors = (
            [p for p in self.model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)
        )
        self.optimizer = torch.optim.AdamW(
            [dict(params=matrices), dict(params=vectors, weight_decay=0.0)],
            lr=3e-4,
            weight_decay=0.1,
            fused=True,
        )
        if args.losses:
            self.batches = text_batches(self.shape)
        else:
            ids = torch.randint(
                self.shape[4], self.shape[5:], generator=torch.Generator().manual_seed(1)
            ).to(self.device)
            self.batches = iter(lambda: ids, None)

    def step(self) -> float:
        import torch

        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.loss(next(self.batches).to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()  # waits for a GPU

    def peak_flops(self) -> float:
        "FLOPs per second of the fastest large matrix product in this setting's dtype."
        import torch
        from trainkit.model.transformer import fast_products

        dtype, best, size = (
            torch.bfloat16 if self.autocast else torch.float32,
            0.0,
            1024 if self.device.type == "cpu" else 8192,
        )
        a, b = (torch.randn(size, size, dtype=dtype, device=self.device) for _ in range(2))
        for i in range(24):
            start = time.perf_counter()
            with fast_products() if i % 2 else contextlib.nullcontext():
                c = a @ b
            c[0, 0].item()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
        return best

    def serve(self) -> None:
        "Answer each line of stdin with a line of JSON."
        answer = dict(parameters=sum(p.numel() for p in self.model.parameters()))
        for line in sys.stdin:
            if line.strip() == "step":
                start, busy = time.perf_counter(), time.process_time()
                answer = dict(
                    loss=self.step(),
                    seconds=time.perf_counter() - start,
                    cpu=time.process_time() - busy,
                )
            elif line.strip() == "peak":
                answer = dict(flops=self.peak_flops())
            elif line.strip() == "memory":
                answer = dict(memory=peak_memory(self.device))
            print(json.dumps(answer), flush=True)


def peak_memory(device) -> float:
    "Megabytes that this process held at most; on a GPU what its tensors held."
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    try:  # getrusage would give the parent's, which the child inherits
        with open("/proc/self/status") as status:
            return next(int(x.split()[1]) / 1024 for x in status if x.startswith("VmHWM"))
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Lane:
    "The other end of a `Worker`."

    def __init__(self, name: str, setting: str, argv: list[str]):
        self.name, self.setting, self.steps = name, setting, []
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv, "--worker", name, "--setting", setting],
            text=True,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.parameters = self.ask("hello")["parameters"]

    def ask(self, what: str) -> dict:
        assert self.process.stdin and self.process.stdout
        try:
            print(what, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name}, {self.setting}: see its message above")
        return json.loads(line)

    def median(self, what: str) -> float:
        return statistics.median(s[what] for s in self.steps)

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore
        self.process.wait()


# ---- the comparison


def train_flops(shape: tuple) -> float:
    "FLOPs of a step: one forward, a backward of twice as many, half of attention (causal)."
    from trainkit.model.config import ModelConfig, flops_by_part

    layers, width, heads, mlp, vocab, batch, length = shape
    parts = flops_by_part(
        ModelConfig(
            vocab_size=vocab,
            d_model=width,
            n_heads=heads,
            n_layers=layers,
            d_ff=mlp,
            max_seq_len=length,
        ),
        batch,
        length,
    )
    return 3 * (sum(parts.values()) - parts["attention"] / 2)


def compare(lanes: list[Lane], args) -> None:
    for i in range(args.warmup + args.rounds):
        for lane in lanes if i % 2 else lanes[::-1]:
            answer = lane.ask("step")
            if i >= args.warmup:
                lane.steps.append(answer)
            else:
                lane.first = answer["loss"] if not i else lane.first  # type: ignore
    shape = SHAPES[args.shape]
    tokens, flops = shape[5] * shape[6], train_flops(shape)
    print(
        "| setting | system | parameters | tokens/s | trainkit / it (median, quartiles) | "
        "by CPU seconds | first loss | peak MB | share of matmul peak |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for setting in args.setting:
        here = [lane for lane in lanes if lane.setting == setting]
        if not here:
            continue
        ours, peak = here[0], here[0].ask("peak")["flops"]
        for lane in here:
            by = {
                w: [b[w] / a[w] for a, b in zip(ours.steps, lane.steps, strict=True)]
                for w in ("seconds", "cpu")
            }
            low, mid, high = statistics.quantiles(by["seconds"], n=4)
            share = (
                ""
                if lane.name == "nanogpt"
                else f"{flops / lane.median('seconds') / peak:.0%} of {peak / 1e9:,.0f} GFLOP/s"
            )
            print(
                f"| {setting} | {lane.name} | {lane.parameters:,} | "
                f"{tokens / lane.median('seconds'):,.0f} | {mid:.2f} ({low:.2f} to {high:.2f}) "
                f"| {statistics.median(by['cpu']):.2f} | {lane.first:.5f} | "
                f"{lane.ask('memory')['memory']:,.0f} | {share} |",
                flush=True,
            )  # type: ignore


def compare_losses(lanes: list[Lane], args) -> None:
    for i in range(args.steps):
        for lane in lanes:
            lane.steps.append(lane.ask("step"))
        if not (i + 1) % 20:
            print(
                f"step {i + 1}: "
                + ", ".join(f"{n.name} {n.setting} {n.steps[-1]['loss']:.4f}" for n in lanes),
                file=sys.stderr,
                flush=True,
            )
    print(
        "| setting | system | loss of the last step | mean of the last 20 | "
        "largest difference of that mean of 20, anywhere |"
    )
    print("|---|---|---|---|---|")

    def mean(lane, end):
        return statistics.mean(s["loss"] for s in lane.steps[max(0, end - 20) : end])

    for lane in lanes:
        gap = max(abs(mean(lane, i) - mean(lanes[0], i)) for i in range(20, args.steps + 1))
        print(
            f"| {lane.setting} | {lane.name} | {lane.steps[-1]['loss']:.4f} | "
            f"{mean(lane, args.steps):.4f} | {gap:.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="bench")
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=["plain", "best"])
    parser.add_argument("--lanes", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--nanogpt", metavar="FOLDER", help="folder with nanoGPT's model.py")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--losses", action="store_true", help="train on real text instead, and compare the losses"
    )
    parser.add_argument("--steps", type=int, default=200, help="for --losses")
    parser.add_argument("--rows", type=int, help="of a batch, if not those of the shape")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows:
        SHAPES[args.shape] = (*SHAPES[args.shape][:5], args.rows, SHAPES[args.shape][6])
    if args.worker:
        from trainkit.system import keep_freed_memory

        with keep_freed_memory(args.worker == "trainkit"):
            return Worker(args.worker, args.setting[0], args).serve()
    import torch
    import transformers

    argv = ["--threads", args.threads, "--shape", args.shape, "--device", args.device]
    argv = (
        [str(x) for x in argv]
        + (["--nanogpt", args.nanogpt] if args.nanogpt else [])
        + ["--losses"] * args.losses
    )
    if args.rows:
        argv += ["--rows", str(args.rows)]
    if args.losses:
        wanted = [
            (n, s)
            for s in args.setting
            for n in ("transformers", "trainkit")
            if s == "plain" or n == "trainkit"
        ]
    else:
        wanted = [
            (n, s) for s in args.setting for n in MODELS if n == "trainkit" or n in args.lanes
        ]
    lanes = []
    for name, setting in wanted:
        try:
            lanes.append(Lane(name, setting, argv))
        except RuntimeError as error:
            print(f"LEFT OUT: {error}", file=sys.stderr, flush=True)
    print(
        f"shape {args.shape}: {SHAPES[args.shape]} (layers, width, heads, mlp, vocabulary, rows, "
        f"tokens); torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {args.device}, {args.threads} thread(s), "
        f"{args.rounds} rounds\n"
    )
    (compare_losses if args.losses else compare)(lanes, args)
    for lane in lanes:
        lane.close()


if __name__ == "__main__":
    main()
