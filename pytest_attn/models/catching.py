"""Catch every attention call of a model, whatever function it goes through, and restore everything afterwards."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pytest_attn.backends.attention_args import AttentionArguments, AttentionFunction, UnreadableError, imported_functions
from pytest_attn.backends.libraries.flex import FLEX
from pytest_attn.backends.libraries.sdpa import SDPA
from pytest_attn.models.graph import in_backward_pass
from pytest_attn.models.interfaces import transformers_caught
from pytest_attn.models.patching import replaced
from pytest_attn.models.tracking import Tracker
from pytest_attn.models.user_functions import user_functions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Caught:
    """One call on its way: through which function, with which arguments by name, and the function itself.

    module: the qualified name of the module that makes it. profile: the backend that rounds as the function does. ran: what
    computed it, as far as functions that are known were called within.
    """

    module: str
    function: str
    profile: str
    entry: AttentionFunction
    arguments: Mapping[str, Any]
    original: Callable[..., Any]
    ran: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        """The kernels that computed it: what SDPA chose, or functions of libraries; "" where nothing is known."""
        return ", ".join(dict.fromkeys(self.ran))

    @property
    def is_again(self) -> bool:
        """Whether it is made within a backward pass, as checkpointing computes a forward pass again."""
        return in_backward_pass()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """q, k and v as the function takes them."""
        return [self.arguments[name] for name in self.entry.tensors]

    def with_tensors(self, *tensors: torch.Tensor) -> Caught:
        """Return the same call on other tensors."""
        arguments = {**self.arguments, **dict(zip(self.entry.tensors, tensors, strict=True))}
        return replace(self, arguments=arguments)

    def read(self) -> AttentionArguments:
        """Return what the call asks. Raises UnreadableError."""
        return self.entry.read(self.arguments)

    def compute(self) -> Any:
        """Call the function."""
        if chosen := self.entry.kernel_of(self.arguments):
            self.ran.append(chosen)
        result = self.original(**self.entry.pack(dict(self.arguments)))
        if chosen := self.entry.ran():
            self.ran.append(chosen)
        return result


class Handler(Protocol):
    """What becomes of a call that was caught: returns what the model is given."""

    def handle(self, caught: Caught) -> Any:
        """Return the result of the call."""

    def unread(self, module: str, function: str, reason: str) -> None:
        """Take note of a call whose arguments cannot be read; the model is given what the function returns."""


class Net:
    """Catches calls while it is spread; what is called from within a call belongs to that call."""

    def __init__(self, handler: Handler, tracker: Tracker) -> None:
        self._handler, self._tracker = handler, tracker
        self._is_spread, self._is_inside = False, False
        self._ran: list[str] = []
        self._mode: Any = None

    def wrap(self, entry: AttentionFunction, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function."""
        import torch

        @functools.wraps(original)
        def caught(*args: Any, **kwargs: Any) -> Any:
            # kept by a backend that was prepared meanwhile; or as where a backend compiles what calls it
            if not self._is_spread or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._tracker.functions.add(entry.place)
            if self._is_inside:
                self._note_inner(entry, args, kwargs)
                return original(*args, **kwargs)
            return self.catch(entry, original, args, kwargs)

        return caught

    @contextmanager
    def spread(self) -> Iterator[None]:
        """Catch calls for a while; what stands in for a function may be kept longer, and is that function then."""
        self._is_spread = True
        try:
            yield
        finally:
            self._is_spread = False

    def catch(
        self, entry: AttentionFunction, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Hand one call to the handler."""
        module = self._tracker.note_call()
        with self._inside():
            try:
                arguments = entry.bind(args, kwargs)
                if missing := [name for name in entry.tensors if name not in arguments]:
                    raise UnreadableError(f"no argument {missing[0]}")
            except UnreadableError as error:
                self._handler.unread(module, entry.shown, str(error))
                return original(*args, **kwargs)
            call = Caught(module, entry.shown, entry.profile, entry, arguments, original)
            self._ran = call.ran
            return self._handler.handle(call)

    def _note_inner(self, entry: AttentionFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what a call is computed by: a function that is known, called within it."""
        if chosen := entry.kernel_of(dict(zip(entry.parameters, args, strict=False)) | dict(kwargs)):
            self._ran.append(chosen)
        elif entry is not FLEX or not self._ran:
            self._ran.append(entry.shown)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Catch nothing, and leave compiled functions as they are: what is called now belongs to the call."""
        import torch

        self._is_inside = True
        try:
            with _set_aside(self._mode), torch.compiler.set_stance("default"), _without_warnings_of_catching():
                yield
        finally:
            self._is_inside = False

    def mode(self) -> Any:
        """Return a mode that catches SDPA where no name holds it, and notices softmax."""
        import torch
        from torch.overrides import TorchFunctionMode

        net, sdpa = self, _bare(torch.nn.functional.scaled_dot_product_attention)
        softmax = {torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax, torch.special.softmax}

        class Catching(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if function is sdpa and not net._is_inside:
                    return net.catch(SDPA, function, args, kwargs or {})
                if function is torch.Tensor.backward:
                    with self:  # checkpointing computes calls again within it
                        return _backward(*args, **(kwargs or {}))
                if function in softmax and not net._is_inside:
                    net._tracker.note_softmax()
                return function(*args, **(kwargs or {}))

        self._mode = Catching()
        return self._mode


@contextmanager
def _set_aside(mode: Any) -> Iterator[None]:
    """Take a mode off the stack of modes, and put it back. Others stay: flex_attention needs its own to look up masks."""
    from torch import overrides

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


@contextmanager
def _without_warnings_of_catching() -> Iterator[None]:
    """Leave out what torch warns of only because calls are caught: a test may take warnings for errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # compiled parts run eagerly
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # our aliases are none
        yield


def _backward(
    tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Do what Tensor.backward does, as a function that modes see through."""
    import torch

    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind what stands in for it."""
    found: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return found


@contextmanager
def catching(
    handler: Handler,
    model: torch.nn.Module | None = None,
    functions: Iterable[Callable[..., Any] | str] = (),
    replaces: bool = False,
) -> Iterator[Tracker]:
    """Hand every attention call to a handler; yields who calls. functions: further ones, by name or as they are.

    Compiled parts of the model run eagerly meanwhile. replaces: models of transformers are switched to an implementation of
    ours, so that they build every mask in full. Raises ValueError for a function that cannot be read.
    """
    import torch

    tracker = Tracker(model)
    net = Net(handler, tracker)
    wrappers = wrappers_of(net.wrap, functions)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(tracker.tracking())
        stack.enter_context(net.mode())
        stack.enter_context(replaced(wrappers, model))
        stack.enter_context(transformers_caught(net.wrap, model, replaces))
        stack.enter_context(net.spread())
        yield tracker


def wrappers_of(
    wrap: Callable[[AttentionFunction, Callable[..., Any]], Callable[..., Any]],
    functions: Iterable[Callable[..., Any] | str] = (),
) -> dict[int, Callable[[Any], Any]]:
    """Return what wraps each function that is caught, by its identity. Raises ValueError for one that cannot be read."""
    import torch.nn.attention.flex_attention  # noqa: F401 - a part of torch that is loaded late

    known = [(entry, _function_of(entry)) for entry in (*imported_functions(), *user_functions(functions))]
    return {id(function): functools.partial(wrap, entry) for entry, function in known if function is not None}


def uncaught(functions: Iterable[Callable[..., Any] | str], seen: set[tuple[str, str]]) -> tuple[str, ...]:
    """Return those of the functions that a user names of which no call was seen; of two names of one the last one counts."""
    entries = [(entry, id(_function_of(entry))) for entry in user_functions(functions)]
    places = {function: entry.place for entry, function in entries}
    return tuple(entry.shown for entry, function in entries if places[function] not in seen)


def _function_of(entry: AttentionFunction) -> Callable[..., Any] | None:
    owner: Any = sys.modules[entry.module]
    for part in entry.attribute.split("."):
        owner = getattr(owner, part, None)
    return owner if callable(owner) else None
