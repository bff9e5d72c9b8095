"""`pytest_attn.capture`: what a model asks of its attention, call by call, with the gradients that arrive; and as code."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from pytest_attn.backends.dense import boolean_mask
from pytest_attn.backends.gradients import nodes_behind
from pytest_attn.backends.layouts import first_of
from pytest_attn.backends.machine import wait
from pytest_attn.backends.precision import Precision, default_on, uncompiled_flex_precision
from pytest_attn.backends.raised import ending_no_test
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.call import changes_of
from pytest_attn.correctness.contract import EmptyRows
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    to_inputs,
    unchanged,
    with_mask,
)
from pytest_attn.guests.models.calls.torch_calls import FLEX, autocast
from pytest_attn.guests.models.calls.transformers_calls import is_stock
from pytest_attn.guests.models.handed_masks import (
    HandedMasks,
    MaskUse,
    beyond_window,
    causal_across,
    forgotten,
    shown_by,
    uses_of,
)
from pytest_attn.guests.models.interception import InterceptedCall, intercept_attention, uncompiled
from pytest_attn.reports.lines import count, some
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.source import import_lines, write_workload
from pytest_attn.workloads.workload import Workload


@dataclass(eq=False)
class AttentionCall:
    """One call, with copies of its tensors as they were when it was made.

    Args:
        module: the qualified name of the module that made it.
        number: which call of that module, from 1.
        function: what it went through.
        inputs: the workload with its tensors; dout is the gradient that arrived.
        out: its output, in the layout of q: (batch, heads, rows, dim), or packed.
        precision: the profile of where what computed it rounds.
        subject: what computed it instead; None where the model did.
        gradients: those that arrived, by name, in the same layout.
        has_dout: whether a gradient of out arrived.
        is_again: it was computed once more for a backward pass, as checkpointing does.
        order: its index among all calls.
        empty_rows: those of out that see no key; None where nobody asked for them.
        kernel: what computed it, where that is known: "SDPA flash", or the name of a library's function.
        changes: those of q, k and v that it changed in place, and by how much at most.
        missing: gradients that it gives none of, though they are needed.
        is_detached: it gives no gradient at all, though one is needed.
        misled: what its layer should have asked: which mask it does not keep of those that the layer was handed.
        is_narrower: its mask hides keys that the masks of the model's configuration show.
        is_awaited: its gradients are waited for.
        memory: a digest of the other sequence that its module was handed; "" for none.
        masks: what it makes of tensors that may be masks, which its module was handed.
        dsinks: the gradient of its sinks, (heads,), where it arrived.
    """

    module: str
    number: int
    function: str
    inputs: Inputs
    out: torch.Tensor = field(init=False)
    precision: str | Precision = field(init=False)
    subject: Subject | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    has_dout: bool = False
    is_again: bool = False
    order: int = 0
    empty_rows: EmptyRows | None = None
    kernel: str = ""
    changes: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    is_detached: bool = False
    misled: str = ""
    is_narrower: bool = False
    is_awaited: bool = False
    memory: str = ""
    masks: tuple[MaskUse, ...] = ()
    dsinks: torch.Tensor | None = None

    @property
    def fills_empty_rows(self) -> bool:
        """True where rows that see no key are not 0, but as the mean of all v where a mask is the lowest number."""
        bias = self.inputs.bias
        if bias is not None and bool((bias <= torch.finfo(bias.dtype).min / 2).all(-1).any()):
            return True
        if self.empty_rows is None or not self.empty_rows.are_there:
            return False
        out = self.out.to(self.inputs.device)
        return bool((out != self.empty_rows.blanked(out)).any())

    @property
    def workload(self) -> Workload:
        """The attention problem."""
        return self.inputs.workload

    @property
    def q(self) -> torch.Tensor:
        """Queries, (batch, heads, q_len, head_dim), or packed (tokens, heads, head_dim)."""
        return self.inputs.q

    @property
    def k(self) -> torch.Tensor:
        """Keys in the same layout, with kv_heads and kv_len."""
        return self.inputs.k

    @property
    def v(self) -> torch.Tensor:
        """Values in the same layout, with v_head_dim."""
        return self.inputs.v

    @property
    def dout(self) -> torch.Tensor | None:
        """The gradient of out that arrived, None where none did."""
        return self.inputs.dout if self.has_dout else None

    @property
    def bias(self) -> torch.Tensor | None:
        """The additive bias, broadcastable to (batch, heads, q_len, kv_len)."""
        return self.inputs.bias

    @property
    def sinks(self) -> torch.Tensor | None:
        """One logit per head, (heads,)."""
        return self.inputs.sinks

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask with padding, boolean, True = visible, broadcastable; None where all is visible, or packed."""
        return None if self.workload.is_packed else boolean_mask(self.inputs)

    @property
    def label(self) -> str:
        """Name in reports."""
        return label_of(self.module, self.number)

    def receive(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a gradient that arrived: dout, dq, dk, dv or dsinks."""
        if name == "dsinks":
            self.dsinks = gradient.flatten()
        elif name == "dout":
            self.inputs, self.has_dout = dataclasses.replace(self.inputs, dout=gradient), True
        else:
            self.gradients[name] = gradient

    def complete_inputs(self) -> Inputs:
        """Return the inputs on their device, with zeros for a gradient that did not arrive."""
        held = {name: t for name, t in vars(self.inputs).items() if isinstance(t, torch.Tensor)}
        tensors: dict[str, Any] = {name: t.to(self.inputs.device) for name, t in held.items()}
        if not self.has_dout:
            tensors["dout"] = torch.zeros_like(self.out, device=self.inputs.device)
        return dataclasses.replace(self.inputs, **tensors)


def label_of(module: str, number: int = 1) -> str:
    """Return how reports name a call: by its module, and which of its calls where it made more than one."""
    return f"{module or 'outside any module'}{f', call {number}' if number > 1 else ''}"


# -- while a model runs ------------------------------------------------------------------------------------------------------


#: bytes of copies that are kept on a device until their call is judged; what is more is kept in the host's memory
KEPT_BYTES = 4 << 30
#: of q, k and v
GRADIENTS = ("dq", "dk", "dv")


class Unread(NamedTuple):
    """A call that was intercepted and could not be judged, or not be replaced, and why."""

    module: str
    function: str
    reason: str


class ConfiguredMasks(NamedTuple):
    """Masks that the configuration of a model of transformers has for a call, from a run that builds every mask in full.

    visible: what its mask shows then, (batch, 1 or heads, q_len, kv_len), if it has one. handed: see `InterceptedCall`.
    """

    visible: torch.Tensor | None
    handed: tuple[HandedMasks, ...]


#: what a function returned, the precision profile of who computed it, and who, if not the model
Computed: TypeAlias = tuple[Any, str | Precision, Subject | None]


def precision_of(intercepted: InterceptedCall, registry: Registry, kind: str) -> str | Precision:
    """Return the precision profile of the function that a model called, on a kind of device."""
    if intercepted.function is FLEX and uncompiled(intercepted.original) is None:
        return uncompiled_flex_precision(torch.__version__)
    profile = intercepted.function.ran() or intercepted.function.profile
    code = getattr(intercepted.original, "__code__", None)
    if profile == "eager" and "sigmoid" in getattr(code, "co_names", ()):
        return "late_sinks"
    return registry[profile].precision_on(kind) if profile else default_on(kind)


def _believed(intercepted: InterceptedCall, visible: torch.Tensor | None) -> tuple[AttentionArguments, bool]:
    """Return what a call asks, by its own mask or by the one that the configuration says; and whether its own hides more.

    An implementation of transformers is believed where it was handed a mask of pairs, which a sparse model makes of its own.
    visible: what the configuration says. Raises UnreadableError.
    """
    arguments = intercepted.read()
    rows, keys = arguments.q.shape[-2], arguments.k.shape[-2]
    if visible is None or arguments.cu_seqlens is not None or visible.shape[-2:] != (rows, keys):
        return arguments, False
    if is_stock(intercepted.function) and getattr(intercepted.arguments.get("attention_mask"), "ndim", 4) == 4:
        shown = shown_by(arguments)
        return arguments, bool((visible & ~shown & shown.any(-1, keepdim=True)).any())
    return with_mask(arguments, visible), False


#: bytes of a tensor of which a digest is made
_DIGESTED = 1 << 28


def digest_of(tensor: torch.Tensor) -> str:
    """Return what tells tensors apart, with shape and whether they need a gradient; "" of one too large, or not at hand."""
    if tensor.nbytes > _DIGESTED:
        return ""
    held = bare(tensor).cpu().contiguous()
    try:
        at = held.data_ptr()
    except RuntimeError:  # of a tensor that stands for others
        return ""
    content = hashlib.blake2b(ctypes.string_at(at, held.nbytes) if at else b"", digest_size=8).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.requires_grad} {content}"


def other_sinks(asked: AttentionArguments, intercepted: InterceptedCall) -> str:
    """Say that a call asks for other sinks than those of its module of transformers, "" where it does not."""
    own = getattr(intercepted.arguments.get("module"), "sinks", None)
    if asked.sinks is None or not isinstance(own, torch.Tensor) or own.numel() != asked.sinks.numel():
        return ""
    own = own.detach().flatten().to(asked.sinks)
    return "" if torch.equal(own, asked.sinks.detach().flatten()) else "its sinks are not those of its module"


def _misled(arguments: AttentionArguments, intercepted: InterceptedCall, expected: ConfiguredMasks) -> str:
    """Say what the layer of a call should have asked, "" where it asked that."""
    handed = intercepted.handed
    if mask := forgotten(arguments, handed) or forgotten(arguments, expected.handed):
        return f"a mask was forgotten: {mask}"
    # one of pairs is the test's own word, whatever window the layer has
    is_of_pairs = bool(handed) and any(mask.dim() > 2 for mask in handed[-1].masks.values())
    window = "" if is_of_pairs else beyond_window(arguments, intercepted.arguments.get("sliding_window"))
    return window or other_sinks(arguments, intercepted) or causal_across(arguments, handed)


class Watched:
    """The tensors of a call, and what autograd and the count of changes say of them before it is computed.

    sinks: an alias of its sinks, None where it has none.
    """

    def __init__(self, intercepted: InterceptedCall, sinks: torch.Tensor | None) -> None:
        self.tensors, self._sinks = dict(zip(GRADIENTS, intercepted.tensors, strict=True)), sinks
        self._nodes = {name: t.grad_fn for name, t in self.tensors.items()}
        self._versions = {name: _version_of(t) for name, t in self.tensors.items()}

    @property
    def changed(self) -> str:
        """The first of q, k and v that was changed in place, "" for none."""
        return next((name[1:] for name, t in self.tensors.items() if self._versions[name] != _version_of(t)), "")

    def unreached_from(self, out: torch.Tensor, needed: set[str]) -> list[str]:
        """Return the gradients that a backward pass from out does not give, of those needed, as autograd sees it."""
        nodes = set(nodes_behind(out, list(self._nodes.values())))
        return [name for name, node in self._nodes.items() if name in needed and node not in nodes]

    def awaited(self, names: set[str], out: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors whose gradients arrive, that of sinks too."""
        found, sinks = {name: t for name, t in self.tensors.items() if name in names}, self._sinks
        if sinks is not None and sinks.requires_grad:
            is_behind = sinks.grad_fn in set(nodes_behind(out, [*self._nodes.values(), sinks.grad_fn]))
            found |= {"dsinks": sinks} if is_behind else {}
        return found


class Recorder:
    """Handles calls as the model makes them: as it is, and with copies of all tensors.

    done: is given each call once all its gradients have arrived, or at the end. backward: whether to wait for these.
    expected: what the model's configuration says, by module and number of the call. judges: calls are to be judged, so no
    gradient of out arrives in rows that see no key: what these hold is not checked.
    precision: where the model's functions round, where that is said; else what is known of them. made: is given each call as
    it is made.
    """

    def __init__(
        self,
        done: Callable[[AttentionCall], None] = lambda call: None,
        backward: bool = True,
        expected: Mapping[tuple[str, int], ConfiguredMasks] | None = None,
        kept_bytes: int = KEPT_BYTES,
        judges: bool = False,
        precision: str | Precision | None = None,
        made: Callable[[AttentionCall], None] = lambda call: None,
    ) -> None:
        self.unread_calls: list[Unread] = []
        #: where the functions are of which the step uses more than out, as weights or lse
        self.beside: set[tuple[str, str]] = set()
        self._made, self._done, self._backward, self._expected = made, done, backward, expected or {}
        self._waiting: dict[int, tuple[AttentionCall, set[str]]] = {}
        #: whether the call whose dout arrived last is in its backward pass, and no checkpoint of the model computes it again
        self._is_going_back = False
        self._kept, self._kept_bytes, self._judges = 0, kept_bytes, judges
        self._registry, self._precision = Registry(), precision

    def unread(self, module: str, function: str, reason: str) -> None:
        """Note a call that asks for what no workload can say."""
        self.unread_calls.append(Unread(module, function, reason))

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Compute a call on aliases of its tensors, which are this call's alone, and record it."""
        if self._is_going_back and intercepted.is_again and not intercepted.module:
            return intercepted.compute()  # a backward pass that computes its forward pass again, which is not checked
        intercepted, sinks = intercepted.with_tensors(*map(alias, intercepted.tensors)), None
        if name := next((n for n in ("s_aux", "learnable_sink") if intercepted.arguments.get(n) is not None), ""):
            given: torch.Tensor = intercepted.arguments[name]
            sinks = given.view_as(given)
            intercepted = dataclasses.replace(intercepted, arguments={**intercepted.arguments, name: sinks})
        expected = self._expected.get((intercepted.module, intercepted.number), ConfiguredMasks(None, ()))
        arguments, is_narrower = _believed(intercepted, expected.visible)
        inputs = to_inputs(arguments)
        tensors = {name: t for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
        kept: Any = {name: self._keep(bare(t)) for name, t in tensors.items()}
        pristine = dataclasses.replace(inputs, **kept)
        call = AttentionCall(intercepted.module, intercepted.number, intercepted.function.shown, pristine)
        call.is_again, call.order, call.is_narrower = intercepted.is_again, intercepted.order, is_narrower
        if self._judges:
            memory = intercepted.handed[0].memory if intercepted.handed else None
            call.empty_rows, call.memory = EmptyRows(inputs, "finite"), "" if memory is None else digest_of(memory)
            if not call.is_again:
                call.misled = _misled(arguments, intercepted, expected)
                call.masks = tuple(uses_of(arguments, intercepted.handed))
        return self._record(call, intercepted, arguments, inputs, Watched(intercepted, sinks))

    def _record(
        self,
        call: AttentionCall,
        intercepted: InterceptedCall,
        arguments: AttentionArguments,
        inputs: Inputs,
        watched: Watched,
    ) -> Any:
        needs = self._backward and torch.is_grad_enabled()
        needed = {name for name, t in watched.tensors.items() if needs and t.requires_grad}
        result, call.precision, call.subject = self.computed(intercepted, arguments, inputs)
        raw = first_of(result)
        if self._judges:
            result = self._apart(intercepted.function, result)
        call.out, call.kernel = self._keep(arguments.out_to_native(bare(raw))), intercepted.kernel
        if not call.is_again:
            self._made(call)
        if call.subject is None and needed and (name := watched.changed):
            reason = f"it changes its {name} in place, which hides the gradient; let it work on a copy"
            self.unread(intercepted.module, intercepted.function.shown, reason)
            return result
        if call.subject is not None:
            call.changes = changes_of(*({name: getattr(held, name) for name in "qkv"} for held in (arguments, call)))
        if raw.requires_grad or call.subject is not None:
            call.missing = watched.unreached_from(raw, needed)
        call.is_detached = bool(needed) and not raw.requires_grad
        if raw.requires_grad and (awaited := needed.difference(call.missing)):
            self._await(call, watched.awaited(awaited, raw), arguments, raw)
        else:
            self._finish(call)
        return result

    def computed(self, intercepted: InterceptedCall, arguments: AttentionArguments, inputs: Inputs) -> Computed:
        """Return what the model is given, and what computed it."""
        del arguments
        result = intercepted.compute()
        return result, self._precision or precision_of(intercepted, self._registry, inputs.device.type), None

    def finish(self) -> None:
        """Hand on the calls whose gradients did not all arrive."""
        for call, _ in list(self._waiting.values()):
            self._finish(call)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor: on its device, or beyond the bound into the host's memory."""
        if self._kept + tensor.nbytes > self._kept_bytes and tensor.device.type != "cpu":
            return tensor.to("cpu")
        self._kept += tensor.nbytes
        return tensor.clone()

    def _apart(self, function: AttentionFunction, result: Any) -> Any:
        """Return a result with no way for a gradient through what stands beside out: exact attention knows of out alone."""
        if not isinstance(result, tuple | list):
            return result

        def used(_: Any = None) -> None:
            self.beside.add(function.place)

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:  # whether it is used cannot be seen
                used()
                return tensor
            return without_gradient(tensor, used)

        if not function.profile:  # a user's, of which only a call tells what it returns
            used()
        return result[0], *tree_map_only(torch.Tensor, apart, tuple(result[1:]))

    def _await(
        self,
        call: AttentionCall,
        waiting: Mapping[str, torch.Tensor],
        arguments: AttentionArguments,
        raw: Any,
    ) -> None:
        awaited = {"dout", *waiting}
        # whether the model runs a part that it may compute again for the backward pass
        is_checkpointed = any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in walk_stack(None))
        self._waiting[id(call)] = call, awaited
        call.is_awaited = True

        def arrives(name: str, to_native: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor | None], None]:
            def hook(gradient: torch.Tensor | None) -> None:
                self._is_going_back = call.is_again or not is_checkpointed
                if name not in awaited or (gradient is None and not call.has_dout):
                    return  # where only another result of the function, as lse, has a gradient, there is no dout
                if gradient is not None:
                    call.receive(name, self._keep(to_native(bare(gradient))))
                elif name in GRADIENTS:
                    call.missing.append(name)
                awaited.discard(name)
                if not awaited:
                    self._is_going_back = False
                    self._finish(call)

            return hook

        if call.empty_rows is not None and call.empty_rows.are_there:
            counts = torch.ones(raw.shape, dtype=torch.bool, device=raw.device)
            native = arguments.out_to_native(counts)  # a view
            native.copy_(call.empty_rows.blanked(native))
            raw.register_hook(lambda gradient: gradient.masked_fill(~counts, 0))
        raw.register_hook(arrives("dout", arguments.out_to_native))
        for name, tensor in waiting.items():
            hooked: Any = tensor
            hooked.register_hook(arrives(name, unchanged if name == "dsinks" else arguments.to_native))

    def _finish(self, call: AttentionCall) -> None:
        self._waiting.pop(id(call), None)
        held = (call.q, call.k, call.v, call.out, *call.gradients.values())
        self._kept -= min(self._kept, sum(t.nbytes for t in held if t.device == call.inputs.device))
        if call.is_again and not call.has_dout and not call.missing:
            return  # the first one has been judged, or will be
        if self._judges:  # its tensors came on the streams of their hooks
            wait(call.inputs.device)
        with torch.no_grad():
            self._done(call)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor holds, as a plain one: models have subclasses of their own, whose code is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a tensor of its own, whose gradient is one call's; in autocast's dtype where it casts."""
    cast = autocast(tensor)
    return tensor.view_as(tensor) if cast is tensor else cast


def without_gradient(tensor: torch.Tensor, used: Callable[[torch.Tensor], None] = lambda gradient: None) -> torch.Tensor:
    """Return a tensor through which zeros go back in place of its gradient. used: is given that, where one arrives."""
    if not tensor.requires_grad:
        return tensor
    apart = tensor.view_as(tensor)  # out may be computed from the tensor itself, as from weights
    hooked: Any = apart

    def stop(gradient: torch.Tensor) -> torch.Tensor:
        used(gradient)
        return torch.zeros_like(gradient)

    hooked.register_hook(stop)
    return apart


def _version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


class NotReadError(ValueError):
    """An intercepted call that no workload can express."""


def capture(
    step: Callable[[], Any], model: torch.nn.Module | None = None, functions: Iterable[Callable[..., Any] | str] = ()
) -> list[AttentionCall]:
    """Run `step` once, and copy the attention calls that it makes.

    Each call holds its own copies of its tensors; they take as much memory as the model's activations of q, k, v and out.

    Args:
        step: a function without arguments. Where it runs a backward pass, each call has its gradients.
        model: names the calling modules; without it, names begin at the outermost module that runs.
        functions: attention of your own: functions of (q, k, v, ...), by themselves or as "package.module.function";
            tensors (batch, heads, rows, dim).

    Returns:
        The calls, in the order in which they are made.

    Raises:
        NotReadError: no workload can say a call.
        DropoutError: a call drops probabilities.
    """
    calls: list[AttentionCall] = []
    recorder = Recorder(made=calls.append)
    with ending_no_test("the step"), intercept_attention(recorder, model, functions):
        step()
    recorder.finish()
    if recorder.unread_calls:
        module, function, reason = recorder.unread_calls[0]
        raise NotReadError(f"{module or 'a call'}: {function} is not read: {reason}")
    return calls


#: modules that a comment names
_NAMES = 2


def workloads_as_code(calls: Iterable[AttentionCall]) -> str:
    """Return the distinct workloads of calls as Python, each with the number of its calls and who makes them.

    A mask that is a tensor, or a function of the model, cannot be code: it is left out, with a comment that says so.
    """
    counts: Counter[tuple[str, str]] = Counter()
    makers: dict[tuple[str, str], dict[str, None]] = {}
    imports = {("pytest_attn", "Workload")}
    for call in calls:
        text, needed, missing = workload_as_code(call.workload)
        counts[text, missing] += 1
        makers.setdefault((text, missing), {})[call.module] = None
        imports |= needed
    lines = [*import_lines(imports), "", "WORKLOADS = ["]
    for (text, missing), number in counts.most_common():
        modules = list(makers[text, missing])
        note = f"; {missing}" if missing else ""
        lines.append(f"    {text},  # {count(number, 'call')} of {some(modules, _NAMES) or 'no module'}{note}")
    return "\n".join([*lines, "]"])


def workload_as_code(workload: Workload) -> tuple[str, set[tuple[str, str]], str]:
    """Return the expression that makes a workload, what it must import, and a comment on what it cannot say."""
    mask, score_mod = workload.plain_mask, workload.score_mod
    own = {"mask": mask is not None and mask.function is not None, "score_mod": score_mod is not None}
    left_out = [name for name, is_of_model in own.items() if is_of_model]
    text, imports = write_workload(workload.replace(**dict.fromkeys(left_out)))
    return text, imports, "; ".join(f"its {name} is the model's own" for name in left_out)
