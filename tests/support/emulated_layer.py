"""Runs the kernel of a layer's step on a CPU in every form that a batch with value-first states can
have, and compares the bits of y and of both pools. One form is compared with the reference.

    PYTHONPATH=.:tests/support python -m emulated_layer

Needs g++ on x86_64. One of three sequences is padding. Exits with 1 and a list of what is wrong.
"""

import math
import sys
from unittest import mock

import torch
from emulator.gluon import emulated
from gluon_window import differences
from target_layers import options_of
from torch import Tensor

from gdn_triton.step import parts
from gdn_triton.step.problem import LayerCall, LayerOperands
from gdn_triton.step.triton import kernel
from gdn_triton.step.validation import validate_layer

H, HV, K, V, W = 1, 2, 128, 128, 4
D = 2 * H * K + HV * V


def make_call(dtype: torch.dtype) -> LayerCall:
    torch.manual_seed(0)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    N = len(slots)
    x = LayerOperands(
        mixed_qkv=torch.randn(N, D).bfloat16(),
        a=torch.randn(N, HV).bfloat16(),
        b=torch.randn(N, HV).bfloat16(),
        A_log=torch.randn(HV),
        dt_bias=torch.randn(HV),
        state=torch.randn(4, HV, V, K).to(dtype),
        read_slots=slots,
        conv_state=torch.randn(4, D, W - 1).bfloat16(),
        conv_weight=torch.randn(D, W).bfloat16(),
        conv_bias=torch.randn(D).bfloat16(),
        gate=torch.randn(N, HV, V).bfloat16(),
        norm_weight=torch.rand(V) + 0.5,
        counters=None,
        out=torch.full((N, HV, V), torch.nan).bfloat16(),
    )
    return LayerCall(x, options_of(v_first=True))


def results(call: LayerCall, y: Tensor) -> dict[str, Tensor]:
    x = call.inputs
    assert x.state is not None and x.conv_state is not None
    return {"y": y, "state": x.state, "conv_state": x.conv_state}


def run(dtype: torch.dtype, form: kernel.ValueFirstForm, seed: int) -> dict[str, Tensor]:
    """y and the pools. seed: of the order in which the warps run."""
    call = make_call(dtype)
    with (
        mock.patch.dict(kernel.VALUE_FIRST_FORMS, {(dtype.itemsize, False): (form,)}),
        mock.patch.object(kernel, "LEAST_TO_PREFETCH", 0),
        emulated({}, seed=seed),
    ):
        y = kernel.plan(validate_layer(call), call)(call)
    return results(call, y)


def main() -> int:
    failed = 0
    for dtype in (torch.float32, torch.bfloat16):
        # Programs of few heads prefetch no float32 tile.
        chosen = {
            (form.warps, form.prefetch and prefetch)
            for form in kernel.VALUE_FIRST_FORMS[dtype.itemsize, False]
            for prefetch in (True, dtype == torch.bfloat16)
        }
        forms = [
            kernel.ValueFirstForm(programs=math.inf, warps=warps, prefetch=prefetch)
            for warps, prefetch in sorted(chosen)
        ]
        call = make_call(dtype)
        expected = results(call, parts.run(call))
        first = run(dtype, forms[0], 0)
        wrong = [
            name
            for name, y in expected.items()
            if not torch.allclose(first[name].float(), y.float(), rtol=2e-2, atol=2e-2)
        ]
        failed += bool(wrong)
        print(f"{dtype}: {', '.join(wrong) or 'as the parts'}", flush=True)
        for seed, form in enumerate(forms):
            wrong = differences(run(dtype, form, seed), first)
            failed += bool(wrong)
            print(f"{dtype}, {form}: {', '.join(wrong) or 'right'}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
