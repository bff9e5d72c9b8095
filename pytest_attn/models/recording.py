"""Record the calls of a step: copies of their tensors, and the gradients that arrive at them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_attn.backends.attention_args import AttentionArguments, UnreadableError
from pytest_attn.backends.libraries.flex import FLEX
from pytest_attn.backends.libraries.sdpa import autocast
from pytest_attn.backends.precision import Precision, uncompiled_flex_precision
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.calling import changes_of
from pytest_attn.correctness.empty_rows import EmptyRows
from pytest_attn.models.call import AttentionCall
from pytest_attn.models.catching import Caught
from pytest_attn.models.compiled import uncompiled
from pytest_attn.models.graph import in_checkpoint, nodes_behind
from pytest_attn.models.recognition import says_the_same, to_inputs, with_mask
from pytest_attn.workloads.inputs import Inputs

if TYPE_CHECKING:
    import torch

#: bytes of copies that are kept on a device until their call is judged; what is more is kept in the host's memory
KEPT_BYTES = 4 << 30
#: of q, k and v
GRADIENTS = ("dq", "dk", "dv")


class Unread(NamedTuple):
    """A call that was caught and could not be judged, or not be replaced, and why."""

    module: str
    function: str
    reason: str


class Computed(NamedTuple):
    """What a call gave: the function's result, the precision profile of who computed it, and who that was if not the model."""

    result: Any
    precision: str | Precision
    subject: Subject | None


def precision_of(caught: Caught, registry: Registry, kind: str) -> str | Precision:
    """Return the precision profile of the function that a model called, on a kind of device."""
    import torch

    if caught.entry is FLEX and uncompiled(caught.original) is None:
        return uncompiled_flex_precision(torch.__version__)
    profile = caught.entry.ran() or caught.profile
    return registry[profile].precision_on(kind) if profile else "flash"


