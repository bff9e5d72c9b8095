"""cuDNN through its own frontend: the graph API's sdpa and sdpa_backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pytest_attn.backends.backend import LibraryBackend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import CUDNN_FULLY_MASKED_ROWS, CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_SOURCE = Library(("nvidia-cudnn-frontend",), "cudnn", "pip install nvidia-cudnn-frontend")


class CudnnFrontend(LibraryBackend):
    """pygraph().sdpa and sdpa_backward, a graph for each set of strides, built at the first call and kept."""

    name = "cudnn"
    source = _SOURCE
    precision = "cudnn"
    makes_plans = True
    variants = ("graph",)
    launches = ("cuDNN", "flash")
    needs = "CUDA, sm80 to sm121"
    known_defects = (CUDNN_NAN, CUDNN_NAN_OF_ONE_TILE, CUDNN_FULLY_MASKED_ROWS)
    capabilities = Capabilities(
        masks=frozenset(("causal", "causal-bottom-right", "window")),
        features=frozenset(("bias", "scale", "grouped heads", "padded", "backward")),
        v_head_dim=True,
    )

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """Build the graphs, without memory, and say why cuDNN supports none, in its own words."""
        return [*_not_supported_because(workload, machine.device, backward)]

    def pads_by_mask(self, workload: Workload) -> bool:
        return True

    def refusal_in(self, error: Exception) -> str | None:
        """Return its words where it supports no graph of some strides."""
        return str(error).splitlines()[0] if type(error).__name__ == "cudnnGraphNotSupportedError" else None

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The bias in full, and gradients of each query head in float32."""
        w = workload
        bias = 2 * w.batch * w.heads * w.q_len * w.kv_len if w.bias else 0
        sums = 4 * w.batch * w.heads * (w.q_len + 2 * w.kv_len) * max(w.head_dim, w.v_head_dim)
        return bias + (sums if backward else 0)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        attention = _Attention(inputs, backward)
        return _differentiable(attention) if backward else attention.inference


class _Attention:
    """The two operations on tensors of one workload, with the graphs built for them."""

    def __init__(self, inputs: Inputs, training: bool) -> None:
        self.workload, self.device, self.training = inputs.workload, inputs.device, training
        self.cudnn, self.handle = _SOURCE.load(), _handle(str(inputs.device))
        #: the bias with all rows and keys, and the lengths of padded sequences
        self.auxiliary: dict[str, torch.Tensor] = {}
        w = inputs.workload
        if inputs.bias is not None:
            self.auxiliary["bias"] = inputs.bias.expand(-1, -1, w.q_len, w.kv_len).contiguous()
        if inputs.kv_lens is not None:
            lengths = inputs.kv_lens.to(torch.int32).view(-1, 1, 1, 1)
            self.auxiliary |= {"kv_lens": lengths, "q_lens": torch.full_like(lengths, w.q_len)}
        self.graphs: dict[object, Graph] = {}

    def inference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.forward(q, k, v)["out"]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return out, and for training stats, the logsumexp of each row."""
        given = {"q": q.detach(), "k": k.detach(), "v": v.detach(), **self.auxiliary}
        return self._run(forward_graph, given, _results(given, self.training))

    def backward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {**given, **self.auxiliary}
        return self._run(backward_graph, given, _gradients(given))

    def _run(
        self, build: Callable[..., Graph], given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        data = given | made
        layout = (build, *(t.stride() for t in data.values()))
        with torch.cuda.device(self.device):
            if layout not in self.graphs:
                graph = build(self.cudnn, self.handle, self.workload, given, made)
                graph.plan(self.device)
                self.graphs[layout] = graph
            self.cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
            self.graphs[layout].execute(self.handle, data)
        return made


def _results(given: dict[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
    q, v = given["q"], given["v"]
    made = {"out": q.new_empty(*q.shape[:-1], v.shape[-1])}
    if training:
        made["stats"] = q.new_empty(*q.shape[:-1], 1, dtype=torch.float32)
    return made


def _gradients(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors for the gradients, zero where nothing may be written to, past the end of padded keys."""
    new = torch.zeros_like if "kv_lens" in given else torch.empty_like
    return {f"d{name}": new(given[name]) for name in "qkv"}


def _differentiable(attention: _Attention) -> AttentionFn:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            made = attention.forward(q, k, v)
            ctx.save_for_backward(q, k, v, made["out"], made["stats"])
            return made["out"]

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            names = ("q", "k", "v", "out", "stats")
            given = dict(zip(names, (t.detach() for t in ctx.saved_tensors), strict=True))
            return tuple(attention.backward({**given, "dout": dout.contiguous()}).values())

    return Function.apply


@cache
def _handle(device: str) -> Any:
    """Return one handle per device for the whole process."""
    with torch.cuda.device(torch.device(device)):
        return _SOURCE.load().create_handle()


