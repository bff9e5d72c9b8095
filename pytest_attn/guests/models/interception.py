"""Intercept every attention call of a model, whatever function it goes through, and restore everything afterwards.

A model of transformers fetches its function from an interface, so calls are intercepted there, whatever implementation it is
set to. To replace them, the model is switched to a name of ours that is registered in both interfaces: of attention and of
masks. A name that is missing from the second gets no mask at all, without a word (transformers 5.23,
`_preprocess_mask_arguments`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias
from unittest.mock import patch

import torch
from torch import overrides
from torch.nn.modules import module as every
from torch.overrides import TorchFunctionMode

from pytest_attn.backends.contexts import quiet
from pytest_attn.guests.models.call_to_workload import (
    AttentionArguments,
    AttentionFunction,
    UnreadableError,
    imported_functions,
    refuse_unread,
    shortened,
    to_inputs,
)
from pytest_attn.guests.models.calls.torch_calls import FLEX, SDPA, autocast, read_plain
from pytest_attn.guests.models.calls.transformers_calls import function_called, read_call
from pytest_attn.guests.models.exact_attention import exact_attention, exact_weights
from pytest_attn.guests.models.handed_masks import HandedMasks, handed_to
from pytest_attn.guests.models.written_out import WrittenOut
from pytest_attn.workloads.functions import parameters_of, printable, type_name


def in_backward_pass() -> bool:
    """Return whether autograd computes gradients at the moment, in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True)
class InterceptedCall:
    """One call on its way: through which function, with which arguments by name, and the function itself.

    module: the qualified name of the module that makes it. function: how its arguments are read; original: what is called.
    handed: the masks of that module's arguments, then of what runs it, outwards. positional: how many arguments it is given
    without their names. infers: whether it is made in inference mode. number: which call of its module, from 1; computed again
    for a backward pass it keeps that. order: among all calls. ran: what computed it, as far as functions that are known were
    called within.
    """

    module: str
    function: AttentionFunction
    arguments: Mapping[str, Any]
    original: Callable[..., Any]
    handed: tuple[HandedMasks, ...] = ()
    positional: int = 0
    infers: bool = False
    number: int = 1
    order: int = 1
    ran: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        """The kernels that computed it: what SDPA chose, or functions of libraries; "" where nothing is known."""
        return ", ".join(dict.fromkeys(self.ran))

    @property
    def is_again(self) -> bool:
        """True where it is made within a backward pass, as checkpointing computes a forward pass again."""
        return in_backward_pass()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """q, k and v as the function takes them."""
        return [self.arguments[name] for name in self.function.tensors]

    def with_tensors(self, *tensors: torch.Tensor) -> InterceptedCall:
        """Return the same call on other tensors."""
        arguments = {**self.arguments, **dict(zip(self.function.tensors, tensors, strict=True))}
        return replace(self, arguments=arguments)

    def read(self) -> AttentionArguments:
        """Return what the call asks. Raises UnreadableError."""
        return self.function.read(self.arguments)

    def compute(self) -> Any:
        """Call the function as it was called."""
        if chosen := self.function.kernel_of(self.arguments):
            self.ran.append(chosen)
        named = self.function.pack(dict(self.arguments))
        args = [named.pop(name) for name in self.function.parameters[: self.positional]]
        with torch.inference_mode() if self.infers else nullcontext():
            result = self.original(*args, **named)
        if chosen := self.function.ran():
            self.ran.append(chosen)
        return result