class Recorder:
    """Handles calls as the model makes them: as it is, and with copies of all tensors.

    done: is given each call once all its gradients have arrived, or at the end. backward: whether to wait for these.
    masks: what each call may see, by module and number, where that is known better than from the call itself. judges: calls
    are to be judged, so no gradient of out arrives in rows that see no key: what these hold is not checked.
    precision: where the model's functions round, where that is said; else what is known of them.
    """

    def __init__(
        self,
        done: Callable[[AttentionCall], None],
        backward: bool = True,
        masks: dict[tuple[str, int], torch.Tensor] | None = None,
        kept_bytes: int = KEPT_BYTES,
        judges: bool = False,
        precision: str | Precision | None = None,
    ) -> None:
        self.unread_calls: list[Unread] = []
        #: is given each call as it is made
        self.made: Callable[[AttentionCall], None] = lambda call: None
        self._done, self._backward, self._masks = done, backward, masks or {}
        self._numbers: Counter[tuple[str, bool]] = Counter()
        self._waiting: dict[int, tuple[AttentionCall, set[str]]] = {}
        #: whether the call whose dout arrived last is in its backward pass, and no checkpoint of the model computes it again
        self._is_going_back = False
        self._kept, self._kept_bytes, self._judges = 0, kept_bytes, judges
        self._registry, self._precision = Registry(), precision

    def unread(self, module: str, function: str, reason: str) -> None:
        """Note a call that asks for what no workload can say."""
        self.unread_calls.append(Unread(module, function, reason))

    def handle(self, caught: Caught) -> Any:
        """Compute a call on aliases of its tensors, which are this call's alone, and record it."""
        if self._is_going_back and caught.is_again and not caught.module:
            return caught.compute()  # a backward pass that computes its forward pass again, which is not checked
        aliases = [alias(t) for t in caught.tensors]
        caught = caught.with_tensors(*aliases)
        number = self._number(caught)
        try:
            arguments = self._read(caught, number)
            inputs = to_inputs(arguments)
        except UnreadableError as error:
            self.unread(caught.module, caught.function, str(error))
            return caught.compute()
        return self.record(caught, arguments, inputs, number, aliases)

    def record(
        self, caught: Caught, arguments: AttentionArguments, inputs: Inputs, number: int, aliases: list[torch.Tensor]
    ) -> Any:
        """Compute a call that was read, and record it."""
        import torch

        pristine = self._copies(inputs)
        nodes, versions = [alias.grad_fn for alias in aliases], [alias._version for alias in aliases]
        result, precision, subject = self.computed(caught, arguments, inputs)
        raw = arguments.take_out(result)
        out = self._keep(arguments.out_to_native(raw.detach()))
        call = AttentionCall(caught.module, number, caught.function, precision, pristine, out, subject)
        call.is_again, call.order = caught.is_again, self._numbers.total()
        call.empty_rows, call.kernel = EmptyRows(inputs, "finite") if self._judges else None, caught.kernel
        if not caught.is_again:
            self.made(call)
        needs_gradient = self._backward and torch.is_grad_enabled()
        expected = {name for name, t in zip(GRADIENTS, aliases, strict=True) if t.requires_grad and needs_gradient}
        if subject is not None:
            before = {"q": pristine.q, "k": pristine.k, "v": pristine.v}
            call.changes = changes_of({"q": arguments.q, "k": arguments.k, "v": arguments.v}, before)
        elif expected and (changed := [name for name, t, v in zip("qkv", aliases, versions, strict=True) if t._version != v]):
            reason = f"it changes its {changed[0]} in place, which hides the gradient; let it work on a copy"
            self.unread(caught.module, caught.function, reason)
            return result
        if raw.requires_grad or subject is not None:
            reached = nodes_behind(raw, nodes)
            call.missing = [n for n, node in zip(GRADIENTS, nodes, strict=True) if n in expected and node not in reached]
        call.is_detached = bool(expected) and not raw.requires_grad
        if not (raw.requires_grad and expected.difference(call.missing)):
            self._finish(call)
            return result
        expected.difference_update(call.missing)
        self._await(call, expected, arguments, raw, aliases)
        return result

    def computed(self, caught: Caught, arguments: AttentionArguments, inputs: Inputs) -> Computed:
        """Return what the model is given, and what computed it."""
        del arguments
        result = caught.compute()
        return Computed(result, self._precision or precision_of(caught, self._registry, inputs.device.type), None)

    def finish(self) -> None:
        """Hand on the calls whose gradients did not all arrive."""
        for call, _ in list(self._waiting.values()):
            self._finish(call)

    # -- details -------------------------------------------------------------------------------------------------------

    def _number(self, caught: Caught) -> int:
        """Return which call of its module it is; computed again for a backward pass it keeps its number."""
        of = caught.module, caught.is_again
        self._numbers[of] += 1
        return self._numbers[of]

    def _read(self, caught: Caught, number: int) -> AttentionArguments:
        arguments = caught.read()
        visible = self._masks.get((caught.module, number))
        if visible is None or visible.shape[-2:] != (arguments.q.shape[-2], arguments.k.shape[-2]):
            return arguments
        return arguments if says_the_same(arguments, visible) else with_mask(arguments, visible)

    def _copies(self, inputs: Inputs) -> Inputs:
        import torch

        tensors = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        kept: dict[str, Any] = {name: self._keep(t.detach()) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(inputs, **kept)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor: on its device, or beyond the bound into the host's memory."""
        if self._kept + tensor.nbytes > self._kept_bytes and tensor.device.type != "cpu":
            return tensor.to("cpu")
        self._kept += tensor.nbytes
        return tensor.clone()

    def _await(
        self, call: AttentionCall, expected: set[str], arguments: AttentionArguments, raw: Any, aliases: list[Any]
    ) -> None:
        awaited, is_checkpointed = {"dout", *expected}, in_checkpoint()
        self._waiting[id(call)] = call, awaited

        def arrives(name: str, to_native: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor | None], None]:
            def hook(gradient: torch.Tensor | None) -> None:
                self._is_going_back = call.is_again or not is_checkpointed
                if name not in awaited or (gradient is None and not call.has_dout):
                    return  # where only another result of the function, as lse, has a gradient, there is no dout
                if gradient is None:
                    call.missing.append(name)
                else:
                    call.receive(name, self._keep(to_native(gradient.detach())))
                awaited.discard(name)
                if not awaited:
                    self._is_going_back = False
                    self._finish(call)

            return hook

        if call.empty_rows is not None and call.empty_rows.are_there:
            raw.register_hook(_blanking(call.empty_rows, arguments, raw))
        raw.register_hook(arrives("dout", arguments.out_to_native))
        for name, alias in zip(GRADIENTS, aliases, strict=True):
            if name in expected:
                alias.register_hook(arrives(name, arguments.to_native))

    def _finish(self, call: AttentionCall) -> None:
        import torch

        self._waiting.pop(id(call), None)
        held = (call.q, call.k, call.v, call.out, *call.gradients.values())
        self._kept -= min(self._kept, sum(t.nbytes for t in held if t.device == call.inputs.device))
        if call.is_again and not call.has_dout and not call.missing:
            return  # the first one has been judged, or will be
        with torch.no_grad():
            self._done(call)


def _blanking(rows: EmptyRows, arguments: AttentionArguments, out: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what puts 0 into these rows of the gradient of out, in the layout in which the function returns that."""
    import torch

    counts = torch.ones(out.shape, dtype=torch.bool, device=out.device)
    native = arguments.out_to_native(counts)  # a view
    native.copy_(rows.blanked(native))
    return lambda gradient: gradient.masked_fill(~counts, 0)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a tensor of its own, whose gradient is one call's; in autocast's dtype where it casts."""
    cast = autocast(tensor)
    return tensor.view_as(tensor) if cast is tensor else cast
