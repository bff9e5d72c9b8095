"""Honest calls of random models: how many are called wrong, and how near the others come to their limits.

    python benchmarks/honest_models.py [--device cuda] [--calls 20000] [--seconds 500] [--processes 4] [family ...]

Tiny models with random weights of torch, of the suite, and of transformers and timm where these are installed: their own
attention, eager and through SDPA, in float32, bfloat16, float16 and under autocast, forward and backward, each with a seed of
its own. Every call is correct, so each that is not passed, and that no known defect of a library explains, is a false alarm.
Prints for each family its calls, its alarms, in how many calls emulated kernels raised a limit, and the largest share of each
limit; the last line is "alarms: A in N calls". Exits with 1 if there are more than one in 20,000.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.small_models import torch_model

DTYPES = ("float32", "bfloat16", "float16")
#: models of a family that may fail to be built before it is given up, and seconds for what is under way at the end
TRIES, GRACE = 5, 60.0
#: alarms that are accepted in so many calls
ACCEPTED = 1 / 20_000


class Draw:
    """The sizes of one model, all drawn from its seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.random, self.device = random.Random(seed), device
        self.heads = self.random.choice((2, 4))
        self.kv_heads = self.random.choice([n for n in (1, 2, 4) if self.heads % n == 0])
        self.width = self.heads * self.random.choice((16, 32))
        self.tokens, self.batch = self.random.randint(5, 80), self.random.choice((1, 2, 2, 3))
        self.dtype = self.random.choice(DTYPES)
        self.has_autocast = self.random.random() < 0.2
        self.implementation = self.random.choice(("eager", "sdpa"))
        self.is_sharp = self.random.random() < 0.25

    def ids(self, vocabulary: int) -> torch.Tensor:
        """Return token ids, (batch, tokens)."""
        return torch.randint(vocabulary, (self.batch, self.tokens), device=self.device)

    def hidden(self, tokens: int | None = None) -> torch.Tensor:
        """Return hidden states, (batch, tokens, width)."""
        return torch.randn(self.batch, tokens or self.tokens, self.width, device=self.device)

    def padding(self) -> torch.Tensor | None:
        """Return which tokens are none, at either end, as 0 of (batch, tokens); None where all are."""
        if self.random.random() < 0.6:
            return None
        first = torch.tensor([self.random.randint(0, self.tokens // 2) for _ in range(self.batch)], device=self.device)
        mask = (torch.arange(self.tokens, device=self.device) >= first[:, None]).long()
        return mask if self.random.random() < 0.5 else mask.flip(-1)


Call = Callable[[nn.Module], Any]
Builder = Callable[[Draw], tuple[nn.Module, Call]]


# -- of torch ----------------------------------------------------------------------------------------------------------


def multihead(draw: Draw) -> tuple[nn.Module, Call]:
    module = nn.MultiheadAttention(draw.width, draw.heads, batch_first=True)
    x, context = draw.hidden(), draw.hidden(draw.random.randint(3, 70))
    own = x if draw.random.random() < 0.5 else context
    return module, lambda model: model(x.to(of(model)), own.to(of(model)), own.to(of(model)), need_weights=False)[0]


def encoder(draw: Draw) -> tuple[nn.Module, Call]:
    layer = nn.TransformerEncoderLayer(draw.width, draw.heads, 2 * draw.width, dropout=0.0, batch_first=True)
    x = draw.hidden()
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda model: model(x.to(of(model)))


def transformer(draw: Draw) -> tuple[nn.Module, Call]:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 64}
    module = nn.Transformer(draw.width, draw.heads, **sizes, dropout=0.0, batch_first=True)
    x, y = draw.hidden(), draw.hidden(draw.random.randint(3, 50))
    return module, lambda model: model(x.to(of(model)), y.to(of(model)))


class Layers(nn.Module):
    """Blocks with grouped heads, through SDPA: causal, windowed or with a bias."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.kind, dim = draw.random.choice(("full", "causal", "window", "bias")), draw.width // draw.heads
        self.heads, self.kv_heads = draw.heads, draw.kv_heads
        widths = (draw.width, draw.kv_heads * dim, draw.kv_heads * dim)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(draw.width, w) for w in (*widths, draw.width)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(draw.width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, (batch, tokens, width), after two blocks."""
        at = torch.arange(x.shape[1], device=x.device)
        ahead = at[:, None] - at
        mask: torch.Tensor | None = None
        if self.kind == "window":
            mask = (ahead >= 0) & (ahead < 8)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            q_of, k_of, v_of, out = block
            y = norm(x)
            q, k, v = (
                p(y).unflatten(-1, (n, -1)).transpose(1, 2)
                for p, n in zip((q_of, k_of, v_of), (self.heads, self.kv_heads, self.kv_heads), strict=True)
            )
            if self.kind == "bias":
                mask = (-ahead.abs() / 16).to(q.dtype)[None, None]
            x = x + out(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.kind == "causal", enable_gqa=True)
                .transpose(1, 2)
                .flatten(2)
            )
        return x


def layers(draw: Draw) -> tuple[nn.Module, Call]:
    x = draw.hidden()
    return Layers(draw), lambda model: model(x.to(of(model)))


def of_suite(name: str) -> Builder:
    def build(draw: Draw) -> tuple[nn.Module, Call]:
        dtype = torch.float32 if draw.has_autocast else getattr(torch, draw.dtype)
        state = torch.get_rng_state()
        model, step = torch_model(name, draw.device, dtype)
        torch.set_rng_state(state)  # which it has set to that of its own seed
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        return model, lambda model: step()

    return build


def of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


# -- of transformers ---------------------------------------------------------------------------------------------------

#: names of configurations by what their models take, and of models of timm
_NAMES = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text gpt_oss mimo_v2_flash phi phi3 mixtral olmo2 cohere "
    "starcoder2 stablelm gpt2 gpt_neox gptj opt bloom falcon bert roberta distilbert electra albert mpnet deberta "
    "xlm-roberta modernbert nystromformer camembert ernie esm glm granite nemotron smollm3 seed_oss qwen3_moe olmoe "
    "ministral arcee helium gpt-sw3 afmoe apertus apertus1p5_text aria_text bailing_hybrid beam bert-generation "
    "bigbird_pegasus biogpt bitnet clip_text_model codegen cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v2 "
    "doge dory dots3_note_text dpr embedding_gemma2_text ernie4_5 ernie4_5_moe eurobert exaone exaone4 exaone_moe "
    "flex_olmo flint gemma4_unified_text glm4 glm4_moe glm5_next_text glm_moe_dsa gpt_bigcode "
    "granite_docling_text granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte hrm_text "
    "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text "
    "internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 lara_mini layoutlm lfm2 lfm2_moe lfm3 "
    "llama4_text markuplm mellum minimax_m2 modernbert-decoder",
    "t5 mt5 bart mbart m2m_100 pegasus blenderbot marian plbart nllb-moe led",
    "vit deit dinov2 siglip_vision_model clip_vision_model beit ijepa vit_mae dinov3_vit",
    "whisper speech_to_text wav2vec2 hubert",
    "vit_tiny_patch16_224 deit_tiny_patch16_224 beit_base_patch16_224 vit_base_patch16_siglip_224 eva02_tiny_patch14_224",
)
TEXT, SEQ2SEQ, VISION, SOUND, TIMM = (names.split() for names in _NAMES)
_SIZES: tuple[tuple[str, Callable[[Draw], int]], ...] = (
    ("vocab_size", lambda draw: 128),
    ("hidden_size d_model n_embd dim embedding_size word_embed_proj_dim", lambda draw: draw.width),
    ("intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim n_inner", lambda draw: 64),
    ("moe_intermediate_size", lambda draw: 64),
    ("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers", lambda draw: 2),
    ("num_attention_heads num_heads n_head n_heads encoder_attention_heads", lambda draw: draw.heads),
    ("decoder_attention_heads swa_num_attention_heads", lambda draw: draw.heads),
    ("num_key_value_heads swa_num_key_value_heads", lambda draw: draw.kv_heads),
    ("head_dim d_kv swa_head_dim rotary_dim", lambda draw: draw.width // draw.heads),
    ("v_head_dim swa_v_head_dim", lambda draw: draw.width // draw.heads // 2),
    ("num_local_experts n_routed_experts num_experts", lambda draw: 4),
    ("num_experts_per_tok", lambda draw: 2),
    ("sliding_window local_attention", lambda draw: 16),
    ("image_size", lambda draw: 16 * draw.random.randint(2, 8)),
    ("max_source_positions", lambda draw: 100),
    ("patch_size num_mel_bins num_conv_pos_embeddings num_conv_pos_embedding_groups", lambda draw: 16),
    ("input_feat_per_channel", lambda draw: 16),
)
SMALL = {name: make for names, make in _SIZES for name in names.split()}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")


def configured(name: str, draw: Draw) -> Any:
    """Return a small configuration; attributes that it has not are left out."""
    mapping = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = mapping[name]
    has = set(dir(kind())) | set(getattr(kind, "attribute_map", {}))
    given = {key: make(draw) for key, make in SMALL.items() if key in has and not (key == "head_dim" and name == "falcon")}
    given |= {key: 1 for key in TOKENS if key in has}
    if "word_embed_proj_dim" in has or name == "electra":
        given["embedding_size"] = draw.width
    if name in ("gemma2", "gemma3_text"):
        given["query_pre_attn_scalar"] = 16
    if name == "gemma2":
        given["attn_logit_softcapping"] = 20.0
    if "layer_types" in has and name != "modernbert":
        given["layer_types"] = [
            "sliding_attention" if "sliding_window" in has and "qwen" not in name else "full_attention",
            "full_attention",
        ]
    return kind(**given)


def of_transformers(name: str) -> Builder:
    def build(draw: Draw) -> tuple[nn.Module, Call]:
        import_module("transformers").logging.set_verbosity_error()
        auto = import_module("transformers").AutoModel
        config = configured(name, draw)
        for part in ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"):
            if hasattr(config, part):
                setattr(config, part, 0.0)
        try:  # SDPA has no soft-cap, which some releases leave out without a word
            model = auto.from_config(config, attn_implementation="eager" if name == "gemma2" else draw.implementation)
        except ValueError:  # it has no other than eager code
            model = auto.from_config(config, attn_implementation="eager")
        return model.eval(), inputs_of(name, config, draw)

    return build


def inputs_of(name: str, config: Any, draw: Draw) -> Call:
    given: dict[str, Any] = {}
    if name in VISION:
        given["pixel_values"] = torch.randn(draw.batch, 3, config.image_size, config.image_size, device=draw.device)
    elif name in ("whisper", "speech_to_text"):
        shape = (16, 200) if name == "whisper" else (120, 16)
        given["input_features"] = torch.randn(draw.batch, *shape, device=draw.device)
        given["decoder_input_ids"] = draw.ids(128)
    elif name in SOUND:
        given["input_values"] = torch.randn(draw.batch, 320 * draw.tokens + 400, device=draw.device)
    else:
        given["input_ids"] = draw.ids(128)
        if (mask := draw.padding()) is not None:
            given["attention_mask"] = mask
        if name in SEQ2SEQ:
            given["decoder_input_ids"] = draw.ids(128)
    more = {} if name in VISION or name in SOUND[2:] else {"use_cache": False}

    def call(model: nn.Module) -> Any:
        typed = {key: t.to(of(model)) if t.is_floating_point() else t for key, t in given.items()}
        try:
            return model(**typed, **more)[0]
        except TypeError:
            return model(**typed)[0]

    return call


# -- of timm -----------------------------------------------------------------------------------------------------------


def of_timm(name: str) -> Builder:
    def build(draw: Draw) -> tuple[nn.Module, Call]:
        side = 16 * draw.random.randint(2, 8)
        options = {"depth": 2, "num_classes": 10, "img_size": side, "embed_dim": draw.width, "num_heads": draw.heads}
        model = import_module("timm").create_model(name, **options)
        images = torch.randn(draw.batch, 3, side, side, device=draw.device)
        return model.eval(), lambda model: model(images.to(of(model)))

    return build


def families() -> dict[str, Builder]:
    """Return what can be built here, by name."""
    found: dict[str, Builder] = {"mha": multihead, "encoder": encoder, "transformer": transformer, "layers": layers}
    found |= {f"suite-{name}": of_suite(name) for name in ("vit", "llama", "mistral", "softcap", "neighborhood")}
    if find_spec("transformers"):
        found |= {name: of_transformers(name) for name in (*TEXT, *SEQ2SEQ, *VISION, *SOUND)}
    if find_spec("timm"):
        found |= {name: of_timm(name) for name in TIMM}
    return found


# -- runs --------------------------------------------------------------------------------------------------------------


LEVELS = ("element", "row", "head", "slope")


class Judged(NamedTuple):
    """One model. alarms: a line of each. raised: calls with limits of emulated kernels. shares: of each limit, and where."""

    family: str
    calls: int = 0
    alarms: tuple[str, ...] = ()
    raised: int = 0
    shares: dict[str, tuple[float, str]] = {}  # noqa: RUF012
    trouble: str = ""


def judged(job: tuple[str, int, str]) -> Judged:
    """Build a model from its seed, and judge its calls."""
    family, seed, device_name = job
    device = torch.device(device_name)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(seed)
    draw = Draw(seed * 1000003 + sum(map(ord, family)), device)
    try:
        with quiet(), current(device):
            model, call = families()[family](draw)
            if draw.is_sharp:
                sharpen(model)
            dtype = torch.float32 if draw.has_autocast else getattr(torch, draw.dtype)
            model = model.to(device, dtype)
            of_autocast = torch.bfloat16 if draw.dtype == "float32" else getattr(torch, draw.dtype)
            weights = torch.Generator().manual_seed(seed)

            def step() -> torch.Tensor:
                with torch.autocast(device.type, of_autocast) if draw.has_autocast else nullcontext():
                    out = call(model)
                weights.manual_seed(seed)
                return (out.float() * torch.randn(out.shape, generator=weights).to(device)).sum()

            backward = any(parameter.requires_grad for parameter in model.parameters())
            found = judge_model(model, step, backward=backward, scatter=0)
    except Exception as error:  # a model that cannot be built here, or takes no such inputs, is none of our business
        text = str(error).splitlines()
        return Judged(family, trouble=f"{type(error).__name__}: {text[0] if text else ''}"[:150])
    autocast = " autocast" if draw.has_autocast else ""
    how = f"seed {seed}, {draw.dtype}{autocast}, {draw.implementation}"
    alarms: list[str] = []
    shares: dict[str, tuple[float, str]] = {}
    raised = 0
    for one in found.calls:
        if one.misled or one.comparison is None:
            alarms.append(f"{family}, {how}, {one.label}: {one.misled or one.fault}")
        if one.comparison is None:
            continue
        rows = one.comparison.tensors
        raised += any(row.limits.row > 4 or row.limits.element > 8 or row.limits.head not in (1.5, 4.0) for row in rows)
        for row in rows:
            for level in LEVELS:
                z, limit = getattr(row, f"z_{level}"), getattr(row.limits, level)
                text = f"{row.name} {level} {z:.2f} of {limit:.3g}, {how}, {one.label}, {one.workload.id}"
                shares[level] = max(shares.get(level, (0.0, "")), (z / limit, text))
            if not row.passed and not one.known:
                zs = f"{row.z_element:.2f} {row.z_row:.2f} {row.z_head:.2f}, {row.wrong_positions} NaN or infinite"
                alarms.append(f"{family}: {row.name} {zs}, {how}, {one.label}, {one.workload.id}")
    return Judged(family, len(found.calls), tuple(alarms), raised, shares)


def sharpen(model: nn.Module) -> None:
    """Enlarge the projections of q and k, so that attention is not almost uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                parameter *= 6


def jobs(names: list[str], seed: int, device: str) -> Iterator[tuple[str, int, str]]:
    """Yield one model after the other: of each family once, then once more, without an end."""
    for number in itertools.count(seed):
        for name in names:
            yield name, number, device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(families())}; default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--calls", type=int, default=20_000, help="how many to judge at least")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no model is begun")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first model of each family")
    args = parser.parse_args()
    if unknown := set(args.families) - set(families()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    device, end = resolve_device(args.device), time.monotonic() + args.seconds
    print(f"{machine_of(device).name}, torch {torch.__version__}", flush=True)
    calls, alarms, raised, failed = (Counter[str]() for _ in range(4))
    troubles: dict[str, str] = {}
    largest: dict[str, dict[str, tuple[float, str]]] = {}

    def wanted() -> Iterator[tuple[str, int, str]]:
        for job in jobs(args.families or list(families()), args.seed, str(device)):
            if calls.total() >= args.calls or time.monotonic() > end:
                return
            if failed[job[0]] < TRIES or calls[job[0]]:
                yield job

    for found in results(wanted, args.processes, end + GRACE):
        if found.trouble:
            troubles[found.family] = found.trouble
            failed[found.family] += 1
        calls[found.family] += found.calls
        raised[found.family] += found.raised
        alarms[found.family] += len(found.alarms)
        print(*(f"ALARM {words}\n" for words in found.alarms), sep="", end="", flush=True)
        so_far = largest.setdefault(found.family, {})
        for level, share in found.shares.items():
            so_far[level] = max(so_far.get(level, (0.0, "")), share)
    for family in sorted(calls, key=lambda name: max(largest[name].values(), default=(0.0, "")), reverse=True):
        shares, at = largest[family], max(largest[family].values(), default=(0.0, troubles.get(family, "no calls")))
        levels = " ".join(f"{level} {shares[level][0]:.2f}" for level in LEVELS if level in shares)
        print(f"{family:28} {calls[family]:5} calls {alarms[family]:2} alarms {raised[family]:3} raised; {levels} ({at[1]})")
    print(f"alarms: {alarms.total()} in {calls.total():,} calls")
    return int(alarms.total() > max(1, ACCEPTED * calls.total()))


def results(wanted: Callable[[], Iterator[tuple[str, int, str]]], processes: int, end: float) -> Iterator[Judged]:
    """Yield what is found, a few models per process ahead; what is under way at `end` is given up."""
    if processes <= 1:
        yield from map(judged, wanted())
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting: list[Any] = []
        source = wanted()
        while time.monotonic() < end:
            waiting += (pool.apply_async(judged, (job,)) for job in itertools.islice(source, 2 * processes - len(waiting)))
            if not waiting:
                return
            ready = [one for one in waiting if one.ready()]
            waiting = [one for one in waiting if one not in ready]
            yield from (one.get() for one in ready)
            if not ready:
                waiting[0].wait(0.05)


if __name__ == "__main__":
    sys.exit(main())
