from . import (
    deploy as deploy,
    families as families,
    gguf as gguf,
    hf as hf,
    hf_bridge as hf_bridge,
    hub as hub,
    llamafactory as llamafactory,
    trl as trl,
)
from .deploy import (
    calibration_ids as calibration_ids,
    collect_importance as collect_importance,
    export_compressed as export_compressed,
    read_imatrix as read_imatrix,
    write_imatrix as write_imatrix,
)
from .families import FAMILIES as FAMILIES, from_hf as from_hf, to_hf as to_hf
from .gguf import export_gguf as export_gguf, stored_tensors as stored_tensors
from .gguf import write_modelfile as write_modelfile
from .hf import load_pretrained as load_pretrained, save_pretrained as save_pretrained
from .hf_bridge import fast_tokenizer as fast_tokenizer, to_peft_model as to_peft_model
from .hub import HubConfig as HubConfig, fetch_model as fetch_model, push_to_hub as push_to_hub
from .llamafactory import run_llamafactory as run_llamafactory, to_llamafactory as to_llamafactory
from .trl import TRLTrainer as TRLTrainer, run_trl as run_trl, trl_arguments as trl_arguments
