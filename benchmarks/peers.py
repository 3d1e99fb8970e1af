"""One adapter for each implementation: the cases that it serves, its call, and its results.

`prepare` does all that a caller would do once and in advance (another layout, another form of the
gate), so the returned function is only the implementation's own call.
"""

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.shapes import CHUNK, Case, Inputs

Call = partial[Any]


@contextlib.contextmanager
def backend_chosen(name: str | None) -> Iterator[None]:
    """Sets `GDN_BACKEND` to a backend of this package, or leaves it where there is no name."""
    before = os.environ.get("GDN_BACKEND")
    if name is not None:
        os.environ["GDN_BACKEND"] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop("GDN_BACKEND")
            if before is not None:
                os.environ["GDN_BACKEND"] = before


class Peer:
    """An implementation. Its construction imports its package, and raises the reason if that is
    missing."""

    name: str
    distribution: str
    module: str
    backend: str | None = None  # of this package, asked for by name

    def __init__(self) -> None:
        self.package: Any = importlib.import_module(self.module)

    @classmethod
    def version(cls) -> str:
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            root = importlib.import_module(cls.module.partition(".")[0])
            return str(getattr(root, "__version__", "unknown"))

    def chosen(self) -> contextlib.AbstractContextManager[None]:
        """Around every call: sets `GDN_BACKEND` where the implementation is one backend of ours."""
        return backend_chosen(self.backend)

    def supports(self, case: Case) -> str | None:
        """Why this case cannot be run, or None."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        """The call to measure. `capture`: it will run inside a CUDA graph, without a host sync."""
        return partial(
            self.package.chunk_gated_delta_rule,
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta,
            initial_state=inputs.initial_state,
            output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip

    def unify(self, inputs: Inputs, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the call as o [B, T, HV, V] and final state [N, HV, K, V]."""
        return result[0], result[1]


def _needs_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device"


def _needs_128(case: Case) -> str | None:
    if (case.K, case.V) != (128, 128):
        return f"serves K = V = 128 only, not K {case.K}, V {case.V}"
    return _needs_16_bits(case)


def _needs_16_bits(case: Case) -> str | None:
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16 only, not {case.dtype}"
    return None


def _needs_capability(*majors: int) -> str | None:
    major, minor = torch.cuda.get_device_capability()
    if major not in majors:
        return f"serves compute capability {'.x, '.join(map(str, majors))}.x, not {major}.{minor}"
    return None


class Ours(Peer):
    """This package. It gets the lengths of packed sequences on the host, as every peer gets them in
    `prepare`."""

    name, distribution, module = "gdn_triton", "gdn-triton", "gdn_triton"

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        call = super().prepare(inputs, capture)
        if inputs.cu_seqlens is None:
            return call
        return partial(call, cu_seqlens_cpu=inputs.cu_seqlens.cpu())

    def supports(self, case: Case) -> str | None:
        return None

    def served_by(self, inputs: Inputs) -> str:
        """The backend that serves these inputs: a quiet fallback would make the row worthless."""
        call = self.prepare(inputs)
        return str(self.package.explain(*call.args, **call.keywords).chosen)


class OursTriton(Ours):
    """Our portable kernels, where a case would otherwise go to the CUDA library."""

    name, backend = "gdn_triton Triton", "triton"

    def __init__(self) -> None:
        super().__init__()
        missing = importlib.import_module("gdn_triton.fast").why_unavailable()
        if missing is not None:
            raise RuntimeError(f"the same as gdn_triton here, without the CUDA library. {missing}")


class OursCuda(Ours):
    name, backend = "gdn_triton CUDA", "cuda"

    def __init__(self) -> None:
        super().__init__()
        missing = importlib.import_module("gdn_triton.fast").why_unavailable()
        if missing is not None:
            raise RuntimeError(missing)

    def supports(self, case: Case) -> str | None:
        if case.K > 256 or case.K % 8 or case.V % 8:
            return f"serves multiples of 8, K up to 256, not K {case.K}, V {case.V}"
        return _needs_cuda() or _needs_16_bits(case) or _needs_capability(9)


