"""The data types in tensor files, by the names that safetensors and torch give them."""

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' name of each torch data type."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The torch data type by safetensors' name."""
DTYPES_IN_SETTINGS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
"""The torch data type by torch's name, such as float32; used in settings and in messages between roles."""
