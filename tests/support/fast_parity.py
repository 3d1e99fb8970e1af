r"""Runs one case in the backends, and compares each with the float64 specification and with the
others.

`tests/fast` uses this for its cases. As a script it makes random cases, of lengths, heads, gates,
layouts, strides and options, and runs them through one backend, by default the CUDA library:

    python tests/support/fast_parity.py --count 1000 --seed 0 --repeat 20
    python tests/support/fast_parity.py --count 9000 --small --workers 14 --quiet
    python tests/support/fast_parity.py --backend triton --count 100000 --seconds 150 \
        --workers 16 --quiet
    compute-sanitizer --kernel-name kernel_substring=gdn --tool memcheck \
        python tests/support/fast_parity.py --count 8 --small

Each line is a case. A case that fails prints the arguments that run it again. `random_runs.py` says
how cases are numbered and shared among processes, and what `--alike` and `--seconds` do. With
`--backend triton` 64 cases in a row have one variant, because each variant compiles its kernels;
`--alike 1` draws a variant for every case. Variants of odd numbers have GDN_BATCH_INVARIANT=1, with
which the Triton backend runs the Gluon kernels for few states too. Memory that the package
allocates holds NaN, and inputs have NaN between their rows.

The specification is computed in chunks on the GPU, or with `--by-token` token by token, which takes
many times as long. `--small` makes short sequences and computes the specification on the CPU, for a
sanitizer, under which kernels take a hundred times as long.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import BUDGET_RMS, FP32, FP64, assert_within_budget, same_bits
from narrow import Arithmetic, narrow_forward
from parity_calls import Call, describe, random_call
from poison import poisoned_allocations
from random_runs import add_numbers, check_numbers, options_of
from torch import Tensor

import gdn_triton
from gdn_triton import reference


@contextlib.contextmanager
def set_for_a_while(name: str, value: str) -> Iterator[None]:
    """An environment variable, which gets its former value or none back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


requested = partial(set_for_a_while, "GDN_BACKEND")  # a backend that refuses raises


def run(backend: str, call: Call, **changes: Any) -> tuple[Tensor, Tensor]:
    """o and the final state [N, HV, K, V] of one backend."""
    x, options = call.x, call.options
    initial_state = None
    if options.with_state:
        initial_state = x.initial_state.mT if options.v_first else x.initial_state
    arguments: dict[str, Any] = {
        "scale": options.scale,
        "initial_state": initial_state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": options.l2norm,
        "use_beta_sigmoid_in_kernel": options.sigmoid,
        "allow_neg_eigval": options.negative,
        "state_v_first": options.v_first,
        "cu_seqlens": x.cu_seqlens,
        "cu_seqlens_cpu": None if call.told is None else torch.tensor(call.told).int(),
        "use_gate_in_kernel": call.A_log is not None,
        "A_log": call.A_log,
        "dt_bias": call.dt_bias,
        "chunk_size": call.case.chunk_size,
        **changes,
    }
    with requested(backend):
        o, state = gdn_triton.chunk_gated_delta_rule(*x.tensors, **arguments)
    assert state is not None and o.is_contiguous() and state.is_contiguous()
    return o, state.mT if options.v_first else state


def specification(call: Call, chunked: bool = False) -> tuple[Tensor, Tensor]:
    """o and the final state [N, HV, K, V] in float64, token by token or in chunks."""
    x, options = call.x, call.options
    by = reference.chunk_gated_delta_rule if chunked else reference.recurrent_gated_delta_rule
    o, state, *_ = by(
        *x.exact(),
        scale=options.scale,
        initial_state=x.initial_state.to(FP64) if options.with_state else None,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=options.l2norm,
        use_beta_sigmoid=options.sigmoid,
        allow_neg_eigval=options.negative,
        use_gate=options.gate,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
    )
    return o, state


def independent(call: Call) -> tuple[Tensor, Tensor]:
    """The same at the kernels' precision on a GPU, whose error is the budget."""
    options = call.options
    return narrow_forward(
        call.x,
        call.case,
        Arithmetic(call.x.q.dtype, "cuda"),
        scale=options.scale,
        with_state=options.with_state,
        use_qk_l2norm=options.l2norm,
        use_beta_sigmoid=options.sigmoid,
        allow_neg_eigval=options.negative,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
    )