@cache
def _not_supported_because(w: Workload, device: str, backward: bool) -> tuple[str, ...]:
    cudnn, handle = _SOURCE.load(), _handle(device)
    given = _like_inputs(w)
    made = _results(given, backward)
    graphs = [(forward_graph, given, made)]
    if backward:
        given = given | made | {"dout": made["out"]}
        graphs.append((backward_graph, given, _gradients(given)))
    with torch.cuda.device(torch.device(device)):
        try:
            for build, described, outputs in graphs:
                build(cudnn, handle, w, described, outputs).check()
        except cudnn.cudnnGraphNotSupportedError as error:
            return (" ".join(str(error).split()),)
    return ()


def _like_inputs(w: Workload) -> dict[str, torch.Tensor]:
    """Return tensors without memory in the layout of the workload's inputs."""

    def like(*shape: int, dtype: str = w.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    given = {
        "q": like(w.batch, w.heads, w.q_len, w.head_dim),
        "k": like(w.batch, w.kv_heads, w.kv_len, w.head_dim),
        "v": like(w.batch, w.kv_heads, w.kv_len, w.v_head_dim),
    }
    if w.bias:
        batch, heads = (w.batch if "b" in w.bias else 1), (w.heads if "h" in w.bias else 1)
        given["bias"] = like(batch, heads, w.q_len, w.kv_len)
    if w.kv_lens is not None:
        given["kv_lens"] = given["q_lens"] = like(w.batch, 1, 1, 1, dtype="int32")
    return given


# -- the graphs --------------------------------------------------------------------------------------------------------------

_DATA_TYPES = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT", "int32": "INT32"}


class Graph:
    """One graph of cuDNN: its tensors by name, described by torch tensors of the same layout."""

    def __init__(self, cudnn: Any, handle: Any, given: dict[str, torch.Tensor]) -> None:
        self.cudnn = cudnn
        self.native = cudnn.pygraph(
            io_data_type=self._data_type(given["q"]),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        self.tensors = {
            name: self.native.tensor(name=name, dim=list(t.shape), stride=list(t.stride()), data_type=self._data_type(t))
            for name, t in given.items()
        }

    def returns(self, outputs: dict[str, Any], made: dict[str, torch.Tensor]) -> Graph:
        """Write the outputs into tensors like `made`."""
        for name, like in made.items():
            output = outputs[name].set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
            self.tensors[name] = output.set_data_type(self._data_type(like))
        return self

    def check(self) -> None:
        """Raise cudnnGraphNotSupportedError where no kernel supports the graph."""
        modes = self.cudnn.heur_mode
        self.native.validate()
        self.native.build_operation_graph()
        self.native.create_execution_plans([modes.A, modes.FALLBACK])
        self.native.check_support()

    def plan(self, device: torch.device) -> None:
        """Choose the kernel and set its workspace aside."""
        self.check()
        self.native.build_plans()
        self.workspace = torch.empty(max(1, self.native.get_workspace_size()), dtype=torch.uint8, device=device)

    def execute(self, handle: Any, data: dict[str, torch.Tensor]) -> None:
        """Run it on data by name."""
        self.native.execute({self.tensors[name]: t for name, t in data.items()}, self.workspace, handle=handle)

    def _data_type(self, tensor: torch.Tensor) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        return getattr(self.cudnn.data_type, _DATA_TYPES[name])


def forward_graph(
    cudnn: Any, handle: Any, w: Workload, given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> Graph:
    """Return the graph of sdpa on tensors like `given`, whose results go into tensors like `made`."""
    graph = Graph(cudnn, handle, given)
    q, k, v = (graph.tensors[name] for name in "qkv")
    out, stats = graph.native.sdpa(q=q, k=k, v=v, generate_stats="stats" in made, **_options(graph, w))
    return graph.returns({"out": out, "stats": stats}, made)


def backward_graph(
    cudnn: Any, handle: Any, w: Workload, given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> Graph:
    """Return the graph of sdpa_backward."""
    graph = Graph(cudnn, handle, given)
    operands = {name: graph.tensors[name] for name in ("q", "k", "v", "stats")}
    o, d_o = graph.tensors["out"], graph.tensors["dout"]
    gradients = graph.native.sdpa_backward(**operands, o=o, dO=d_o, **_options(graph, w))
    return graph.returns(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), made)


def _options(graph: Graph, w: Workload) -> dict[str, Any]:
    """Return the arguments that say scale, bias, padding and mask. cuDNN's own default for the scale is 1."""
    options: dict[str, Any] = {"attn_scale": w.softmax_scale}
    if w.bias:
        options["bias"] = graph.tensors["bias"]
    if w.kv_lens is not None:
        options |= {"use_padding_mask": True, "seq_len_q": graph.tensors["q_lens"], "seq_len_kv": graph.tensors["kv_lens"]}
    mask = w.plain_mask
    if mask is None or mask.band is None:
        return options
    left, right, top_left = mask.band
    top_left = top_left or (w.q_len == w.kv_len and w.kv_lens is None)
    alignments = graph.cudnn.diagonal_alignment
    return options | {
        "diagonal_alignment": alignments.TOP_LEFT if top_left else alignments.BOTTOM_RIGHT,
        "diagonal_band_left_bound": None if left is None else left + 1,  # hides the keys at or before row - bound
        "diagonal_band_right_bound": right,  # hides the keys after row + bound
    }
