"""What `Trainer` adds to a step: the same model, batches and optimizer in a bare hand-written loop, step by step in turns.

Medians of CPU seconds a step, which other processes disturb less than the clock.

    python benchmarks/loop_overhead.py [--steps 200]
"""
import argparse
import os
import statistics
import time
from contextlib import ExitStack

os.environ.setdefault('OMP_NUM_THREADS', '1')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=200)
    steps = parser.parse_args().steps
    import torch

    from trainkit.dataloader import Batches
    from trainkit.model import ModelConfig, Transformer
    from trainkit.optim import OptimConfig, make_optimizer
    from trainkit.plan import TrainConfig
    from trainkit.train import Trainer, lm_loss

    print('| layers x width, rows x tokens | bare loop, ms | Trainer, ms | bare / Trainer |\n|---|---|---|---|')
    for layers, width, rows, length in ((2, 64, 4, 32), (4, 128, 8, 64), (4, 192, 16, 256)):
        count = max(20, steps // (1 if length < 256 else 8))
        batches = list(Batches([list(range(length)) for _ in range(8 * rows)], rows))
        def make(layers=layers, width=width, length=length):
            return Transformer(ModelConfig(vocab_size=512, d_model=width, n_heads=4, n_layers=layers, d_ff=2 * width, max_seq_len=length))
        model = make()
        optimizer = make_optimizer(model, OptimConfig())
        with ExitStack() as stack:
            trainer = Trainer(make(), lm_loss, batches, config=TrainConfig(max_steps=10**6, progress=False))
            trainer.begin(stack, None)
            times = {'bare': [], 'Trainer': []}
            for i in range(count):
                began = time.process_time()
                batch = batches[i % 8]
                model(batch['input_ids'], labels=batch['labels'], return_logits=False).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                middle = time.process_time()
                trainer.step([batch])
                times['bare'].append(middle - began)
                times['Trainer'].append(time.process_time() - middle)
        bare, ours = (1000 * statistics.median(t) for t in times.values())
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        print(f'| {layers} x {width}, {rows} x {length} | {bare:.2f} | {ours:.2f} | {ratio:.3f} |', flush=True)


if __name__ == '__main__': main()
