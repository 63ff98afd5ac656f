"""A toolkit for training, tuning, aligning and quantizing language models, written to be read.

The names that you will type most are here: `from trainkit import BPETokenizer, Transformer, Trainer, add_lora, run`.
Each package has more: `from trainkit.lora import grow_rank`. Nothing is imported before you ask for it."""

from trainkit._lazy import attach_stub

__version__ = "0.2.0"

_find, __dir__, __all__ = attach_stub(__name__, __file__)

# A class of another system, and what does its work here
_ELSEWHERE = {
    'ModelTrainer': 'trainkit.run is a whole run, trainkit.Trainer the loop alone',
    'TrainingOrchestrator': 'trainkit.run runs every method, by the method of a trainkit.RunConfig',
    'SmoLoRA': 'trainkit.run with method=lora trains and saves an adapter, trainkit.lora.merge_folder merges it',
    'FineTuner': 'trainkit.run tunes a model, by the method and engine of a trainkit.RunConfig',
    'SFTTrainer': 'trainkit.run with method=sft; trainkit.tokenize_examples prepares the rows',
    'SFTConfig': 'trainkit.RunConfig holds the knobs of a run, with method=sft',
    'TrainingArguments': 'trainkit.TrainConfig holds the knobs of the loop and trainkit.OptimConfig those of the '
                         'optimizer; trainkit.RunConfig has both',
    'LoraConfig': 'trainkit.LoRAConfig has the same knobs',
    'get_peft_model': 'trainkit.add_lora(model, trainkit.LoRAConfig(...)) adds an adapter',
    'BitsAndBytesConfig': 'trainkit.QuantConfig(bits=4) goes to load_pretrained(..., quant=...) or a RunConfig',
    'DPOTrainer': 'trainkit.run with method=dpo, whose result has a reward_margin; trainkit.align.tokenize_pairs '
                  'prepares the pairs, and trainkit.dpo_objective is the loss for trainkit.Trainer',
    'RewardTrainer': 'trainkit.run with method=reward; trainkit.align.reward_objective is the loss',
    'PPOTrainer': 'trainkit.run with method=ppo; trainkit.align.ppo_objective is the loss',
    'GRPOTrainer': 'trainkit.run with method=grpo; trainkit.align.grpo_objective is the loss',
    'MetricsCalculator': 'trainkit.eval.compute_metrics compares answers with references, trainkit.evaluate judges a '
                         'model on rows, and trainkit.train.MetricsLog writes numbers down',
    'MetricsTracker': 'trainkit.train.MetricsLog writes the numbers of a run down, trainkit.train.read_run reads them',
    'ModelManager': 'trainkit.load_pretrained opens a model and its tokenizer',
    'ConfigManager': 'trainkit.config.load_config reads a config, trainkit.recipes.method_config one of a run',
    'ReasoningDataset': 'trainkit.load_examples reads rows, trainkit.tokenize_examples encodes them',
    'TrainingConfig': 'trainkit.TrainConfig holds the knobs of the loop, trainkit.RunConfig those of a run',
    'PeftModel': 'trainkit.lora.load_adapter(model, FOLDER) opens an adapter, trainkit.lora.merge_lora merges it',
    'EarlyStoppingCallback': 'trainkit.TrainConfig(early_stopping_patience=..., early_stopping_threshold=...)',
    'prepare_training': 'trainkit.recipes.prepare(config), which raises where something is wrong',
    'load_training_data': 'trainkit.load_examples reads rows, trainkit.data.load_splits also those to evaluate on',
    'load_evaluation_data': 'trainkit.data.load_splits reads the rows to train and to evaluate on',
    'metrics_tracker': 'trainkit.train.MetricsLog writes the numbers of a run down, trainkit.train.read_run reads them',
    'print_trainable_parameters': 'trainkit.lora.trainable_report(model) counts them',
    'training_diagnostics': 'trainkit.train.check_health(run), the callback trainkit.train.HealthCheck, or '
                            'trainkit runs health FOLDER in a shell',
}


def __getattr__(name: str):
    if name in _ELSEWHERE:  # an ImportError, since `from trainkit import X` swallows the words of an AttributeError
        what = 'a class' if name[0].isupper() else 'a name'
        raise ImportError(f'{name} is {what} of another system. Here {_ELSEWHERE[name]}')
    return _find(name)
