"""The public op is a drop-in: parameter names, their order and their defaults are FLA's."""

import functools
import inspect
import typing

import pytest
import torch

import gdn_triton
import gdn_triton.chunk.operators
import gdn_triton.chunk.prefill.operators
import gdn_triton.recurrent.operators
from gdn_triton import fused_recurrent_gated_delta_rule as SEQUENCES
from gdn_triton._host.records import Options, arguments_of, flat, made
from gdn_triton.chunk.problem import ChunkCall, PrefillCall
from gdn_triton.recurrent.problem import WINDOW_AND_SCALES, FoldCall, SequenceCall, StepCall

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
# The arguments that FLA reads from **kwargs, with the defaults of its code.
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
    # A split call first replaces the arguments that cp_context has.
    assert fields(ChunkCall) == set(op) - {"transpose_state_layout", "head_first", "cp_context"}


def fields(record):
    """The names of a record's fields, those of the records that it holds in their place."""
    found = set()
    for name, kind in typing.get_type_hints(record).items():
        inside = fields(kind) if hasattr(kind, "_fields") else {name}
        assert not found & inside, f"{record.__name__} has two fields of one name"
        found |= inside
    return found


def test_records_and_operators_name_arguments_alike():
    operators = torch.ops.gdn_triton
    chunk, sequences = fields(ChunkCall), set(inspect.signature(SEQUENCES).parameters)
    sequences -= {"transpose_state_layout", "head_first"}
    prefill, step = fields(PrefillCall) - {"initial_state"}, fields(StepCall) - {"gk", "gv"}
    assert prefill == set(inspect.signature(gdn_triton.chunk_prefill).parameters)
    assert fields(SequenceCall) >= sequences - {"initial_state"}
    window = {"positions", "max_tokens", *WINDOW_AND_SCALES}
    window_step = step - {"write_slots", "num_accepted_tokens"} | {"is_raw"}
    step -= window
    gates = {"use_gate_in_kernel", "use_beta_sigmoid_in_kernel"}
    for operator, names in (
        (operators.chunk_gated_delta_rule_fwd, chunk | {"needs_grad", "batch_invariant"}),
        (
            operators.chunk_gated_delta_rule_bwd,
            chunk | {"do", "dht", "wanted", "batch_invariant"},
        ),
        (operators.chunk_prefill, prefill | {"batch_invariant"}),
        (operators.fused_recurrent_fwd, sequences | {"needs_grad"}),
        (operators.recurrent_step_out, step - gates | {"is_raw"}),
        (operators.recurrent_step, step - gates - {"out"} | {"is_raw"}),
        (operators.recurrent_step_window_out, window_step - gates),
        (operators.recurrent_step_window, window_step - gates - {"out"}),
        (operators.fold_window, fields(FoldCall) - {"path"}),
        (operators.restart_window, fields(FoldCall) - {"state", "path", "scales"}),
        (operators.accept_window, fields(FoldCall) - {"state", "scales"}),
    ):
        assert {x.name for x in operator.default._schema.arguments} == names


@pytest.mark.parametrize("function", [gdn_triton.chunk_gated_delta_rule, gdn_triton.chunk_prefill])
def test_flags_are_in_one_order(function):
    """In the public functions, as in the record of them."""
    named = [name for name in inspect.signature(function).parameters if name in Options._fields]
    assert tuple(named) == Options._fields


def test_records_come_apart_and_together():
    given = {name: object() for name in fields(ChunkCall)}
    call = made(ChunkCall, {**given, "cp_context": None})
    assert call.inputs.beta is given["beta"]
    assert call.options.allow_neg_eigval is given["allow_neg_eigval"]
    assert flat(call) == given
    with pytest.raises(KeyError, match="allow_neg_eigval"):
        made(ChunkCall, {name: x for name, x in given.items() if name != "allow_neg_eigval"})


def test_arguments_of_a_schema():
    arguments = arguments_of("Tensor(a!) state, Tensor? out, float? scale, bool[] wanted")
    assert arguments.names == ("state", "out", "scale", "wanted")
    assert arguments.tensors == ("state", "out")
    given = arguments.named((1, 2, 3, 4))
    assert given == {"state": 1, "out": 2, "scale": 3, "wanted": 4}
    assert arguments.ordered({**given, "more": 5}) == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="shorter"):
        arguments.named((1, 2, 3))


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
