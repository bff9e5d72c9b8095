"""A kind of mask that the package does not have, whole in a file of its own."""

from dataclasses import dataclass
from typing import ClassVar

from pytest_attn.workloads.masks import Causal, Mask, NearMiss


@dataclass(frozen=True)
class Dilated(Mask):
    """Query i stands at key p = i + kv_len - q_len and sees keys p, p - step, p - 2 step, ..."""

    step: int

    kinds = ("dilated",)
    capabilities = ("dilated",)
    words = "dilated causal mask"
    elsewhere: ClassVar = {"longnet": "Dilated(step)"}

    @property
    def label(self):
        return f"dilated{self.step}"

    def bind(self, over):
        kv_lens = over.kv_len if over.kv_lens is None else over.kv_lens
        q_lens = over.q_len if over.q_lens is None else over.q_lens

        def seen(b, _h, q, kv):
            keys, queries = (n if isinstance(n, int) else n[b] for n in (kv_lens, q_lens))
            back = q + keys - queries - kv
            return (back >= 0) & (back % self.step == 0)

        return seen

    @classmethod
    def draw(cls, kind, choices):
        return cls(choices.count(2, 4))

    def near_misses(self, over):
        longer = Dilated(self.step + 1)
        yield NearMiss("dilated-step-one-too-long", "whose steps are one key too long", longer)
        yield NearMiss("dilated-step-ignored", "whose steps are ignored", Causal(bottom_right=True))