class Handler(Protocol):
    """Decides what becomes of a call that was intercepted."""

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Return the result of the call. Raises UnreadableError where it cannot be read."""

    def unread(self, module: str, function: str, reason: str) -> None:
        """Take note of a call whose arguments cannot be read; the model is given what the function returns."""
        del module, function, reason  # by default it is left to the model


class Interceptor:
    """Catches calls while it is spread; what is called from within a call belongs to that call."""

    def __init__(self, handler: Handler, tracker: Tracker) -> None:
        self._handler, self._tracker = handler, tracker
        self.is_active, self._is_inside = False, False
        self._ran: list[str] = []
        self._mode: Any = None

    def wrap(self, function: AttentionFunction, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function."""

        @functools.wraps(original)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            # kept by a backend that was prepared meanwhile; or as where a backend compiles what calls it
            if not self.is_active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._tracker.functions.add(function.place)
            if self._is_inside:
                # what the outer call is computed by: a function that is known, called within it
                if chosen := function.kernel_of(dict(zip(function.parameters, args, strict=False)) | kwargs):
                    self._ran.append(chosen)
                elif function is not FLEX or not self._ran:
                    self._ran.append(function.shown)
                return original(*args, **kwargs)
            return self.intercept(function, original, args, kwargs)

        return intercepted

    def intercept(
        self, function: AttentionFunction, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Hand one call to the handler."""
        module, number, order = self._tracker.note_call()
        infers = torch.is_inference_mode_enabled()
        with self._inside():
            try:
                arguments = function.bind(args, kwargs)
                if missing := [name for name in function.tensors if name not in arguments]:
                    raise UnreadableError(f"no argument {missing[0]}")
                _refuse_vmap(arguments[name] for name in function.tensors)
                made = function, arguments, original, self._tracker.handed(), len(args), infers
                call = InterceptedCall(module, *made, number, order)
                self._ran = call.ran
                with outside_inference():
                    return self._handler.handle(call)
            except UnreadableError as error:
                self._handler.unread(module, function.shown, str(error))
                return original(*args, **kwargs)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Catch nothing, and leave compiled functions as they are: what is called now belongs to the call."""
        self._is_inside = True
        try:
            with _set_aside(self._mode), torch.compiler.set_stance("default"), warnings.catch_warnings():
                # so only because calls are intercepted: compiled parts run eagerly, and an alias of ours is not a leaf
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            self._is_inside = False

    def mode(self) -> Any:
        """Return a mode that catches SDPA where no name holds it, and notices attention that is written out."""
        wrapped: Any = torch.nn.functional.scaled_dot_product_attention
        operator: Any = torch.ops.aten.scaled_dot_product_attention.default  # what an exported model calls
        interceptor, sdpas = self, {getattr(wrapped, "__wrapped__", wrapped), operator}
        tracker = self._tracker
        written_out = WrittenOut(tracker.note_written_out, tracker.note_softmax)

        class Intercepting(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if function in sdpas and not interceptor._is_inside:
                    return interceptor.intercept(SDPA, function, args, kwargs or {})
                if function is torch.Tensor.backward:
                    with self:  # checkpointing computes calls again within it
                        return _backward(*args, **(kwargs or {}))
                result = function(*args, **(kwargs or {}))
                if not interceptor._is_inside:
                    tracker.note_read(function, args, kwargs or {})
                    written_out.see(function, args, kwargs or {}, result)
                return result

        self._mode = Intercepting()
        return self._mode


def _refuse_vmap(tensors: Iterable[Any]) -> None:
    """Raise UnreadableError for a tensor that torch.func.vmap batches, whatever other transform of torch.func is around it."""
    functorch = torch._C._functorch
    for tensor in tensors:
        while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                raise UnreadableError(
                    "q, k or v is batched by torch.func.vmap, which hides the batch; call the model without it"
                )
            tensor = functorch.get_unwrapped(tensor)


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode for a while: what is made there keeps no versions, and may not be changed outside."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _set_aside(mode: Any) -> Iterator[None]:
    """Take a mode off the stack of modes, and put it back. Others stay: flex_attention needs its own to look up masks."""
    stack: Any = overrides
    above = next((n for n, one in enumerate(reversed(stack._get_current_function_mode_stack())) if one is mode), None)
    if above is None:  # it runs at the moment, or belongs to another thread
        yield
        return
    later = [stack._pop_mode() for _ in range(above + 1)][:-1]
    for one in reversed(later):
        stack._push_mode(one)
    try:
        yield
    finally:
        later = [stack._pop_mode() for _ in later]
        for one in (mode, *reversed(later)):
            stack._push_mode(one)


def _backward(
    tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Do what Tensor.backward does, as a function that modes see through."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


@contextmanager
def intercept_attention(
    handler: Handler,
    model: torch.nn.Module | None = None,
    functions: Iterable[Named] = (),
    replaces: bool = False,
    read: Iterable[AttentionFunction] = (),
) -> Iterator[Tracker]:
    """Hand every attention call to a handler; yields who calls. functions, read: further ones, by name, and as they are read.

    Compiled parts of the model run eagerly meanwhile. replaces: models of transformers are switched to an implementation of
    ours, so that they build every mask in full. Raises ValueError for a function that cannot be read.
    """
    tracker = Tracker(model)
    interceptor = Interceptor(handler, tracker)
    wrappers = wrappers_of(interceptor.wrap, functions, read)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(tracker.tracking())
        stack.enter_context(interceptor.mode())
        stack.enter_context(replaced(wrappers, model))
        stack.enter_context(transformers_intercepted(interceptor.wrap, model, replaces))
        stack.callback(setattr, interceptor, "is_active", False)  # what stands in for a function may be kept longer
        interceptor.is_active = True
        yield tracker


def wrappers_of(
    wrap: Callable[[AttentionFunction, Callable[..., Any]], Callable[..., Any]],
    functions: Iterable[Named] = (),
    read: Iterable[AttentionFunction] = (),
) -> dict[int, Callable[[Any], Any]]:
    """Return what wraps each function that is intercepted, by its identity. Raises ValueError for one that cannot be read."""
    import torch.nn.attention.flex_attention  # noqa: F401 - a part of torch that is loaded late

    known = [(function, _held(function)) for function in (*imported_functions(), *user_functions(functions), *read)]
    return {id(held): functools.partial(wrap, function) for function, held in known if held is not None}


def never_called(functions: Iterable[Named], seen: set[tuple[str, str]]) -> tuple[str, ...]:
    """Return those of the functions that a user names of which no call was seen; of two names of one the last one counts."""
    named = [(function, id(_held(function))) for function in user_functions(functions)]
    places = {held: function.place for function, held in named}
    return tuple(function.shown for function, held in named if places[held] not in seen)


def _held(function: AttentionFunction) -> Callable[..., Any] | None:
    owner: Any = sys.modules[function.module]
    for part in function.attribute.split("."):
        owner = getattr(owner, part, None)
    return owner if callable(owner) else None


# -- functions where they are held by name -----------------------------------------------------------------------------------


@contextmanager
def replaced(wrappers: Mapping[int, Callable[[Any], Any]], model: torch.nn.Module | None) -> Iterator[None]:
    """Put wrap(function) wherever a function is held whose id is a key: modules, classes of the model, and its own fields.

    A function that torch.compile made of one of them is wrapped as well. What was there before comes back, whatever happens.
    """
    changed: list[tuple[Any, str, Any]] = []
    made: dict[int, Any] = {}
    try:
        with quiet():  # some names warn when they are looked at
            held = [
                (owner, name, value, wrap)
                for owner in _owners(model)
                for name, value in list(vars(owner).items())
                if (wrap := _wrapper_of(value, wrappers)) is not None
            ]
        for owner, name, value, wrap in held:
            function = value.__func__ if type(value) is staticmethod else value
            wrapped = made.setdefault(id(function), wrap(function))
            binds = hasattr(type(value), "__get__") and type(value) is not staticmethod
            try:
                setattr(owner, name, wrapped if binds or not isinstance(owner, type) else staticmethod(wrapped))
            except (AttributeError, TypeError):  # of a module or class that cannot be changed
                continue
            changed.append((owner, name, value))
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)
        _forgotten_by_dynamo(made.values())


def _forgotten_by_dynamo(functions: Iterable[object]) -> None:
    """Have Dynamo look up torch's functions anew where it did so while these stood there."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and rules.get_torch_obj_rule_map.cache_info().currsize:
        known = rules.get_torch_obj_rule_map().keys()
        if not known.isdisjoint(one for one in functions if isinstance(one, Hashable)):
            rules.get_torch_obj_rule_map.cache_clear()


def _wrapper_of(value: Any, wrappers: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    """Return what wraps a value, None where it is none of the functions; hundreds of thousands are asked for."""
    if id(value) in wrappers:
        return wrappers[id(value)]
    kind = type(value)
    if kind is staticmethod:
        return _wrapper_of(value.__func__, wrappers)
    if kind is not FunctionType or not value.__dict__:
        return None
    compiled_from = uncompiled(value)
    return None if compiled_from is None else wrappers.get(id(compiled_from))


def _owners(model: torch.nn.Module | None) -> Iterator[Any]:
    """Yield what holds functions by name: every imported module but our own, then classes and objects of the model."""
    for name, module in list(sys.modules.items()):
        if module is not None and not name.startswith("pytest_attn.") and isinstance(getattr(module, "__dict__", None), dict):
            yield module
    if model is None:
        return
    seen: set[int] = set()
    for part in model.modules():
        for owner in (part, *type(part).__mro__[:-1]):
            if id(owner) not in seen and owner.__module__ not in ("torch.nn.modules.module", "builtins"):
                seen.add(id(owner))
                yield owner


def uncompiled(function: object) -> object | None:
    """Return the function that torch.compile made this one of; None where it did not make it."""
    try:
        made_of: object = vars(function).get("_torchdynamo_orig_callable")
    except Exception:  # has no fields, or stands for something that is not there
        return None
    return made_of


class Running(NamedTuple):
    """A module that runs, what it was called with, the parts of it that have run, and the ids of tensors that nothing read."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parts: list[Part]
    unread: set[int]


class Part(NamedTuple):
    """A part of a module that ran: itself, its name there, and its first argument."""

    module: torch.nn.Module
    name: str
    given: Any


PROJECTS_KEYS = re.compile(r"(w|to_)?kv?(ey)?(_?proj)?", re.IGNORECASE).fullmatch


class Tracker:
    """The modules that run at the moment, the outermost first, and all that ran."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._running: list[Running] = []
        self._numbers: Counter[tuple[str, bool]] = Counter()
        #: modules that ran
        self.ran: dict[str, torch.nn.Module] = {}
        #: modules that made an attention call
        self.callers: dict[str, torch.nn.Module] = {}
        #: for each of their calls, which parts of the module had run before
        self.before: dict[str, list[list[torch.nn.Module]]] = {}
        #: settings and kinds of the arguments with which they were called last
        self.call_settings: dict[str, tuple[object, ...]] = {}
        #: modules that computed a softmax outside of every attention call
        self.with_softmax: dict[str, None] = {}
        #: modules that computed attention outside of every attention call, with the shape of its scores
        self.written_out: dict[str, tuple[int, ...]] = {}
        #: where the functions are through which calls went, also within other calls
        self.functions: set[tuple[str, str]] = set()
        self._model = model
        if model is not None:
            self._name(model)

    def _name(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(id(module), printable(name.replace("_orig_mod.", "")) or type_name(root))

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow which module runs, by hooks that are removed afterwards: of the model, or of any module without one."""
        with ExitStack() as stack:
            stack.callback(self._running.clear)
            if self._model is None:
                stack.callback(every.register_module_forward_pre_hook(self._enter).remove)
                stack.callback(every.register_module_forward_hook(self._leave, always_call=True).remove)
            for part in [] if self._model is None else self._model.modules():
                stack.callback(part.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        if id(module) not in self._names:
            self._name(module)
        given = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        self._running.append(Running(module, args, kwargs, [], given))
        self.ran[self._names[id(module)]] = module

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], _result: Any) -> None:
        while self._running and self._running.pop().module is not module:
            pass
        if self._running:
            self._running[-1].parts.append(Part(module, self._names[id(module)].rpartition(".")[2], args[0] if args else None))

    def handed(self) -> tuple[HandedMasks, ...]:
        """Return the masks that the modules were handed that run, the innermost first."""
        levels = [
            handed_to(self._names[id(one.module)], one.module, one.args, one.kwargs, one.unread)
            for one in reversed(self._running)
        ]
        if levels and levels[0].memory is not None:  # what keys are projected of is what it attends to
            of_keys = [part.given for part in self._running[-1].parts if PROJECTS_KEYS(part.name)]
            levels[0] = replace(levels[0], memory=next((t for t in of_keys if isinstance(t, torch.Tensor)), levels[0].memory))
        return tuple(levels)

    @property
    def current(self) -> str:
        """The qualified name of the module that runs; "" outside all."""
        return self._names[id(self._running[-1].module)] if self._running else ""

    def note_call(self) -> tuple[str, int, int]:
        """Note an attention call of the module that runs; return its name, which of its calls it is, and which of all."""
        by = self.current, in_backward_pass()
        self._numbers[by] += 1
        if self._running:
            module, args, kwargs, ran, _ = self._running[-1]
            self.callers[self.current] = module
            self.call_settings[self.current] = tuple(
                v if is_setting(v) else type(v).__name__ for v in (*args, *kwargs, *kwargs.values())
            )
            if not by[1]:  # where checkpointing computes it again
                self.before.setdefault(self.current, []).append([part.module for part in ran])
        return self.current, self._numbers[by], self._numbers.total()

    def note_read(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that an operation, and not a look at a shape or dtype, reads its arguments in the modules that run."""
        if getattr(function, "__name__", "") == "__get__":
            return
        read = {id(value) for value in (*args, *kwargs.values())}
        for running in self._running:
            running.unread.difference_update(read)

    def note_softmax(self) -> None:
        """Note that the module that runs computes a softmax of its own."""
        if self._running:
            self.with_softmax[self.current] = None

    def note_written_out(self, shape: tuple[int, ...]) -> None:
        """Note that the module that runs computes attention of its own."""
        if self._running:
            self.written_out[self.current] = shape

    @property
    def silent(self) -> list[str]:
        """Modules that ran without an attention call, and are built like one that made some."""
        kinds = {build_of(module) for module in self.callers.values()}
        return [name for name, module in self.ran.items() if name not in self.callers and build_of(module) in kinds]


def is_setting(value: object) -> bool:
    """Return whether a value says how something is to be done."""
    return value is None or isinstance(value, bool | int | float | str)


def build_of(module: torch.nn.Module) -> tuple[object, ...]:
    """Return what modules have in common that are built alike: their class, and the names of all they hold."""
    parameters, parts = dict(module.named_parameters()), dict(module.named_modules())
    return type(module), tuple(parameters), tuple(parts)


# -- models of transformers --------------------------------------------------------------------------------------------------


#: what a model is switched to while its attention is replaced
NAME = "pytest_attn"


@contextmanager
def transformers_intercepted(
    wrap: Callable[[AttentionFunction, Callable[..., Any]], Callable[..., Any]], model: torch.nn.Module | None, replaces: bool
) -> Iterator[None]:
    """Wrap each attention function that a model of transformers fetches; nothing where transformers is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    fetch = getattr(interface, "get_interface", None)
    if interface is None or fetch is None:
        yield
        return

    @functools.wraps(fetch)
    def fetched(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original = fetch(self, attn_implementation, default)
        return wrap(function_called(str(attn_implementation), original), original)

    with ExitStack() as stack:
        if replaces and model is not None:
            stack.enter_context(_switched(model, interface))
        stack.enter_context(patch.object(interface, "get_interface", fetched))
        yield


def is_of_transformers(model: torch.nn.Module | None) -> bool:
    """Return whether a model has parts of transformers, which say what masks they want."""
    return bool(_configs(model))


def lacks_masks(model: torch.nn.Module | None, is_replaced: bool) -> bool:
    """Return whether a model of transformers has to be switched for its calls to be handed every mask as others can take it.

    What SDPA is handed says all, also where a sparse model makes a mask for it, and for no name that it does not know. So does
    what eager attention is handed, but only eager attention has a meaning for rows without a key there.
    """
    says_all = ("sdpa",) if is_replaced else ("sdpa", "eager")
    return any(config._attn_implementation_internal not in says_all for config in _configs(model))


@contextmanager
def _switched(model: torch.nn.Module, interface: Any) -> Iterator[None]:
    """Switch every part of the model to our implementation, which builds all masks in full; then back."""
    masking_utils: Any = importlib.import_module("transformers.masking_utils")
    masks = masking_utils.AttentionMaskInterface._global_mapping
    before = {config._attn_implementation_internal for config in _configs(model)}
    never_left_out = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    masks_in_full = {NAME: lambda *args, **kwargs: masking_utils.sdpa_mask(*args, **{**kwargs, **never_left_out})}
    ours = {NAME: functools.partial(_exact_forward, before)}
    with patch.dict(masks, masks_in_full), patch.dict(interface._global_mapping, ours), ExitStack() as stack:
        for config in _configs(model):
            stack.enter_context(patch.object(config, "_attn_implementation_internal", NAME))
        yield


def _configs(model: torch.nn.Module | None) -> list[Any]:
    """Return the configurations of the model's parts, and those within them, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if "_attn_implementation_internal" not in getattr(config, "__dict__", {}) or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for part in model.modules() if model is not None else ():
        add(getattr(part, "config", None))
    return list(found.values())


#: how names of implementations begin that return no weights; nor do those of the Hub, whose names have a slash
_WITHOUT_WEIGHTS = ("sdpa", "flex", "flash")


def _exact_forward(
    implementations: Collection[str], module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """Compute exact attention: what stands in where a call is not replaced. implementations: those that the model has."""
    query, key, value = map(autocast, (query, key, value))
    given = {"module": module, "query": query, "key": key, "value": value, "attention_mask": attention_mask, **kwargs}
    arguments = read_call(NAME, given)
    inputs = to_inputs(arguments)
    out, weights = arguments.to_result(exact_attention(inputs))
    gives_weights = any(not str(name).startswith(_WITHOUT_WEIGHTS) and "/" not in str(name) for name in implementations)
    return out, exact_weights(inputs).to(out.dtype) if gives_weights or arguments.asks_more else weights


#: one function of q, k, v and options, or where it is found
Named: TypeAlias = Callable[..., Any] | str


def as_functions(functions: Iterable[Named] | Named) -> tuple[Named, ...]:
    """Return functions that a user names, one or several, as a tuple."""
    return (functions,) if isinstance(functions, str) or callable(functions) else tuple(functions)


def user_functions(functions: Iterable[Named] | Named) -> list[AttentionFunction]:
    """Return how each is read. Raises ValueError where one is not found, or is held by no name of its module."""
    return [user_function(*_place_of(function)) for function in as_functions(functions)]


def _place_of(function: Named) -> tuple[str, str, Any]:
    """Return the module of a function, its name there, and the function itself."""
    if isinstance(function, str):
        module, _, attribute = function.rpartition(".")
        try:
            return module, attribute, getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"functions: {function!r} is not found ({error}); expected 'package.module.function'") from None
    module, attribute = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    held: Any = sys.modules.get(module)
    for part in attribute.split("."):
        held = getattr(held, part, None)
    if held is not function:
        raise ValueError(
            f"functions: {function!r} is not found under its name {module}.{attribute}; say a function of a module"
        )
    return module, attribute, function


def user_function(module: str, attribute: str, function: Any) -> AttentionFunction:
    """Return how a function of a user is read. Raises ValueError where it has no signature, or too few parameters."""
    parameters = parameters_of(function)
    if parameters is None:
        raise ValueError(f"functions: {attribute} has no signature; say a function of Python that calls it")
    kinds = [p.kind for p in parameters.values()]
    names = tuple(name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        names = (*names, *("q", "k", "v")[len(names) :])
    if len(names) < 3:
        raise ValueError(f"functions: {attribute} takes {len(names)} arguments; expected q, k, v and options")
    tensors = names[0], names[1], names[2]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    read = functools.partial(_read, tensors=tensors, defaults=defaults)
    return AttentionFunction(module, attribute, names, read, "", tensors, attribute, defaults=defaults)


_CAUSAL, _SCALE = ("is_causal", "causal"), ("scale", "softmax_scale", "scaling", "sm_scale")
_MASK, _DROPOUT = ("attn_mask", "mask", "attention_mask"), ("dropout_p", "dropout")
_SOFTCAP = "softcap"


def _read(given: Mapping[str, Any], tensors: tuple[str, str, str], defaults: Mapping[str, Any]) -> AttentionArguments:
    """Read a user's function: q, k, v (batch, heads, rows, dim), and options under the names that are usual for them.

    defaults: what options are that are not given. Those under other names are not checked.
    """
    options = {name: defaults[name] for name in (*_MASK, *_CAUSAL, *_SCALE, *_DROPOUT, _SOFTCAP) if name in defaults}
    options |= given
    q, k, v = (options.pop(name) for name in tensors)
    for name, tensor in zip(tensors, (q, k, v), strict=True):
        if getattr(tensor, "ndim", 0) != 4:
            raise UnreadableError(f"its argument {name} is {shortened(tensor)}; expected (batch, heads, rows, dim)")

    def option(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := options.pop(name, None)) is not None), None)

    attn_mask, causal, scale, dropout = (option(names) for names in (_MASK, _CAUSAL, _SCALE, _DROPOUT))
    softcap = option((_SOFTCAP,))
    refuse_unread(options, set())
    given_to_sdpa = {"query": q, "key": k, "value": v, "attn_mask": attn_mask, "is_causal": causal, "scale": scale}
    if hasattr(dropout, "p"):  # a module
        dropout = dropout.p if dropout.training else 0.0
    arguments = read_plain({**given_to_sdpa, "dropout_p": dropout})
    return dataclasses.replace(arguments, softcap=softcap)
