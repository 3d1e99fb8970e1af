"""The contents of the tensors of a call of the rule, and the mistakes that show in them.

A call with such a mistake is valid and runs: its numbers only make the states grow, or mean
something else than the caller thinks. Reading a tensor waits for its device. Therefore
`gdn_triton.explain` reads contents only on request. A call of the reference on CPU tensors, which
need no wait, reads them and warns.
"""

import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

# The limits for keys and beta allow for a rounding of each to bfloat16.
SLACK = 1.02
# Models have at most 64 heads. A larger H that also exceeds T means that T and H are swapped.
MOST_HEADS = 64
# The exponential of this number is the largest number of float32.
MOST_A_LOG = math.log(torch.finfo(torch.float32).max)

_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a call's tensors (`gdn_triton.explain` with `contents`).

    largest_g: the largest gate; None if the call has no g, or activates it (`use_gate_in_kernel`).
    longest_key: the largest Euclidean norm of a key; None if the call normalises keys.
    smallest_beta, largest_beta: None if the call has no beta, or takes its sigmoid.
    T, H: tokens and heads as the call reads the shape of k.
    mistakes: for each mistake that shows, its name and a sentence.
    unseen: sentences about mistakes that contents cannot show.
    A number is NaN if the tensor has one, and None too if the tensor has no elements.
    """

    largest_g: float | None
    longest_key: float | None
    smallest_beta: float | None
    largest_beta: float | None
    T: int
    H: int
    mistakes: dict[str, str]
    unseen: tuple[str, ...]

    def __str__(self) -> str:
        ends = self.smallest_beta, self.largest_beta
        beta = None if None in ends else "{:.3g} to {:.3g}".format(*ends)
        found = {
            "largest g": _shown(self.largest_g),
            "longest key": _shown(self.longest_key),
            "beta": beta or "not read",
            "T": str(self.T),
            "H": str(self.H),
        }
        lines = ["contents: " + ", ".join(f"{name} {value}" for name, value in found.items())]
        lines += [f"  {sentence}" for sentence in self.mistakes.values()]
        if not self.mistakes:
            lines.append("  No mistake shows in them.")
        return "\n".join(lines + [f"  {sentence}" for sentence in self.unseen])


class Words(NamedTuple):
    """A call's names of its gate g, its beta and its states, and of the options that activate g and
    beta."""

    g: str
    beta: str
    state: str
    gate: str
    sigmoid: str


_FLAGS: Final = "use_gate_in_kernel=True", "use_beta_sigmoid_in_kernel=True"
OF_SEQUENCES: Final = Words("g", "beta", "initial_state", *_FLAGS)
OF_PREFILL: Final = Words("g", "beta", "state", *_FLAGS)
# The words of `gdn_triton.recurrent_step` with g and beta, and with a and b.
_INSTEAD: Final = "the argument a, in place of g,", "the argument b, in place of beta,"
OF_STEP: Final = Words("g", "beta", "state", *_INSTEAD)
OF_RAW_STEP: Final = Words("a", "b", "state", *_INSTEAD)


def read_contents(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    normalizes_keys: bool,
    activates_gate: bool,
    activates_beta: bool,
    served: Tensor | None = None,
    words: Words = OF_SEQUENCES,
) -> Contents:
    """Reads the contents of a valid call, without the tokens of no sequence. Waits for the device.

    q, k, v: [B, T, H or HV, channels]. g: [B, T, HV]. beta: [B, T, HV, ...]. A_log, dt_bias: [HV],
    if the call activates its gate. normalizes_keys, activates_gate, activates_beta: the call itself
    normalises k, or activates g or beta. served: for a call on a pool, [B, T], bool: the tokens of
    sequences that are not skipped. Then initial_state has the states of these sequences alone, and
    the order of T and H is not checked, because the pool's shape gives HV. words: the call's names.
    """
    T, H = k.shape[1:3]
    if served is None:
        end = T if cu_seqlens is None else int(cu_seqlens[-1].item())
        q, k, v = (x.detach()[:, :end] for x in (q, k, v))
        g, beta = (None if x is None else x.detach()[:, :end] for x in (g, beta))
    else:
        q, k, v = (x.detach()[served][None] for x in (q, k, v))
        g, beta = (None if x is None else x.detach()[served][None] for x in (g, beta))
    A_log, dt_bias = (None if x is None else x.detach() for x in (A_log, dt_bias))
    lengths = k.float().norm(dim=-1)  # [B, end, H]
    largest_g = None if activates_gate else _extremes(g)[1]
    longest_key = None if normalizes_keys else _extremes(lengths)[1]
    least, most = (None, None) if activates_beta else _extremes(beta)

    mistakes: dict[str, str] = {}
    state = None if initial_state is None else initial_state.detach()
    bad = [
        *(
            name
            for name, x in (
                (words.g, g),
                (words.beta, beta),
                ("A_log", A_log),
                ("dt_bias", dt_bias),
            )
            if x is not None and _any(x.isnan())
        ),
        *(
            name
            for name, x in (("q", q), ("k", k), ("v", v), (words.state, state))
            if x is not None and _any(~x.isfinite())
        ),
    ]
    if bad:
        mistakes["not finite"] = (
            f"{' and '.join(bad)} already {'has' if len(bad) == 1 else 'have'} NaN or infinities, "
            "which reach every later token."
        )
    if g is not None and largest_g is not None and largest_g > 0:
        mistakes["gate"] = _about_gate(g, largest_g, words)
    largest_rate = _extremes(A_log)[1]
    if largest_rate is not None and largest_rate > MOST_A_LOG:
        mistakes["A_log"] = (
            f"A_log is up to {largest_rate:.3g}, and exp(A_log) is more than float32 holds: such a "
            "head forgets everything at every token whose gate is not as far below 0. A_log is the "
            "logarithm of a rate, 3 at most in models; it looks like the rate itself."
        )
    if least is not None and most is not None and (most > 2 * SLACK or least < 0):
        mistakes["beta"] = (
            f"beta is {least:.3g} to {most:.3g}, outside of 0 to 2, so the state grows: it looks "
            f"like logits, of which {words.sigmoid} takes the sigmoid."
        )
    elif longest_key is not None and _largest_step(lengths, beta, activates_beta) > 2 * SLACK:
        mistakes["keys"] = (
            f"the longest key is {longest_key:.3g}, and beta times the square of a key's length is "
            "above 2, so the state grows with such tokens: the keys look as if they were not "
            "normalised, which use_qk_l2norm_in_kernel=True does."
        )
    if cu_seqlens is None and served is None and 1 < T < H:
        mistakes["layout"] = (
            f"T={T} is less than H={H}: the tensors look like [B, H, T, ...], and are read as "
            "[B, T, H, ...], tokens before heads. If the sequence is as short as that, it is right."
        )
    return Contents(
        largest_g=largest_g,
        longest_key=longest_key,
        smallest_beta=least,
        largest_beta=most,
        T=T,
        H=H,
        mistakes=mistakes,
        unseen=_unseen(state),
    )


def warn_of_contents(**call: Any) -> None:
    """Gives a UserWarning for each mistake in a call's contents, once for each kind in a process.
    The warning points to the line outside of this package that made the call. call: the arguments
    of `read_contents`."""
    found = read_contents(**call)
    for name, sentence in found.mistakes.items():
        # A short sequence is no mistake.
        if name in _warned or (name == "layout" and found.H <= MOST_HEADS):
            continue
        _warned.add(name)
        warnings.warn(
            f"gdn_triton: {sentence} It is computed as it was given; docs/wrong_numbers.md has "
            "more, and this is said once.",
            UserWarning,
            stacklevel=_depth_of_caller(),
        )


def _extremes(x: Tensor | None) -> tuple[float, float] | tuple[None, None]:
    if x is None or x.numel() == 0:
        return None, None
    least, most = x.aminmax()
    return least.item(), most.item()


def _any(x: Tensor) -> bool:
    return bool(x.any().item())


def _largest_step(lengths: Tensor, beta: Tensor | None, activates_beta: bool) -> float:
    """The largest beta |k|^2, with a factor of 1 on beta's sigmoid. A token multiplies the state
    along its key by 1 - beta |k|^2, so a value above 2 makes the state grow."""
    steps = lengths.square()
    if beta is not None:
        strength = beta.float().sigmoid() if activates_beta else beta.float()
        steps = steps.repeat_interleave(beta.shape[2] // steps.shape[2], 2)
        steps = steps * (strength if beta.dim() == 3 else strength.amax(3))
    return _extremes(steps)[1] or 0.0


def _about_gate(g: Tensor, largest: float, words: Words) -> str:
    if largest <= 1 and g.amin().item() >= 0:
        return (
            f"g is between 0 and 1, {largest:.3g} at most: it looks like alpha, the decay itself. "
            "g is its natural logarithm, alpha.log(), and a positive g makes the state grow."
        )
    return (
        f"g is up to {largest:.3g}, and a positive g makes the state grow: g is the natural "
        "logarithm of the decay, 0 at most. It looks like a gate of the wrong sign, or like one "
        f"before its activation, which {words.gate} applies."
    )


def _unseen(state: Tensor | None) -> tuple[str, ...]:
    if state is None or state.shape[-1] != state.shape[-2]:
        return ()
    size = state.shape[-1]
    return (
        f"Not to be seen: whether the initial state is [K, V] or [V, K], as K = V = {size}. vLLM, "
        "SGLang and FlashInfer keep [V, K]: that is state_v_first=True.",
    )


def _shown(x: float | None) -> str:
    return "not read" if x is None else f"{x:.3g}"


def _depth_of_caller() -> int:
    """Returns the stacklevel, counted from the calling function, of the first frame outside of this
    package."""
    frame, depth = sys._getframe(1), 1
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    return depth
