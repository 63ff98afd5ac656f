"""GRPO and TRL's GRPOTrainer: tokens generated and trained on per second of CPU time.

CPU time of all threads together. The same model, weights, prompts, number and length of
answers, learning rate and loss; no reference. A step is everything: answers, rewards,
advantages, forward, backward, optimizer. No lane may end an answer early, so that both
generate the same number of tokens. The lanes take turns, each time with a trainer of its own;
the first step of each is not counted. One more lane writes the answers with the compiled kernels,
from weights in 8 bits (`rl.sampler_weights=q8_0`), which are packed again after each step.

    python benchmarks/rl_speed.py [--rounds 3] [--steps 4] [--threads 1] [--prompts 4]
        [--generations 8] [--length 64]
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_model():
    "Of the size that the tour trains."
    import torch

    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    torch.manual_seed(0)
    return Transformer(
        ModelConfig(vocab_size=4096, d_model=192, n_heads=6, n_layers=4, d_ff=512, max_seq_len=256)
    )


def reward(completion_ids, **columns):
    return [sum(i % 7 == 0 for i in ids) / len(ids) for ids in completion_ids]


def ours(prompts, args, weights: str = "") -> list[float]:  # CPU seconds of each step
    from trainkit.train.optim import OptimConfig
    from trainkit.align.rl import RLConfig, rl_objective
    from trainkit.align.rollouts import Rollouts
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    model, times = make_model(), [time.process_time()]
    config = RLConfig(
        num_prompts=args.prompts,
        num_generations=args.generations,
        max_completion_length=args.length,
        sampler_weights=weights,
    )

    class Watch:
        def on_step(self, trainer, record):
            times.append(time.process_time())

    Trainer(
        model,
        rl_objective(config),
        Rollouts(model, None, prompts, reward, config),
        config=TrainConfig(max_steps=args.steps + 1, progress=False, mixed_precision="no"),
        callbacks=[Watch()],
        optim=OptimConfig(learning_rate=1e-4),
    ).train()
    return [b - a for a, b in zip(times[1:], times[2:], strict=False)]


def packed(prompts, args) -> list[float]:
    return ours(prompts, args, "q8_0")


def theirs(prompts, args) -> list[float]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainkit.interop.families import to_hf

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(4096)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer, times = (
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2"),
        [],
    )

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    rows = args.prompts * args.generations
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=rows,
            num_generations=args.generations,
            max_completion_length=args.length,
            max_steps=args.steps + 1,
            learning_rate=1e-4,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            generation_kwargs=dict(min_new_tokens=args.length),
        )
        data = Dataset.from_list([dict(prompt=" ".join(f"w{i}" for i in ids)) for ids in prompts])
        GRPOTrainer(
            model=to_hf(make_model()),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Watch()],
        ).train()
    return [b - a for a, b in zip(times, times[1:], strict=False)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(
        rounds=3, steps=4, threads=1, prompts=4, generations=8, length=64
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import transformers
    import trl

    from trainkit.system import environment

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(
        3, 4096, (args.prompts * (args.steps + 1), 16), generator=generator
    ).tolist()
    names = {ours: "trainkit", packed: "trainkit, answers in q8_0", theirs: "trl"}
    results = {lane: [] for lane in names}
    for _ in range(args.rounds):
        for lane in results:
            results[lane] += lane(prompts, args)
    tokens = args.prompts * args.generations * args.length
    speed = {lane: tokens / statistics.median(times) for lane, times in results.items()}
    print(
        f"{environment().get('cpu', '')}, {args.threads} thread(s), torch {torch.__version__}, "
        f"trl {trl.__version__}; "
        f"{args.prompts} prompts of 16, {args.generations} answers of {args.length} tokens each, "
        f"{args.rounds} rounds of {args.steps} steps\n"
    )
    print("| GRPO, answers and step | tokens a second | ratio |\n|---|---|---|")
    for lane, name in names.items():
        print(f"| {name} | {speed[lane]:,.0f} | {speed[lane] / speed[theirs]:.2f} |")


if __name__ == "__main__":
    main()
