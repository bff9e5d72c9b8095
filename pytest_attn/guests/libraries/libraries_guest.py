"""The guest libraries: backends of third-party libraries, and what other libraries call those that there are."""

from pytest_attn.seam import Guest

_HERE = "pytest_attn.guests.libraries"
#: the order is that of tables and of "all"
BACKENDS = {
    "flash2": f"{_HERE}.flash_attention:Flash2",
    "flash2_kvcache": f"{_HERE}.flash_attention:Flash2KvCache",
    "flash3": f"{_HERE}.flash_attention:Flash3",
    "flash4": f"{_HERE}.flash_attention:Flash4",
    "xformers": f"{_HERE}.xformers:Xformers",
    "xformers_cutlass": f"{_HERE}.xformers:XformersCutlass",
    "te_fused": f"{_HERE}.transformer_engine:TeFused",
    "te_flash": f"{_HERE}.transformer_engine:TeFlash",
    "te_unfused": f"{_HERE}.transformer_engine:TeUnfused",
    "cudnn": f"{_HERE}.cudnn:CudnnFrontend",
    "flashinfer_fa2": f"{_HERE}.flashinfer:FlashInferFa2",
    "flashinfer_fa3": f"{_HERE}.flashinfer:FlashInferFa3",
    "natten": f"{_HERE}.natten:Natten",
    "sage": f"{_HERE}.sage:Sage",
    "sage_fp16": f"{_HERE}.sage:SageFp16",
    "sage_fp8": f"{_HERE}.sage:SageFp8",
    "hub:REPO": f"{_HERE}.hub:HubKernel",
    "diffusers:NAME": f"{_HERE}.diffusers:DiffusersDispatch",
    "transformers:NAME": f"{_HERE}.transformers:TransformersDispatch",
}
#: the names of diffusers, transformers and vLLM for what has another here; their dispatchers are backends of their own
ALIASES = {
    # diffusers
    "native": "sdpa",
    "_native_math": "math",
    "_native_flash": "sdpa_flash",
    "_native_efficient": "sdpa_efficient",
    "_native_cudnn": "sdpa_cudnn",
    "flash": "flash2",
    "flash_varlen": "flash2",
    "_flash_3": "flash3",
    "_flash_varlen_3": "flash3",
    "flash_hub": "hub:kernels-community/flash-attn2@v3",
    "flash_varlen_hub": "hub:kernels-community/flash-attn2@v3",
    "_flash_3_hub": "hub:kernels-community/flash-attn3@v1",
    "_flash_3_varlen_hub": "hub:kernels-community/flash-attn3@v1",
    "flash_4_hub": "hub:kernels-community/flash-attn4@v0",
    "aiter_fa2_hub": "hub:kernels-community/aiter-flash-attn-ck@v1",
    "_sage_qk_int8_pv_fp16_cuda": "sage_fp16",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "sage_fp8",
    # transformers
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "flash_attention_4": "flash4",
    "flex_attention": "flex",
    # vLLM
    "TORCH_SDPA": "sdpa",
    "FLEX_ATTENTION": "flex",
    "FLASH_ATTN": "flash2",
    "XFORMERS": "xformers",
    "FLASHINFER": "flashinfer_fa2",  # on Hopper it may choose fa3
}
GUEST = Guest(backends={"": BACKENDS}, aliases=ALIASES)
