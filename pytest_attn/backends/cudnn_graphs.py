"""The graphs of cuDNN's frontend for attention: sdpa and sdpa_backward of one workload, described and run by names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.masks import Causal, Window
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

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
        import torch

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
        options |= {
            "use_padding_mask": True,
            "seq_len_q": graph.tensors["q_lens"],
            "seq_len_kv": graph.tensors["kv_lens"],
        }
    mask = w.plain_mask
    if not isinstance(mask, Causal | Window):
        return options
    left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    square = w.q_len == w.kv_len and w.kv_lens is None
    top_left = square or (isinstance(mask, Causal) and not mask.bottom_right)
    alignments = graph.cudnn.diagonal_alignment
    return options | {
        "diagonal_alignment": alignments.TOP_LEFT if top_left else alignments.BOTTOM_RIGHT,
        "diagonal_band_left_bound": None if left is None else left + 1,  # hides the keys at or before row - bound
        "diagonal_band_right_bound": right,  # hides the keys after row + bound
    }
