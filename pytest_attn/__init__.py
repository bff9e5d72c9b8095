"""pytest-attn: say whether an attention kernel is right, and whether it is still fast.

Names are loaded when first used, so that pytest, which imports this package at every start, pays nothing for them.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend
    from pytest_attn.backends.capabilities import Capabilities
    from pytest_attn.backends.defects import KnownDefect
    from pytest_attn.backends.machine import Machine
    from pytest_attn.backends.precision import Precision
    from pytest_attn.cases.api import check, check_invariants, measure
    from pytest_attn.cases.case import AttentionCase
    from pytest_attn.cases.saved_failure import Failure, load_failure
    from pytest_attn.correctness.comparison import Comparison
    from pytest_attn.correctness.contract import ContractError
    from pytest_attn.guests.models.call_to_workload import DropoutError
    from pytest_attn.guests.models.capture import AttentionCall, NotReadError, capture
    from pytest_attn.guests.models.check_model import check_model, check_module
    from pytest_attn.guests.models.model_case import AttentionModel
    from pytest_attn.guests.models.model_comparison import ModelComparison
    from pytest_attn.invariants.report import InvariantReport
    from pytest_attn.latency.result import Latency
    from pytest_attn.latency.work import StaleError
    from pytest_attn.version import __version__ as __version__
    from pytest_attn.workloads.inputs import Inputs, draw_inputs
    from pytest_attn.workloads.kv_layout import split_cache
    from pytest_attn.workloads.masks import BooleanMask, Causal, Document, Neighborhood, Window
    from pytest_attn.workloads.pages import Pages
    from pytest_attn.workloads.workload import Workload

# pytest rewrites assertions in all modules of a plugin's distribution: in a first run it would parse 200 files anew
for _finder in sys.meta_path:
    getattr(_finder, "_must_rewrite", set()).discard(__name__)

__all__ = [
    "AttentionCall",
    "AttentionCase",
    "AttentionModel",
    "Backend",
    "BooleanMask",
    "Capabilities",
    "Causal",
    "Comparison",
    "ContractError",
    "Document",
    "DropoutError",
    "Failure",
    "Inputs",
    "InvariantReport",
    "KnownDefect",
    "Latency",
    "Machine",
    "ModelComparison",
    "Neighborhood",
    "NotReadError",
    "Pages",
    "Precision",
    "StaleError",
    "Window",
    "Workload",
    "capture",
    "check",
    "check_invariants",
    "check_model",
    "check_module",
    "draw_inputs",
    "load_failure",
    "measure",
    "split_cache",
]

_HOMES = {
    "__version__": "pytest_attn.version",
    "AttentionCall": "pytest_attn.guests.models.capture",
    "AttentionCase": "pytest_attn.cases.case",
    "AttentionModel": "pytest_attn.guests.models.model_case",
    "Backend": "pytest_attn.backends.backend",
    "BooleanMask": "pytest_attn.workloads.masks",
    "Capabilities": "pytest_attn.backends.capabilities",
    "Causal": "pytest_attn.workloads.masks",
    "Comparison": "pytest_attn.correctness.comparison",
    "ContractError": "pytest_attn.correctness.contract",
    "Document": "pytest_attn.workloads.masks",
    "DropoutError": "pytest_attn.guests.models.call_to_workload",
    "Failure": "pytest_attn.cases.saved_failure",
    "Inputs": "pytest_attn.workloads.inputs",
    "InvariantReport": "pytest_attn.invariants.report",
    "KnownDefect": "pytest_attn.backends.defects",
    "Latency": "pytest_attn.latency.result",
    "Machine": "pytest_attn.backends.machine",
    "ModelComparison": "pytest_attn.guests.models.model_comparison",
    "Neighborhood": "pytest_attn.workloads.masks",
    "NotReadError": "pytest_attn.guests.models.capture",
    "Pages": "pytest_attn.workloads.pages",
    "Precision": "pytest_attn.backends.precision",
    "StaleError": "pytest_attn.latency.work",
    "Window": "pytest_attn.workloads.masks",
    "Workload": "pytest_attn.workloads.workload",
    "capture": "pytest_attn.guests.models.capture",
    "check": "pytest_attn.cases.api",
    "check_invariants": "pytest_attn.cases.api",
    "check_model": "pytest_attn.guests.models.check_model",
    "check_module": "pytest_attn.guests.models.check_model",
    "draw_inputs": "pytest_attn.workloads.inputs",
    "split_cache": "pytest_attn.workloads.kv_layout",
    "load_failure": "pytest_attn.cases.saved_failure",
    "measure": "pytest_attn.cases.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pytest_attn' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            import_module("pytest_attn.session.devices").require_torch()  # says what to install
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
