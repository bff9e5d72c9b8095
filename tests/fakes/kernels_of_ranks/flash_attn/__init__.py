"""flash-attn 2.8.3 on a CPU, in signature and meaning: what ring-flash-attn and yunchang call of it.

FAULTY_FLASH plants a fault in this process: "lse" rounds lse to bfloat16, "dk" leaves out the last key's gradient.
"""

__version__ = "2.8.3"

from .flash_attn_interface import flash_attn_func  # noqa: F401
