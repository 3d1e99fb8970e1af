"""Gates that a model's parameters may reach, and calls with them, against float64.

Every value head has a separate `A_log` and is judged separately. A head whose gates forget much has
gradients of gates that are orders of magnitude smaller than those of other heads, whose error would
hide its own.
"""

import math
from dataclasses import dataclass

import torch
from helpers import FP16, FP32, FP64, Case
from narrow import Arithmetic
from torch import Tensor

import gdn_triton
from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

UNIT, TINY = 2.0**-24, torch.finfo(torch.float32).tiny
# A gate's own relative error on a GPU: test_softplus_far_out of tests/chunk/test_kernels.py has the
# sum of its parts.
GATE_UNIT = 2.0**-17
# A gradient is a sum of terms that cancel, each of which is rounded.
TERMS = 8


def exact_gate(x: Tensor, A_log: Tensor) -> Tensor:
    """-exp(A_log) softplus(x) in float64, which neither factor leaves for |A_log| and |x| of up to
    700. x: [.., HV], with its bias."""
    x, A_log = x.to(FP64), A_log.to(FP64)
    return -A_log.exp() * torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(x.exp()))


@dataclass(frozen=True)
class Gates:
    """raw: [T, HV], before the bias. A_log, dt_bias: [HV]."""

    raw: Tensor
    A_log: Tensor
    dt_bias: Tensor


def strong_gates(T: int = 124) -> Gates:
    """From a model's mildest heads to decays of e^-20 a token."""
    A_log = torch.tensor([-1.0, 2.0, 2.4, 2.8])
    return Gates(0.3 * torch.randn(T, 4), A_log, torch.ones(4))


# Raw gates around the places where e^x or softplus(x) changes its form, leaves the normal numbers
# of float32 (-87.3), or becomes 0 (-104). The last ones forget everything or nothing.
POINTS = (*(-0.5, -20.0, -39.9, -40.1, -86.9, -88.1, -95.3, -99.0, -102.0, -103.5), -1.0, -200.0)


def far_gates(T: int = 40) -> Gates:
    """exp(A_log) up to the largest number of float32 and beyond, and softplus down to 0: their
    product is of any size. In each head some tokens decay by about a half."""
    A_log = torch.tensor([-90.0, 3.0, 40.0, 86.0, 88.5, 89.0, 100.0])
    raw = torch.tensor(POINTS).repeat(math.ceil(T / len(POINTS)))[:T, None].repeat(1, len(A_log))
    raw[::3] = -A_log + torch.tensor([0.3, -0.4, 0.1]).repeat(T)[: len(raw[::3]), None]
    return Gates(raw.clamp(max=30.0), A_log, torch.full_like(A_log, 0.125))


def relative_error(gates: Gates, on: str) -> Tensor:
    """[T, HV]: of g where it is finite. An exponent of the size s is rounded to s 2^-24, which is
    the relative error of the exponential."""
    x = gates.raw + gates.dt_bias
    rounded = 2 * UNIT * (gates.A_log.abs() + x.abs() + 8)
    return rounded + (0 if on == "cpu" else GATE_UNIT)


def check_values(g: Tensor, gates: Gates, on: str) -> None:
    """g: [T, HV] of a backend, natural log."""
    g, exact = g.cpu().to(FP64), exact_gate(gates.raw + gates.dt_bias, gates.A_log)
    # Where exp(A_log) alone is too large the result is -inf, for decays that are 0 by far.
    closed = g.isinf() & (exact < LOG2_DECAY_FLOOR[FP32] / RCP_LN2)
    error = (g - exact).abs() / exact.abs()
    allowed = relative_error(gates, on)
    tiny = exact.abs() < TINY
    assert not g.isnan().any()
    assert (g[tiny].abs() <= TINY).all()
    judged = ~closed & ~tiny
    assert judged.any(0).all() and (error <= allowed)[judged].all(), (error / allowed)[judged].max()


@dataclass
class Found:
    """The results of one call, and its gradients for fixed incoming ones. g: of the raw gates."""

    o: Tensor
    final_state: Tensor
    g: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


