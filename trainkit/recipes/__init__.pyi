from . import (
    commands as commands,
    config as config,
    config_files as config_files,
    control as control,
    conversation as conversation,
    converter as converter,
    data_commands as data_commands,
    demo as demo,
    evaluation as evaluation,
    final_project as final_project,
    foreign_datasets as foreign_datasets,
    foreign_settings as foreign_settings,
    foreign_words as foreign_words,
    launcher as launcher,
    memory_commands as memory_commands,
    methods as methods,
    preparation as preparation,
    runner as runner,
    saving as saving,
    speedrun as speedrun,
    sweep as sweep,
)
from .config import (
    PRESETS as PRESETS,
    RunConfig as RunConfig,
    SFTConfig as SFTConfig,
    TokenizerConfig as TokenizerConfig,
    method_config as method_config,
)
from .control import Remote as Remote
from .conversation import Conversation as Conversation
from .converter import convert_config as convert_config
from .demo import DemoConfig as DemoConfig, run_demo as run_demo
from .evaluation import ask as ask
from .final_project import ProjectReport as ProjectReport, check_project as check_project
from .launcher import (
    LaunchConfig as LaunchConfig,
    launch as launch,
    notebook_launch as notebook_launch,
)
from .memory_commands import plan_needs as plan_needs, predict_needs as predict_needs
from .runner import RunResult as RunResult, prepare as prepare, rehearse as rehearse, run as run
from .saving import (
    load_reward_model as load_reward_model,
    save_reward_model as save_reward_model,
    save_trained as save_trained,
    score_answers as score_answers,
)
from .speedrun import (
    SpeedrunResult as SpeedrunResult,
    Track as Track,
    run_attempt as run_attempt,
    run_speedrun as run_speedrun,
    write_speedrun_page as write_speedrun_page,
)
from .sweep import (
    Sweep as Sweep,
    SweepConfig as SweepConfig,
    find_rate as find_rate,
    load_sweep as load_sweep,
    run_sweep as run_sweep,
)
