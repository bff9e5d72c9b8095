"""The backends that come with the plugin: which file of libraries/ each name loads, and what other libraries call them."""

#: name -> (module of libraries/, class); the order is the order of tables and of "all"
BUILTIN = {
    "math": ("sdpa", "Math"),
    "eager": ("eager", "Eager"),
    "sdpa": ("sdpa", "Automatic"),
    "sdpa_flash": ("sdpa", "Flash"),
    "sdpa_efficient": ("sdpa", "Efficient"),
    "sdpa_cudnn": ("sdpa", "Cudnn"),
    "sdpa_fa3": ("sdpa", "SdpaFa3"),
    "sdpa_fa4": ("sdpa", "SdpaFa4"),
    "varlen": ("sdpa", "Varlen"),
    "kv_cache": ("sdpa", "KvCache"),
    "flex": ("flex", "Flex"),
    "flex_flash": ("flex", "FlexFlash"),
    "flex_decode": ("flex", "FlexDecode"),
    "flash2": ("flash_attention", "Flash2"),
    "flash2_kvcache": ("flash_attention", "Flash2KvCache"),
    "flash3": ("flash_attention", "Flash3"),
    "flash4": ("flash_attention", "Flash4"),
    "xformers": ("xformers", "Xformers"),
    "xformers_cutlass": ("xformers", "XformersCutlass"),
    "te_fused": ("transformer_engine", "TeFused"),
    "te_flash": ("transformer_engine", "TeFlash"),
    "te_unfused": ("transformer_engine", "TeUnfused"),
    "cudnn": ("cudnn", "CudnnFrontend"),
    "flashinfer_fa2": ("flashinfer", "FlashInferFa2"),
    "flashinfer_fa3": ("flashinfer", "FlashInferFa3"),
    "natten": ("natten", "Natten"),
    "sage": ("sage", "Sage"),
    "sage_fp16": ("sage", "SageFp16"),
    "sage_fp8": ("sage", "SageFp8"),
    "int8_dynamic": ("eager", "Int8Dynamic"),
}
#: prefix of a name -> (module, class, what follows the colon, what it stands for): "hub:REPO" makes class(REPO)
FAMILIES = {
    "hub": ("hub", "HubKernel", "REPO", "a kernel of the Hugging Face Hub"),
    "diffusers": ("diffusers", "DiffusersDispatch", "NAME", "what diffusers' dispatcher makes of one of its names"),
    "transformers": ("transformers", "TransformersDispatch", "NAME", "what transformers makes of one of its names"),
}
#: the names of diffusers, transformers and vLLM for what we have under our own; their dispatchers are other backends
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