class GateCall:
    """A call of the rule with these gates in the kernel, B = 1, and an `A_log` for each value
    head."""

    def __init__(self, gates: Gates, dtype: torch.dtype, device: str) -> None:
        T, HV = gates.raw.shape
        self.case = Case("gates", "", T=T, H=HV, HV=HV, K=32, V=32, chunk_size=64)
        self.gates, self.dtype, self.device = gates, dtype, device
        q, k = torch.randn(2, 1, T, HV, 32)
        k = torch.nn.functional.normalize(k, dim=-1)
        v, beta = torch.randn(1, T, HV, 32), torch.rand(1, T, HV)
        given = {"q": q, "k": k, "v": v, "g": gates.raw[None], "beta": beta}
        given |= {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
        given["initial_state"] = torch.randn(1, HV, 32, 32)
        narrow = ("q", "k", "v")
        self.given = {n: x.to(device, dtype if n in narrow else FP32) for n, x in given.items()}
        self.do = torch.randn(1, T, HV, 32).to(device, dtype)
        self.dht = torch.randn(1, HV, 32, 32).to(device)

    def _results(
        self, leaves: dict[str, Tensor], o: Tensor, final_state: Tensor, gradients: bool
    ) -> Found:
        found = Found(o, final_state)
        if gradients:
            above = [self.do.to(o.dtype), self.dht.to(final_state.dtype)]
            inputs = [leaves[name] for name in ("g", "A_log", "dt_bias")]
            found.g, found.A_log, found.dt_bias = torch.autograd.grad(
                [o, final_state], inputs, above
            )
        return found

    def by_op(self, *, recurrent: bool = False, gradients: bool = True) -> Found:
        leaves = {n: x.clone().requires_grad_(gradients) for n, x in self.given.items()}
        options = {"output_final_state": True, "use_gate_in_kernel": True}
        op = gdn_triton.chunk_gated_delta_rule
        if recurrent:
            op = gdn_triton.fused_recurrent_gated_delta_rule
        return self._results(leaves, *op(**leaves, **options), gradients)

    def exact(self) -> Found:
        """The recurrence in float64, whose gates come from their formula."""
        leaves = {n: x.to(FP64).requires_grad_() for n, x in self.given.items()}
        given = dict(leaves)
        A_log, dt_bias = given.pop("A_log"), given.pop("dt_bias")
        given["g"] = exact_gate(given["g"] + dt_bias, A_log)
        return self._results(leaves, *reference.recurrent_gated_delta_rule(**given), True)

    def allowed(self) -> Tensor:
        """[HV]: relative error of a head's results and gradients. A decay is 2 to a difference of
        sums of gates, each of which is rounded to float32; and each gate has its own error."""
        gates = self.gates
        g = exact_gate(gates.raw + gates.dt_bias, gates.A_log)
        log2 = (g * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32])
        chunks = torch.nn.functional.pad(log2, (0, 0, 0, -len(log2) % 64)).unflatten(0, (-1, 64))
        sums = chunks.sum(1).abs().amax(0)
        own = (relative_error(gates, self.device) * (log2 / RCP_LN2).abs()).amax(0)
        unit = Arithmetic(self.dtype, self.device).unit
        return 2 * UNIT * math.log(2) * sums + own + TERMS * unit

    def check(self, found: Found, *, gradients: bool = True) -> None:
        right, allowed = self.exact(), self.allowed()

        def judge(name: str, got: Tensor, expected: Tensor, size: Tensor) -> None:
            """size: [HV], what the error of each head is compared with."""
            got, expected, size = got.cpu().to(FP64), expected.cpu(), size.cpu()
            assert got.isfinite().all(), name
            error = (got - expected).flatten(0, -2).norm(dim=0)
            # Products that are stored in float16 lose what is below its smallest number; others
            # may lose what is below the normal numbers of float32.
            least = 2.0**-24 if self.dtype == FP16 else TINY
            limit = allowed * size + least * len(self.gates.raw)
            assert (error <= limit).all(), f"{name}: {error / size}, allowed {allowed}"

        def by_head(x: Tensor, at: int) -> Tensor:
            return x.detach().movedim(at, -1).flatten(0, -2)

        for name, at in (("o", 2), ("final_state", 1)):
            got, expected = by_head(getattr(found, name), at), by_head(getattr(right, name), at)
            judge(name, got, expected, expected.norm(dim=0))
        if not gradients:
            return
        assert found.g is not None and found.A_log is not None and found.dt_bias is not None
        assert right.g is not None and right.A_log is not None and right.dt_bias is not None
        judge("dg", found.g[0], right.g[0], right.g[0].norm(dim=0))
        # dA_log and ddt_bias are sums over tokens, whose terms cancel.
        gates = self.gates
        z = (gates.raw + gates.dt_bias).to(FP64)
        ratio = exact_gate(z, 0 * gates.A_log) / -z.sigmoid()  # g over its derivative
        terms = right.g[0].cpu()
        judge("dA_log", found.A_log[None], right.A_log[None], (ratio * terms).abs().sum(0))
        judge("ddt_bias", found.dt_bias[None], right.dt_bias[None], terms.abs().sum(0))
