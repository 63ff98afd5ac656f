from . import (
    chat_compare as chat_compare,
    drawing as drawing,
    explorer as explorer,
    form as form,
    labeler as labeler,
    model_explorers as model_explorers,
    next_steps as next_steps,
    panel as panel,
    run_browser as run_browser,
    session as session,
    settings as settings,
    studio as studio,
    text_explorers as text_explorers,
    training_explorers as training_explorers,
    waiting as waiting,
    weight_explorers as weight_explorers,
)
from .chat_compare import ChatCompare as ChatCompare, RemoteModel as RemoteModel
from .explorer import Explorer as Explorer
from .form import Form as Form, Page as Page
from .labeler import PreferenceLabeler as PreferenceLabeler, PreferenceLabels as PreferenceLabels
from .model_explorers import (
    AttentionExplorer as AttentionExplorer,
    SamplingExplorer as SamplingExplorer,
)
from .next_steps import NextSteps as NextSteps
from .panel import TrainerPanel as TrainerPanel
from .run_browser import RunBrowser as RunBrowser
from .session import TrainSession as TrainSession
from .studio import Studio as Studio, serve_studio as serve_studio
from .text_explorers import (
    CurriculumExplorer as CurriculumExplorer,
    MaskViewer as MaskViewer,
    PackingExplorer as PackingExplorer,
    TokenizerExplorer as TokenizerExplorer,
)
from .training_explorers import (
    DPOExplorer as DPOExplorer,
    MemoryPlanner as MemoryPlanner,
    ScheduleExplorer as ScheduleExplorer,
)
from .weight_explorers import LoRAExplorer as LoRAExplorer, QuantExplorer as QuantExplorer