class OursUntold(Ours):
    """This package without the lengths on the host, which then plans for assumed lengths."""

    name = "gdn_triton untold"

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        return partial(super().prepare(inputs, capture), cu_seqlens_cpu=None)


class Reference(Peer):
    """Our specification: a baseline where no other package is installed."""

    name, distribution, module = "reference", "gdn-triton", "gdn_triton.reference"

    def supports(self, case: Case) -> str | None:
        return None

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        return partial(
            self.package.chunk_gated_delta_rule,
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta,
            initial_state=inputs.initial_state,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip


class FLA(Peer):
    """flash-linear-attention's Triton kernels."""

    name, distribution, module = "FLA", "fla-core", "fla.ops.gated_delta_rule"

    def __init__(self) -> None:
        # Read at import. Without it, FLA hands the call to FlashQLA or another package it finds.
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        super().__init__()

    def supports(self, case: Case) -> str | None:
        if case.K > 256:
            return f"serves K up to 256, not {case.K}"
        return _needs_cuda()

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        call = super().prepare(inputs, capture)
        if not capture or inputs.cu_seqlens is None:
            return call
        index = importlib.import_module("fla.ops.utils")
        # Built from cu_seqlens with a host sync, which a graph cannot hold.
        return partial(call, chunk_indices=index.prepare_chunk_indices(inputs.cu_seqlens, CHUNK))


class FlashQLA(Peer):
    """TileLang kernels; compiled with nvcc, 15 to 25 s for the first call of a new shape.

    Its packed metadata is read back to the host and kept by the identity of `cu_seqlens`: a call
    with the same tensor must come before a capture.
    """

    name, distribution, module = "FlashQLA", "flash-qla", "flash_qla"

    def supports(self, case: Case) -> str | None:
        return _needs_cuda() or _needs_128(case) or _needs_capability(9, 10, 12)


class FlashInfer(Peer):
    """CuTe DSL kernels. Packed only: padded inputs are viewed as sequences of equal length."""

    name, distribution, module = "FlashInfer", "flashinfer-python", "flashinfer.gdn_prefill"
    use_cp: str | bool = "auto"  # one sequence over several thread blocks: its choice, or forced

    def supports(self, case: Case) -> str | None:
        return _needs_cuda() or _needs_128(case) or _needs_capability(9, 10, 12)

    def prepare(self, inputs: Inputs, capture: bool = False) -> Call:
        case = inputs.case
        cu_seqlens = inputs.cu_seqlens
        if cu_seqlens is None:
            cu_seqlens = torch.arange(case.B + 1, device=inputs.q.device) * case.T
        state = inputs.initial_state
        return partial(
            self.package.chunk_gated_delta_rule,
            inputs.q.flatten(0, 1), inputs.k.flatten(0, 1), inputs.v.flatten(0, 1),
            g=inputs.g.flatten(0, 1).exp(),  # it takes the decay itself, not its logarithm
            beta=inputs.beta.flatten(0, 1),
            initial_state=None if state is None else state.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            use_cp=self.use_cp,
            max_seqlen=case.longest,
        )  # fmt: skip

    def unify(self, inputs: Inputs, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, final_state = result  # [B * T, HV, V], [N, HV, V, K]
        return o.view_as(inputs.v), final_state.transpose(-1, -2)


class FlashInferSplit(FlashInfer):
    name, use_cp = "FlashInfer split", True


class FlashInferWhole(FlashInfer):
    name, use_cp = "FlashInfer whole", False


PEERS: dict[str, type[Peer]] = {
    "triton": OursTriton,
    "cuda": OursCuda,
    "untold": OursUntold,
    "fla": FLA,
    "flashqla": FlashQLA,
    "flashinfer": FlashInfer,
    "flashinfer-split": FlashInferSplit,
    "flashinfer-whole": FlashInferWhole,
    "reference": Reference,
}
DEFAULT_PEERS = ("fla", "flashqla", "flashinfer", "triton")


def load(key: str) -> Peer | str:
    """The peer, or the reason why it is missing."""
    try:
        return PEERS[key]()
    except Exception as error:
        text = str(error).strip() or "no reason given"
        return f"{PEERS[key].name}: not measured: {type(error).__name__}: {text.splitlines()[0]}"
