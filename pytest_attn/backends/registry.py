"""Backends by name: the built-in ones, loaded when first asked for, those that users add, and their compiled variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_attn.backends.backend import Backend, FunctionBackend
from pytest_attn.backends.compiled import Compiled
from pytest_attn.backends.configured import Declared, configured, options_of, split
from pytest_attn.backends.graphed import Graphed
from pytest_attn.workloads.nearest import did_you_mean
from pytest_attn.workloads.workload import Workload

#: name -> (module of adapters/, class); the order is the order of tables and of "all"
_BUILTIN = {
    "math": ("sdpa", "Math"),
    "eager": ("eager", "Eager"),
    "sdpa": ("sdpa", "Automatic"),
    "sdpa_flash": ("sdpa", "Flash"),
    "sdpa_efficient": ("sdpa", "Efficient"),
    "sdpa_cudnn": ("sdpa", "Cudnn"),
    "sdpa_fa3": ("sdpa_fa", "SdpaFa3"),
    "sdpa_fa4": ("sdpa_fa", "SdpaFa4"),
    "varlen": ("varlen", "Varlen"),
    "kv_cache": ("kv_cache", "KvCache"),
    "flex": ("flex", "Flex"),
    "flex_flash": ("flex", "FlexFlash"),
    "flex_decode": ("flex", "FlexDecode"),
    "flash2": ("flash2", "Flash2"),
    "flash2_kvcache": ("flash2", "Flash2KvCache"),
    "flash3": ("flash3", "Flash3"),
    "flash4": ("flash4", "Flash4"),
    "xformers": ("xformers", "Xformers"),
    "xformers_cutlass": ("xformers", "XformersCutlass"),
    "te_fused": ("te", "TeFused"),
    "te_flash": ("te", "TeFlash"),
    "te_unfused": ("te", "TeUnfused"),
    "cudnn": ("cudnn", "CudnnFrontend"),
    "flashinfer_fa2": ("flashinfer", "FlashInferFa2"),
    "flashinfer_fa3": ("flashinfer", "FlashInferFa3"),
    "natten": ("natten", "Natten"),
    "sage": ("sage", "Sage"),
    "sage_fp16": ("sage", "SageFp16"),
    "sage_fp8": ("sage", "SageFp8"),
    "int8_dynamic": ("int8_dynamic", "Int8Dynamic"),
}
#: prefix of a name -> (module, class, what follows the colon, what it stands for): "hub:REPO" makes class(REPO)
_FAMILIES = {
    "hub": ("hub", "HubKernel", "REPO", "a kernel of the Hugging Face Hub"),
    "diffusers": ("diffusers", "DiffusersDispatch", "NAME", "what diffusers' dispatcher makes of one of its names"),
    "transformers": ("transformers", "TransformersDispatch", "NAME", "what transformers makes of one of its names"),
}
VARIANTS = ("compile", "max_autotune", "graph")
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


class Registry:
    """Backends by name. `names` lists them without importing any."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], Backend]] = {}
        self._loaded: dict[str, Backend] = {}
        for name, (module, cls) in _BUILTIN.items():
            self._loaders[name] = _loader(module, cls)

    @property
    def families(self) -> list[tuple[str, str]]:
        """Names with a part that users fill in, as they are shown ("hub:REPO"), and what they stand for."""
        return [(f"{prefix}:{part}", about) for prefix, (_, _, part, about) in _FAMILIES.items()]

    @property
    def names(self) -> list[str]:
        """Every registered name, without the variants."""
        return list(self._loaders)

    def add(self, backend: Backend) -> None:
        """Register a backend of your own; raise ValueError where it is none, or its name is taken or not a plain word."""
        if not isinstance(backend, Backend):
            raise ValueError(f"add takes an instance of pytest_attn.Backend, got {backend!r}; add_function takes functions")
        self._require_free(getattr(backend, "name", None))
        self._loaders[backend.name] = lambda: backend

    def add_function(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        layout: str = "bhsd",
        precision: str = "flash",
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
        configurations: Declared = (),
    ) -> None:
        """Register `fn(q, k, v, workload=workload) -> out` under `name`.

        layout: "bhsd" or "bshd", in which fn takes and returns tensors. precision: the rounding that it declares.
        unsupported_because: a function of the workload that returns reasons to refuse it, none where fn claims it.
        configurations: what --attn-tune tries, each handed to fn as further keyword arguments: {option: values} for every
        combination, a list of {option: value} or triton.Config, or a function of the workload that returns one of these.
        """
        if not callable(fn):
            raise ValueError(f"backend {name!r}: fn must be a function of (q, k, v, workload), got {fn!r}")
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f"backend {name!r}: layout must be 'bhsd' or 'bshd', got {layout!r}")
        try:
            backend = FunctionBackend(name, fn, layout, precision, unsupported_because, configurations)
        except ValueError as error:
            raise ValueError(f"backend {name!r}: {error}") from None
        self.add(backend)

    def _require_free(self, name: object) -> None:
        if not isinstance(name, str):
            raise ValueError(f"a backend must have a name, text without spaces, got {name!r}")
        if name in ("all", "available"):
            raise ValueError(f"backend name {name!r} means a selection in --attn-backends; rename yours")
        if not name.replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"backend name {name!r} must consist of letters, digits, underscores and dots")
        if name in self._loaders:
            raise ValueError(f"two backends are named {name!r}; rename one")
        if name in ALIASES:
            raise ValueError(f"backend name {name!r} is an alias of {ALIASES[name]!r}; rename yours")

    def __getitem__(self, name: str) -> Backend:
        """Return a backend, by its name or an alias, or a variant ("sdpa+compile"); raise ValueError for an unknown one."""
        self.require(name)
        name = self.canonical(name)
        if name not in self._loaded:
            base, _, variant = name.partition("+")
            backend = self._load(base)
            if variant:
                backend = backend.variant(variant) or _varied(backend, variant)
            self._loaded[name] = backend
        return self._loaded[name]

    def canonical(self, name: str) -> str:
        """Return the name that an alias stands for; other names as they are."""
        base, plus, variant = name.partition("+")
        plain, label = split(base)
        if plain in self._loaders:
            return name
        return "".join((ALIASES.get(plain, plain), f"@{label}" if label else "", plus, variant))

    def require(self, name: str) -> None:
        """Raise ValueError unless `name` is registered, without loading it."""
        base, plus, variant = self.canonical(name).partition("+")
        base, label = split(base)
        prefix, colon, rest = base.partition(":")
        if base not in self._loaders and not (prefix in _FAMILIES and rest):
            if colon and prefix in _FAMILIES:
                raise ValueError(f"backend {base!r} names nothing after the colon; expected {prefix}:{_FAMILIES[prefix][2]}")
            meant = did_you_mean(base, self._loaders)
            known = ", ".join([*self._loaders, *dict(self.families)])
            raise ValueError(f"unknown backend {base!r};{meant} known: {known}")
        if plus and variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r} of backend {base!r}; known: {', '.join(VARIANTS)}")
        if label:
            configured(self[base], options_of(label))

    def is_known(self, name: str) -> bool:
        """Whether `require` would let the name pass."""
        try:
            self.require(name)
        except ValueError:
            return False
        return True

    def _load(self, base: str) -> Backend:
        plain, label = split(base)
        if label:
            return configured(self[plain], options_of(label))
        if base in self._loaders:
            return self._loaders[base]()
        prefix, _, rest = base.partition(":")
        module, cls, *_ = _FAMILIES[prefix]
        return _loader(module, cls, rest)()


def _varied(backend: Backend, variant: str) -> Backend:
    return Graphed(backend) if variant == "graph" else Compiled(backend, variant)


def _loader(module: str, cls: str, *arguments: str) -> Callable[[], Backend]:
    def load() -> Backend:
        from importlib import import_module

        backend: Backend = getattr(import_module(f"pytest_attn.backends.adapters.{module}"), cls)(*arguments)
        return backend

    return load
