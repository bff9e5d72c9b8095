"""The guest ranks: tests whose callables run on several processes, each with its shards."""

from pytest_attn.seam import Guest, LatencyField
from pytest_attn.session import option_types

_HERE = "pytest_attn.guests.ranks"
#: what computes over ranks, by the names of backends
BACKENDS = {
    "torch_cp": f"{_HERE}.libraries.torch_cp:TorchCp",
    "torch_cp_flex": f"{_HERE}.libraries.torch_cp:TorchCpFlex",
    "ring_flash": f"{_HERE}.libraries.ring_flash:RingFlash",
    "zigzag": f"{_HERE}.libraries.ring_flash:Zigzag",
    "llama3": f"{_HERE}.libraries.ring_flash:Llama3",
    "ulysses": f"{_HERE}.libraries.yunchang:Ulysses",
    "usp": f"{_HERE}.libraries.yunchang:Usp",
    "te_cp": f"{_HERE}.libraries.te_cp:TeCp",
    "diffusers_cp": f"{_HERE}.libraries.diffusers_cp:DiffusersCp",
}
_OPTIONS = {
    "rank_timeout": option_types.option(
        "Seconds that ranks may take for one call; then they are ended, and their stacks and last collectives shown; 0 waits"
        " forever (default: 120)",
        "120",
        "SECONDS",
        option_types.seconds,
        group="wait",
        short="of a call over ranks",
    ),
}
#: attributes of `attn` in the process that judges; on a rank they are those of `RankCase`
_OF_ATTN = ("rank", "ranks", "group", "mesh", "shards", "kv_shards")
GUEST = Guest(
    items=dict.fromkeys(("ranks", "shard"), f"{_HERE}.ranked_items:RankedItems"),
    options=_OPTIONS,
    backends={"ranks": BACKENDS},
    attributes={name: f"{_HERE}.ranked_executor:{name}_of" for name in _OF_ATTN},
    latency={
        "ranks": LatencyField(
            "of a callable that ranks compute: number, shard, topology, communication_by, apart; by rank seconds, own,"
            " communication",
            f"{_HERE}.communication:describe_ranks",
        )
    },
    faults=f"{_HERE}.rank_faults:FAULTS_OF_RANKS",
)
