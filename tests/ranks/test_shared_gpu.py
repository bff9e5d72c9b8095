"""Who may share a GPU, and what is said where ranks may not."""

import pytest
import torch

from pytest_attn import Machine
from pytest_attn.ranks.shared_gpu import nccl_refuses_because
from pytest_attn.session.options import sharing
from pytest_attn.session.requirements import too_few_gpus_because

ONE = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")
CPU = Machine("cpu", "a CPU", None, "cpu", 64 << 30, 0, "2.13.0")


def test_without_the_option_each_rank_needs_a_gpu():
    assert too_few_gpus_because(2, ONE, "no") == "needs 2 GPUs, this machine has 1"
    assert (
        too_few_gpus_because(1, ONE, "no") == too_few_gpus_because(2, ONE, "gloo") == too_few_gpus_because(4, CPU, "no") == ""
    )


@pytest.mark.parametrize(("version", "says"), [((2, 28, 9), "NCCL 2.28.9 takes one rank for each GPU"), ((2, 30, 7), "")])
def test_nccl_is_asked_for_its_release(monkeypatch, version, says):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert nccl_refuses_because().startswith(says)
    assert bool(nccl_refuses_because()) == bool(says)


def test_another_word_is_told_what_it_may_be():
    assert [sharing(word) for word in ("no", "gloo", "nccl")] == ["no", "gloo", "nccl"]
    with pytest.raises(ValueError, match="must be no, gloo or nccl, got 'mpi'"):
        sharing("mpi")
