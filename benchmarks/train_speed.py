"""Training speed of `Transformer` beside transformers' `LlamaForCausalLM`: one step is forward, backward, AdamW.

Same shape, same weights, same batch, same fused optimizer, same process; the two take turns, so that a busy machine
slows both. Medians of the rounds and of the ratios of neighbours, by the clock and by CPU seconds (which other processes
disturb less). Peak memory comes from a process of its own for each.

    python benchmarks/train_speed.py [--rounds 15] [--threads 1] [--shape bench|demo] [--autocast]
"""
import argparse
import os
import statistics
import subprocess
import sys
import time

SHAPES = { # layers, width, heads, mlp, vocabulary, batch, tokens
    'bench': (6, 256, 4, 1024, 8192, 8, 256),
    'demo': (4, 192, 6, 512, 4096, 16, 256), # what `trainkit demo` trains
}
LANES = ('trainkit', 'transformers')


def make_step(lane: str, shape: tuple, autocast: bool):
    "A function that takes one step and gives its loss."
    import torch
    layers, width, heads, mlp, vocab, batch, length = shape
    torch.manual_seed(0)
    from trainkit.model import ModelConfig, Transformer
    ours = Transformer(ModelConfig(vocab_size=vocab, d_model=width, n_heads=heads, n_layers=layers, d_ff=mlp, max_seq_len=length))
    model, kwargs = ours, {'return_logits': False}
    if lane == 'transformers':
        from transformers import LlamaConfig, LlamaForCausalLM
        model, kwargs = LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab, hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=layers,
            intermediate_size=mlp, max_position_embeddings=length, rms_norm_eps=1e-5, tie_word_embeddings=True)), {}
        model.load_state_dict(ours.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1))

    def step():
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, **kwargs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step


def peak_memory_here() -> float:
    "Megabytes that this process held at most."
    try: # getrusage would give the parent's, which the child inherits
        with open('/proc/self/status') as status: return next(int(x.split()[1]) / 1024 for x in status if x.startswith('VmHWM'))
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_memory(lane: str, shape: str, args) -> float:
    "Megabytes, whole process, after five steps."
    command = [sys.executable, __file__, '--memory', lane, '--shape', shape, '--threads', str(args.threads)]
    return float(subprocess.check_output(command + ['--autocast'] * args.autocast, text=True).split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--shape', choices=SHAPES)
    parser.add_argument('--autocast', action='store_true', help='bf16 by autocast, for both')
    parser.add_argument('--memory', choices=LANES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ['HF_HUB_OFFLINE'] = '1'
    import torch
    torch.set_num_threads(args.threads)
    if args.memory:
        import transformers  # noqa: F401 - in both, so that the difference is the model's
        step = make_step(args.memory, SHAPES[args.shape], args.autocast)
        for _ in range(5): step()
        return print(peak_memory_here())
    import transformers
    print(f'torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} thread(s), '
          f'{"bf16 autocast" if args.autocast else "fp32"}, {args.rounds} rounds')
    print('| shape | trainkit tokens/s | transformers tokens/s | ratio (median, quartiles) | CPU seconds ratio | largest difference of losses | peak MB |')
    print('|---|---|---|---|---|---|---|')
    for name in [args.shape] if args.shape else SHAPES:
        shape, steps = SHAPES[name], {lane: make_step(lane, SHAPES[name], args.autocast) for lane in LANES}
        seconds, work, gap = {lane: [] for lane in LANES}, {lane: [] for lane in LANES}, 0.0
        for i in range(args.rounds + 1):
            losses = []
            for lane in LANES if i % 2 else LANES[::-1]:
                start, busy = time.perf_counter(), time.process_time()
                losses.append(steps[lane]().item())
                if not i: continue # The first is for warming up
                seconds[lane].append(time.perf_counter() - start)
                work[lane].append(time.process_time() - busy)
            gap = max(gap, abs(losses[0] - losses[1]))
        ratios = statistics.quantiles([b / a for a, b in zip(*seconds.values(), strict=True)], n=4)
        by_work = statistics.median(b / a for a, b in zip(*work.values(), strict=True))
        tokens = shape[-1] * shape[-2]
        speed = {lane: tokens / statistics.median(seconds[lane]) for lane in LANES}
        memory = ' / '.join(f'{peak_memory(lane, name, args):.0f}' for lane in LANES)
        print(f'| {name} | {speed["trainkit"]:,.0f} | {speed["transformers"]:,.0f} | '
              f'{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f}) | {by_work:.2f} | {gap:.1e} | {memory} |', flush=True)


if __name__ == '__main__': main()
