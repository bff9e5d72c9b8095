"""pytest-attn: say whether an attention kernel is right, and whether it is still fast.

Names are loaded when first used, so that pytest, which imports this package at every start, pays nothing for them.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend as Backend
    from pytest_attn.backends.capabilities import Capabilities as Capabilities
    from pytest_attn.backends.defects import KnownDefect as KnownDefect
    from pytest_attn.backends.machine import Machine as Machine
    from pytest_attn.backends.precision import Precision as Precision
    from pytest_attn.backends.precision import Threshold as Threshold
    from pytest_attn.cases.api import check as check
    from pytest_attn.cases.api import check_invariants as check_invariants
    from pytest_attn.cases.api import measure as measure
    from pytest_attn.cases.case import AttentionCase as AttentionCase
    from pytest_attn.correctness.comparison import Comparison as Comparison
    from pytest_attn.correctness.contract import ContractError as ContractError
    from pytest_attn.correctness.rounded import Quantized as Quantized
    from pytest_attn.correctness.rounded import Rounded as Rounded
    from pytest_attn.correctness.rounded import assert_rounded as assert_rounded
    from pytest_attn.guests.judging.judge_kernel import Judgment as Judgment
    from pytest_attn.guests.judging.judge_kernel import judge as judge
    from pytest_attn.guests.models.call_to_workload import DropoutError as DropoutError
    from pytest_attn.guests.models.capture import AttentionCall as AttentionCall
    from pytest_attn.guests.models.capture import NotReadError as NotReadError
    from pytest_attn.guests.models.capture import capture as capture
    from pytest_attn.guests.models.check_model import check_model as check_model
    from pytest_attn.guests.models.check_model import check_module as check_module
    from pytest_attn.guests.models.model_case import AttentionModel as AttentionModel
    from pytest_attn.guests.models.model_comparison import ModelComparison as ModelComparison
    from pytest_attn.guests.saving.saved_failure import Failure as Failure
    from pytest_attn.guests.saving.saved_failure import load_failure as load_failure
    from pytest_attn.invariants.report import InvariantReport as InvariantReport
    from pytest_attn.latency.result import Latency as Latency
    from pytest_attn.latency.work import StaleError as StaleError
    from pytest_attn.version import __version__ as __version__
    from pytest_attn.workloads.inputs import Inputs as Inputs
    from pytest_attn.workloads.inputs import draw_inputs as draw_inputs
    from pytest_attn.workloads.kv_layout import split_cache as split_cache
    from pytest_attn.workloads.masks import BooleanMask as BooleanMask
    from pytest_attn.workloads.masks import Causal as Causal
    from pytest_attn.workloads.masks import Document as Document
    from pytest_attn.workloads.masks import Neighborhood as Neighborhood
    from pytest_attn.workloads.masks import Window as Window
    from pytest_attn.workloads.pages import Pages as Pages
    from pytest_attn.workloads.workload import Workload as Workload

# pytest rewrites assertions in all modules of a plugin's distribution: in a first run it would parse 200 files anew
for _finder in sys.meta_path:
    getattr(_finder, "_must_rewrite", set()).discard(__name__)

#: the names of each module of the package
_NAMES: dict[str, tuple[str, ...]] = {
    "backends.backend": ("Backend",),
    "backends.capabilities": ("Capabilities",),
    "backends.defects": ("KnownDefect",),
    "backends.machine": ("Machine",),
    "backends.precision": ("Precision", "Threshold"),
    "cases.api": ("check", "check_invariants", "measure"),
    "cases.case": ("AttentionCase",),
    "correctness.comparison": ("Comparison",),
    "correctness.contract": ("ContractError",),
    "correctness.rounded": ("Quantized", "Rounded", "assert_rounded"),
    "guests.judging.judge_kernel": ("Judgment", "judge"),
    "guests.models.call_to_workload": ("DropoutError",),
    "guests.models.capture": ("AttentionCall", "NotReadError", "capture"),
    "guests.models.check_model": ("check_model", "check_module"),
    "guests.models.model_case": ("AttentionModel",),
    "guests.models.model_comparison": ("ModelComparison",),
    "guests.saving.saved_failure": ("Failure", "load_failure"),
    "invariants.report": ("InvariantReport",),
    "latency.result": ("Latency",),
    "latency.work": ("StaleError",),
    "version": ("__version__",),
    "workloads.inputs": ("Inputs", "draw_inputs"),
    "workloads.kv_layout": ("split_cache",),
    "workloads.masks": ("BooleanMask", "Causal", "Document", "Neighborhood", "Window"),
    "workloads.pages": ("Pages",),
    "workloads.workload": ("Workload",),
}
_HOMES = {name: f"pytest_attn.{module}" for module, names in _NAMES.items() for name in names}
if not TYPE_CHECKING:  # type checkers read which names there are above
    __all__ = sorted(_HOMES.keys() - {"__version__"})


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
    return [*globals(), *_HOMES]
