"""`attn_model.check_invariants`: ask a model of tokens all that must hold of it without any reference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pytest_attn.invariants.report import Finding, InvariantReport
from pytest_attn.models.state import untouched
from pytest_attn.models.token_invariants import INVARIANTS, Asking, BrokenError, NotApplicableError
from pytest_attn.models.token_model import TokenModel

if TYPE_CHECKING:
    import torch

Names = Iterable[str] | str | None


def judge_model_invariants(
    model: torch.nn.Module, batch: Any, only: Names = None, skip: Names = None, causal: bool | None = None
) -> InvariantReport:
    """Return what each invariant finds. The model is left as it was.

    batch: token ids (batch, tokens), or a mapping with input_ids. causal: whether a token may see only those before it; by
    default what the model's configuration or its class's name says. Raises ValueError for an unknown name and for a mixture of
    experts, DropoutError for a model that drops at random, TypeError for a model of anything but tokens.
    """
    names = _chosen(only, skip)
    _refuse_experts(model)
    with untouched(model):
        of = TokenModel(model, batch)
        of.refuse_dropout()
        asking = Asking(of, _is_causal(model) if causal is None else causal)
        findings = tuple(_ask(name, asking) for name in names)
    return InvariantReport(f"{tuple(of.ids.shape)} tokens", type(model).__name__, findings)


def _ask(name: str, asking: Asking) -> Finding:
    try:
        INVARIANTS[name](asking)
    except NotApplicableError as reason:
        return Finding(name, "not applicable", str(reason), 0)
    except BrokenError as evidence:
        return Finding(name, "broken", str(evidence), 1)
    return Finding(name, "passed", "", 1)


def _chosen(only: Names, skip: Names) -> list[str]:
    def listed(names: Names) -> list[str]:
        return [names] if isinstance(names, str) else list(names or ())

    for name in (*listed(only), *listed(skip)):
        if name not in INVARIANTS:
            raise ValueError(f"check_invariants: unknown invariant {name!r}; known: {', '.join(INVARIANTS)}")
    found = [name for name in INVARIANTS if name in (listed(only) or INVARIANTS) and name not in listed(skip)]
    if not found:
        raise ValueError("check_invariants: no invariant is left; leave out skip=, or name others in only=")
    return found


def _refuse_experts(model: torch.nn.Module) -> None:
    """Raise ValueError for a mixture of experts: a token's expert, and the shape of its sums, depend on the other tokens."""
    routed = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"), "")
    if routed:
        raise ValueError(
            f"check_invariants: {routed} is a mixture of experts: which one a token goes to may turn on a rounding error, so"
            " rows cannot be compared; check the model's calls with attn_model.check"
        )


def _is_causal(model: torch.nn.Module) -> bool:
    inner = getattr(model, "_orig_mod", model)
    config = getattr(inner, "config", None)
    return type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel")) or bool(getattr(config, "is_decoder", False))
