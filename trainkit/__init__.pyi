from . import (
    align as align,
    charts as charts,
    cli as cli,
    config as config,
    course as course,
    data as data,
    display as display,
    audit as audit,
    engine as engine,
    eval as eval,
    files as files,
    interop as interop,
    lora as lora,
    memory as memory,
    model as model,
    numba_utils as numba_utils,
    parallel as parallel,
    progress as progress,
    quant as quant,
    recipes as recipes,
    settings as settings,
    system as system,
    tokenizer as tokenizer,
    train as train,
    widgets as widgets,
)
from .settings import (
    DPOConfig as DPOConfig,
    LoRAConfig as LoRAConfig,
    OptimConfig as OptimConfig,
    QuantConfig as QuantConfig,
    RLConfig as RLConfig,
    SamplingConfig as SamplingConfig,
)
from .system import doctor as doctor
from .tokenizer.bpe_tokenizer import BPETokenizer as BPETokenizer
from .data.dataloader import Batches as Batches, pack as pack
from .data.dataset import (
    DataConfig as DataConfig,
    load_examples as load_examples,
    split_examples as split_examples,
)
from .data.mixture import mix as mix
from .data.quality import check_examples as check_examples
from .data.tokenization import tokenize_examples as tokenize_examples
from .model.config import ModelConfig as ModelConfig
from .model.generation import generate as generate, stream as stream
from .model.transformer import Transformer as Transformer
from .train.config import Control as Control, TrainConfig as TrainConfig
from .train.objectives import Loss as Loss, lm_loss as lm_loss, objective as objective
from .train.optim import make_optimizer as make_optimizer
from .train.trainer import Trainer as Trainer
from .lora.adapters import load_adapter as load_adapter, save_adapter as save_adapter
from .lora.inject import add_lora as add_lora
from .lora.merge import merge_lora as merge_lora
from .quant.quantize import quantize_model as quantize_model
from .memory.planner import plan_memory as plan_memory
from .align.dpo import dpo_objective as dpo_objective
from .align.rl import rl_objective as rl_objective
from .align.rollouts import Rollouts as Rollouts
from .eval.evaluator import evaluate as evaluate
from .interop.gguf import export_gguf as export_gguf
from .interop.hf import load_pretrained as load_pretrained, save_pretrained as save_pretrained
from .recipes.config import RunConfig as RunConfig
from .recipes.runner import run as run
from .widgets.panel import TrainerPanel as TrainerPanel

__version__: str