def assert_near(
    name: str, a: Tensor, b: Tensor, exact: Tensor, narrow: Tensor, unit: float
) -> None:
    """Compares two results with independent rounding errors, whose squares add."""
    if a.numel() == 0:
        return
    difference, allowed = a.to(FP64) - b.to(FP64), narrow.to(FP64) - exact
    limit = BUDGET_RMS * float(allowed.square().mean().sqrt())
    limit = 2**0.5 * (limit + unit * float(exact.square().mean().sqrt()))
    found = float(difference.square().mean().sqrt())
    assert found <= limit, f"{name}: they differ by {found:.3e} (rms; at most {limit:.3e})"


def check_parity(
    call: Call,
    backends: Sequence[str] = ("triton", "cuda"),
    on: str = "cuda",
    chunked: bool = False,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs the backends, and compares each with the specification and with the others.

    `on` is the device of the specification, which is computed in chunks if `chunked`. Returns every
    backend's o and final state.
    """
    there = call.to(on)
    exact, narrow = specification(there, chunked), independent(there)
    arithmetic = Arithmetic(call.x.q.dtype, "cuda")
    dtypes = (call.x.q.dtype, FP32)
    results = {backend: run(backend, call) for backend in backends}
    for backend, result in results.items():
        for name, got, want, budget, dtype in zip(
            ("o", "final_state"), result, exact, narrow, dtypes, strict=True
        ):
            assert_within_budget(
                f"{name} of {backend}",
                got.to(on),
                want,
                budget,
                dtype=dtype,
                unit=arithmetic.unit,
            )
        if call.case.packed:
            rest = result[0][:, call.case.offsets()[-1] :]
            assert (rest == 0).all(), f"{backend}: tokens of no sequence"
    for i, one in enumerate(backends):
        for other in backends[:i]:
            for j, name in enumerate(("o", "final_state")):
                near = (x[j].to(on) for x in (results[one], results[other]))
                who = f"{name} of {one} and {other}"
                assert_near(who, *near, exact[j], narrow[j], arithmetic.unit)
    return results


# ------------------------------------------------------------------------------------- random cases


def check_random(number: int, options: argparse.Namespace) -> str | None:
    """The fault of a random case, or None."""
    device = "cpu" if options.copied else "cuda"
    call, _ = random_call(number, device, options.small, options.sizes, options.alike)
    call = call.to("cuda") if options.copied else call
    words = f"{number}: {describe(call)}"
    backend, invariant = options.backend, str(number // options.alike % 2)
    on = "cpu" if options.small else options.on
    # initcheck finds reads of memory that nothing has written, if nothing else writes it.
    memory = contextlib.nullcontext() if options.copied else poisoned_allocations()
    try:
        with set_for_a_while("GDN_BATCH_INVARIANT", invariant), memory:
            results = check_parity(call, (backend,), on=on, chunked=not options.by_token)
            for again in range(options.repeat):
                same = map(same_bits, run(backend, call), results[backend])
                assert all(same), f"run {again + 2} has other bits than the first"
    except AssertionError as why:
        return f"FAILED {words}\n    {why}"
    if not options.quiet:
        print(f"ok {words}", flush=True)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random cases through one backend.")
    add_numbers(parser, alike=64)
    parser.add_argument("--sizes", choices=("128", "others", "all"), default="all", help="K and V")
    parser.add_argument("--small", action="store_true", help="short, and specified on the CPU")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help="the specification")
    parser.add_argument("--by-token", action="store_true", help="specified token by token")
    parser.add_argument(
        "--copied",
        action="store_true",
        help="dense inputs, made on the CPU: for initcheck, which does not see what kernels write "
        "that its filter leaves out",
    )
    parser.add_argument("--repeat", type=int, default=0, help="runs more, of the same bits")
    parser.add_argument("--quiet", action="store_true", help="no line for a case that passes")
    options = options_of(parser)
    sys.exit(check_numbers(partial(check_random, options=options), options))


if __name__ == "__main__":
    main()
