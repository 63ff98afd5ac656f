from . import estimate as estimate, offload as offload, planner as planner, tracker as tracker
from .estimate import (
    MemoryWatch as MemoryWatch,
    measure_memory as measure_memory,
    memory_report as memory_report,
    predict_memory as predict_memory,
    predict_run as predict_run,
)
from .offload import (
    OffloadedOptimizer as OffloadedOptimizer,
    checkpoint_blocks as checkpoint_blocks,
    freeze as freeze,
    offload_activations as offload_activations,
)
from .planner import find_machine as find_machine, plan_memory as plan_memory
from .tracker import MemoryReport as MemoryReport
