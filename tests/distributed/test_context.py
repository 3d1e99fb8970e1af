"""The context of a split call, on a process group of one rank: what it holds, and the error of
every bad argument of its builder, of a bad context and of a bad call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import FP64
from shard_cases import leaves, like_fla
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, explain
from gdn_triton._ranks.context import shard_layout
from gdn_triton.distributed import build_cp_context, conv_halo


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def small_call(T: int = 20) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, T, 1, 8, dtype=FP64)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, T, 1), "beta": torch.rand(1, T, 1)}


def test_context_of_one_rank(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 5, 5, 20]), group, conv1d_kernel_size=4)
    assert context.cu_seqlens.tolist() == [0, 5, 5, 20] and context.num_seqs == 3
    assert context.cu_seqlens.dtype == torch.int32
    assert context.is_first_rank and context.is_last_rank and context.is_cp_enabled
    assert context.pre_num_ranks == context.post_num_ranks == context.pre_num_conv_tokens == 0
    assert context.spans == ((0, 20),) and not context.crosses
    assert conv_halo(torch.randn(1, 20, 3), context).shape == (3, 3, 3)
    x = small_call()
    whole = chunk_gated_delta_rule(**x, cu_seqlens=context.cu_seqlens, output_final_state=True)
    for either in (context, like_fla(context)):
        # The context's offsets are used, whatever else is given.
        offsets = torch.tensor([0, 20])
        found = chunk_gated_delta_rule(
            **x, cu_seqlens=offsets, cp_context=either, output_final_state=True
        )
        assert all(map(torch.equal, found, whole))
        assert explain(**x, cp_context=either).chosen == "reference"
    assert chunk_gated_delta_rule(**x, cp_context=context)[1] is None
    assert "NVIDIA GPUs" in explain(**x, cp_context=context).reasons["cuda"]


def test_zigzag_has_no_single_interval(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group, layout="zigzag")
    assert context.lengths == (10, 10) and context.cu_seqlens.tolist() == [0, 10, 20]
    with pytest.raises(AttributeError, match="two slots"):
        _ = context.pre_num_ranks


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": [0, 4]}),
        (
            ValueError,
            r"cu_seqlens must have shape \[N \+ 1\]",
            {"cu_seqlens": torch.zeros(1, 2).int()},
        ),
        (ValueError, "cu_seqlens must be int32 or int64", {"cu_seqlens": torch.tensor([0.0, 4.0])}),
        (ValueError, "cu_seqlens must start at 0", {"cu_seqlens": torch.tensor([1, 4])}),
        (ValueError, "cu_seqlens must not decrease", {"cu_seqlens": torch.tensor([0, 4, 2])}),
        (ValueError, r"cu_seqlens must end at or before T=3", {"lengths": [3]}),
        (ValueError, "cu_seqlens_cpu must have the shape", {"cu_seqlens_cpu": torch.tensor([0])}),
        (
            ValueError,
            "cu_seqlens_cpu must equal cu_seqlens, which has 4 at index 1, got 3",
            {"cu_seqlens_cpu": torch.tensor([0, 3])},
        ),
        (ValueError, "conv1d_kernel_size must be an int >= 1 or", {"conv1d_kernel_size": 0}),
        (ValueError, "conv1d_kernel_size must be an int >= 1 or", {"conv1d_kernel_size": 4.0}),
        (ValueError, "lengths must be 1 ints >= 0", {"lengths": [2, 2]}),
        (ValueError, "lengths must be 1 ints >= 0", {"lengths": [-4]}),
        (TypeError, r"lengths must be a sequence of ints, .* got 5 \(int\)", {"lengths": 5}),
        (ValueError, "cu_seqlens must be a strided", {"cu_seqlens": torch.arange(2).to_sparse()}),
        (ValueError, "layout must be one of", {"layout": "ring"}),
        (ValueError, "group must be a torch.distributed.ProcessGroup, got None", {"group": None}),
        (TypeError, "group must be a torch.distributed.ProcessGroup, got str", {"group": "cp"}),
    ],
)
def test_bad_arguments_of_the_builder(
    group: Any, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    arguments = {"cu_seqlens": torch.tensor([0, 4]), "group": group} | changes
    with pytest.raises(error, match=message):
        build_cp_context(**arguments)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "cp_context.group must be a torch.distributed.ProcessGroup", {"group": None}),
        (ValueError, r"cp_context.cu_seqlens must be a tensor \[N \+ 1\]", {"cu_seqlens": None}),
        (ValueError, "cp_context.layout must be one of", {"layout": "ring"}),
        (ValueError, "cp_context.pre_num_ranks must be an int from 0 to 0", {"pre_num_ranks": 1}),
        (ValueError, "cp_context.post_num_ranks must be an int", {"post_num_ranks": None}),
        (
            ValueError,
            "cp_context.front_num_seqs must be an int",
            {"layout": "zigzag", "front_num_seqs": 1},
        ),
        (
            NotImplementedError,
            "cp_context.pre_num_ranks_dev",
            {"pre_num_ranks_dev": torch.zeros(1)},
        ),
    ],
)
def test_bad_contexts(
    group: Any, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    context = like_fla(build_cp_context(torch.tensor([0, 20]), group))
    vars(context).update(changes)
    with pytest.raises(error, match=message):
        shard_layout(context)
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(**small_call(), cp_context=context)


def test_bad_calls(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    with pytest.raises(TypeError, match="str has no group"):
        chunk_gated_delta_rule(**small_call(), cp_context="ring")
    with pytest.raises(ValueError, match=r"q must have the T=20 tokens of this rank's part"):
        chunk_gated_delta_rule(**small_call(19), cp_context=context)
    with pytest.raises(ValueError, match=r"initial_state must have shape \[N=1"):
        chunk_gated_delta_rule(
            **small_call(), cp_context=context, initial_state=torch.zeros(2, 1, 8, 8)
        )
    for wrong, message in ((torch.zeros(1, 19, 3), "T=20"), (torch.zeros(20, 3), "shape")):
        with pytest.raises(ValueError, match=message):
            conv_halo(wrong, context, 4)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        conv_halo(None, context, 4)  # type: ignore[arg-type]
    for kernel_size in (None, 0, 4.0):
        with pytest.raises(ValueError, match="kernel_size must be an int >= 1"):
            conv_halo(torch.zeros(1, 20, 3), context, kernel_size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must have all 20 tokens in dimension 0"):
        context.shard(torch.zeros(3, 20), 0)
    with pytest.raises(ValueError, match=r"x must have all 20 tokens in dimension 1, got shape \["):
        context.shard(torch.zeros(20))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        context.shard([0] * 20)  # type: ignore[arg-type]


def test_cuda_by_name_refuses(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    context = build_cp_context(torch.tensor([0, 20]), group)
    with pytest.raises(RuntimeError, match="runs on NVIDIA GPUs"):
        chunk_gated_delta_rule(**small_call(), cp_context=context)


def test_differentiable_once(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = leaves(small_call())
    o, _ = chunk_gated_delta_rule(**x, cp_context=context)
    (dv,) = torch.autograd.grad(o.square().sum(), x["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="cp_context has no second derivative"):
        dv.sum().backward()


def test_final_state_of_q_alone_has_no_gradient(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = small_call()
    x["q"].requires_grad_()
    o, ht = chunk_gated_delta_rule(**x, cp_context=context, output_final_state=True)
    assert o.requires_grad and not ht.requires_grad


def test_compiled_with_a_break(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = small_call()

    def call(v: Tensor) -> Tensor:
        return chunk_gated_delta_rule(**x | {"v": v * 2}, cp_context=context)[0] + 1

    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="eager")(x["v"]), call(x["v"]))
    torch.compiler.reset()
    with pytest.raises(Exception, match="talks to other ranks"):
        torch.compile(call, backend="eager", fullgraph=True)(x["v"])
    torch.compiler.reset()
