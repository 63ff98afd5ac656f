from . import (
    calibration as calibration,
    ggml as ggml,
    int8 as int8,
    linear as linear,
    nf4 as nf4,
    quantize as quantize,
)
from .calibration import (
    awq as awq,
    calibrate as calibrate,
    fake_quantize as fake_quantize,
    gptq as gptq,
    hqq as hqq,
)
from .ggml import BlockCodes as BlockCodes, pack_blocks as pack_blocks
from .ggml import split_blocks as split_blocks, unpack_blocks as unpack_blocks
from .int8 import dequantize_int8 as dequantize_int8, quantize_int8 as quantize_int8
from .linear import Linear4bit as Linear4bit, Linear8bit as Linear8bit
from .nf4 import (
    QuantizedTensor as QuantizedTensor,
    dequantize_4bit as dequantize_4bit,
    quantize_4bit as quantize_4bit,
)
from .quantize import (
    QuantConfig as QuantConfig,
    load_quantized as load_quantized,
    quantize_model as quantize_model,
)
