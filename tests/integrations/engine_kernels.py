"""Replacements with which the engines' Triton kernels run in the interpreter."""

import torch
import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Theirs is the hardware's."""
    return tl.exp(x)


GIVEN = {"torch": torch, "triton": triton, "tl": tl, "exp": exp}


def be_lenient(monkeypatch) -> None:
    """Some of their masks are products of tensors of several types, which compilers take."""
    from triton.runtime.interpreter import _interpreter

    load, store = _interpreter.load, _interpreter.store
    monkeypatch.setattr(_interpreter, "load", lambda p, m, *r: load(p, m.astype(bool), *r))
    monkeypatch.setattr(_interpreter, "store", lambda p, v, m: store(p, v, m.astype(bool)))
