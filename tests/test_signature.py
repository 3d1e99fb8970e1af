"""The public op is a drop-in: parameter names, their order and their defaults are FLA's."""

import functools
import inspect

import pytest
import torch

import gdn_triton
import gdn_triton.chunk.operators
import gdn_triton.chunk.prefill_operators
from gdn_triton.chunk.prefill_call import PrefillCall
from gdn_triton.chunk.problem import ChunkCall, Inputs
from gdn_triton.chunk.validation import validate_chunk
from gdn_triton.chunk.validation_prefill import validate_prefill

REQUIRED = inspect.Parameter.empty

# flash-linear-attention 0.6.0, in order. Written down so that the test needs no FLA.
FLA_POSITIONAL = (
    ("q", REQUIRED),
    ("k", REQUIRED),
    ("v", REQUIRED),
    ("g", REQUIRED),
    ("beta", REQUIRED),
    ("scale", None),
    ("initial_state", None),
    ("output_final_state", False),
    ("use_qk_l2norm_in_kernel", False),
    ("use_beta_sigmoid_in_kernel", False),
    ("allow_neg_eigval", False),
    ("state_v_first", False),
    ("cu_seqlens", None),
    ("cu_seqlens_cpu", None),
    ("chunk_indices", None),
    ("cp_context", None),
)
# What FLA takes out of **kwargs, with the defaults its body applies.
FLA_KEYWORDS = (
    ("use_gate_in_kernel", False),
    ("A_log", None),
    ("dt_bias", None),
    ("chunk_size", 64),
    ("transpose_state_layout", None),
    ("head_first", None),
)


# The same of its fused_recurrent_gated_delta_rule.
FLA_RECURRENT_POSITIONAL = (
    ("q", REQUIRED),
    ("k", REQUIRED),
    ("v", REQUIRED),
    ("g", None),
    ("gk", None),
    ("gv", None),
    ("beta", None),
    ("scale", None),
    ("initial_state", None),
    ("output_final_state", False),
    ("use_qk_l2norm_in_kernel", False),
    ("use_gate_in_kernel", False),
    ("A_log", None),
    ("dt_bias", None),
    ("use_beta_sigmoid_in_kernel", False),
    ("allow_neg_eigval", False),
    ("state_v_first", False),
    ("cu_seqlens", None),
)
FLA_RECURRENT_KEYWORDS = (("transpose_state_layout", None), ("head_first", None))


def parameters_of(function, kind):
    parameters = inspect.signature(function).parameters.values()
    return tuple((p.name, p.default) for p in parameters if p.kind is kind)


@pytest.mark.parametrize("function", [gdn_triton.chunk_gated_delta_rule, gdn_triton.explain])
def test_signature_is_flas(function):
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters_of(function, positional) == FLA_POSITIONAL
    own = (("contents", False),) if function is gdn_triton.explain else ()
    assert parameters_of(function, inspect.Parameter.KEYWORD_ONLY) == FLA_KEYWORDS + own
    count = len(FLA_POSITIONAL) + len(FLA_KEYWORDS) + len(own)
    assert len(inspect.signature(function).parameters) == count, "there is a catch-all parameter"


def test_recurrent_signature_is_flas():
    function = gdn_triton.fused_recurrent_gated_delta_rule
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters_of(function, positional) == FLA_RECURRENT_POSITIONAL
    assert parameters_of(function, inspect.Parameter.KEYWORD_ONLY) == FLA_RECURRENT_KEYWORDS
    count = len(FLA_RECURRENT_POSITIONAL) + len(FLA_RECURRENT_KEYWORDS)
    assert len(inspect.signature(function).parameters) == count, "there is a catch-all parameter"


def test_explain_and_validation_take_the_same_arguments():
    op = inspect.signature(gdn_triton.chunk_gated_delta_rule).parameters
    assert list(inspect.signature(gdn_triton.explain).parameters) == [*op, "contents"]
    # What of a split call is a rank's own, cp_context says before.
    assert set(ChunkCall._fields) == set(op) - {
        "transpose_state_layout",
        "head_first",
        "cp_context",
    }


def test_records_are_passed_by_position():
    """Validation and the operators take the fields of a record in their order."""
    chunk, prefill = ChunkCall._fields, PrefillCall._fields
    assert chunk[:8] == Inputs._fields
    assert tuple(inspect.signature(validate_chunk).parameters) == chunk
    assert tuple(inspect.signature(validate_prefill).parameters) == prefill
    operators = torch.ops.gdn_triton
    for operator, names in (
        (operators.chunk_gated_delta_rule_fwd, (*chunk, "needs_grad")),
        (operators.chunk_gated_delta_rule_bwd, ("do", "dht", *chunk, "wanted")),
        (operators.chunk_prefill, prefill),
    ):
        assert tuple(x.name for x in operator.default._schema.arguments) == names


def test_alias():
    assert gdn_triton.chunk_gdn is gdn_triton.chunk_gated_delta_rule
    assert gdn_triton.fused_recurrent_gdn is gdn_triton.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        gdn_triton.chunk_gated_delta_rule,
        gdn_triton.explain,
        gdn_triton.fused_recurrent_gated_delta_rule,
        functools.partial(gdn_triton.explain_call, gdn_triton.fused_recurrent_gated_delta_rule),
    ],
)
def test_head_first_says_what_to_do(function, given):
    x = torch.zeros(1, 2, 1, 4)
    call = {"q": x, "k": x, "v": x, "g": x[..., 0], "beta": x[..., 0]}
    with pytest.raises(TypeError, match=r"head_first was removed, got .*\[B, T, H, \.\.\.\]"):
        function(**call, head_first=given)


@pytest.mark.parametrize("name", ["cp_rank", "output_final_sate"])
def test_unknown_keyword(name):
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(TypeError, match=name):
        gdn_triton.chunk_gdn(x, x, x, x[..., 0], x[..., 0], **{name: True})
