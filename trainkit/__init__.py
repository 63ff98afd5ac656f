"""Read how a language model is trained, tuned, aligned and shrunk, and use the very same code for real.

Every module comes from one notebook of the same subject: `from trainkit.tokenizer import BPETokenizer`,
`from trainkit.model import Transformer`, `from trainkit.train import Trainer`, `from trainkit.recipes import run`.
Importing the package itself loads nothing else."""

__version__ = "0.1.0"

# A class of another system, and what does its work here
_ELSEWHERE = {
    'ModelTrainer': 'trainkit.recipes.run is a whole run, trainkit.train.Trainer the loop alone',
    'TrainingOrchestrator': 'trainkit.recipes.run runs every method, by the method of a trainkit.method.RunConfig',
    'SmoLoRA': 'trainkit.recipes.run with method=lora trains and saves an adapter, trainkit.merge.merge_folder merges it',
    'FineTuner': 'trainkit.recipes.run tunes a model, by the method and engine of a trainkit.method.RunConfig',
    'SFTTrainer': 'trainkit.recipes.run with method=sft; trainkit.lengths.tokenize_examples prepares the rows',
    'DPOTrainer': 'trainkit.recipes.run with method=dpo, whose result has a reward_margin; trainkit.preferences.tokenize_pairs '
                  'prepares the pairs, and trainkit.dpo.dpo_objective is the loss for trainkit.train.Trainer',
    'RewardTrainer': 'trainkit.recipes.run with method=reward; trainkit.reward.reward_objective is the loss',
    'PPOTrainer': 'trainkit.recipes.run with method=ppo; trainkit.rl.ppo_objective is the loss',
    'GRPOTrainer': 'trainkit.recipes.run with method=grpo; trainkit.rl.grpo_objective is the loss',
    'MetricsCalculator': 'trainkit.metrics.compute_metrics compares answers with references, trainkit.report.evaluate judges a '
                         'model on rows, and trainkit.track.MetricsLog writes numbers down',
    'MetricsTracker': 'trainkit.track.MetricsLog writes the numbers of a run down, trainkit.runs.read_run reads them',
    'ModelManager': 'trainkit.hf.load_pretrained opens a model and its tokenizer',
    'ConfigManager': 'trainkit.config.load_config reads a config, trainkit.method.method_config one of a run',
    'ReasoningDataset': 'trainkit.loading.load_examples reads rows, trainkit.lengths.tokenize_examples encodes them',
    'TrainingConfig': 'trainkit.plan.TrainConfig holds the knobs of the loop, trainkit.method.RunConfig those of a run',
}


def __getattr__(name: str):
    if name in _ELSEWHERE:  # an ImportError, since `from trainkit import X` swallows the words of an AttributeError
        raise ImportError(f'{name} is a class of another system. Here {_ELSEWHERE[name]}')
    if name == 'doctor':  # the first cell of every hosted notebook: trainkit.doctor()
        from .machine import doctor
        return doctor
    raise AttributeError(f"module 'trainkit' has no attribute '{name}'; its parts are modules: import trainkit.{name}")
