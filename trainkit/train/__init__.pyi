from . import (
    checkpoint as checkpoint,
    config as config,
    loggers as loggers,
    lr_finder as lr_finder,
    monitors as monitors,
    objectives as objectives,
    optim as optim,
    recovery as recovery,
    reports as reports,
    runs as runs,
    sharding as sharding,
    step as step,
    trainer as trainer,
)
from .checkpoint import (
    CheckpointWriter as CheckpointWriter,
    find_checkpoints as find_checkpoints,
    latest_checkpoint as latest_checkpoint,
    load_checkpoint as load_checkpoint,
)
from .config import (
    Control as Control,
    Result as Result,
    TrainConfig as TrainConfig,
    TrainingError as TrainingError,
)
from .loggers import MetricsLog as MetricsLog
from .lr_finder import LRCurve as LRCurve, lr_find as lr_find
from .monitors import (
    EnergyMeter as EnergyMeter,
    HealthCheck as HealthCheck,
    SystemMonitor as SystemMonitor,
    check_health as check_health,
)
from .objectives import (
    Loss as Loss,
    lm_loss as lm_loss,
    lm_objective as lm_objective,
    objective as objective,
)
from .optim import (
    AdamW8bit as AdamW8bit,
    Muon as Muon,
    OptimConfig as OptimConfig,
    make_optimizer as make_optimizer,
    make_schedule as make_schedule,
)
from .reports import compare_runs as compare_runs, write_report as write_report
from .runs import Run as Run, RunFolder as RunFolder, list_runs as list_runs, read_run as read_run
from .step import eval_loss as eval_loss, train_step as train_step
from .trainer import Trainer as Trainer
