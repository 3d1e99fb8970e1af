"""FLA's ops on ours: registered, undone, refused. With a stand-in for FLA everywhere, and with FLA
itself where it is installed."""

import importlib
import inspect
import logging
import os
import sys
from types import ModuleType

import pytest
import torch
from helpers import FP64, assert_within_budget, same_bits
from narrow import Arithmetic

import gdn_triton

B, T, H, HV, K, V = 1, 20, 1, 2, 8, 8
OPS = "fla.ops.gated_delta_rule"
OWN = "FLA's own"


class StandInBackend:
    """The methods of a backend that the registries of FLA 0.5.2 and 0.6.0 call."""

    backend_type, priority, env_var = "base", 5, None

    def verify(self, name, *args, **kwargs):
        try:
            return getattr(self, f"{name}_verifier")(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class StandInRegistry:
    def __init__(self):
        self.backends = {}
        self.rejections = []

    def register(self, backend):
        self.backends[backend.backend_type] = backend

    def call(self, name, default, *args, **kwargs):
        for backend in sorted(self.backends.values(), key=lambda each: each.priority):
            if backend.is_available() and backend.is_enabled():
                accepted, reason = backend.verify(name, *args, **kwargs)
                if accepted:
                    return getattr(backend, name)(*args, **kwargs)
                self.rejections.append(reason)
        return default(*args, **kwargs)


def stand_in(version):
    """The modules of an FLA of this version: its ops give their own name back."""
    registry = StandInRegistry()

    def chunk_gated_delta_rule(*args, **kwargs):
        return registry.call("chunk_gated_delta_rule", lambda *a, **k: OWN, *args, **kwargs)

    def fused_recurrent_gated_delta_rule(
        q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, **kwargs
    ):
        return OWN

    package = ModuleType("fla")
    package.__version__ = version
    ops = ModuleType(OPS)
    ops.chunk_gated_delta_rule = chunk_gated_delta_rule
    ops.fused_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
    ops.fused_recurrent_gdn = fused_recurrent_gated_delta_rule
    layer = ModuleType("fla.layers.gated_deltanet")  # one that took the names as it was imported
    layer.fused_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
    modules = {"fla": package, "fla.ops": ModuleType("fla.ops"), OPS: ops, layer.__name__: layer}
    conv, norm = ModuleType("fla.modules.convolution"), ModuleType("fla.modules.fused_norm_gate")
    conv.causal_conv1d = layer.causal_conv1d = lambda x, **kwargs: (OWN, kwargs)
    norm.rms_norm_gated = lambda x, g, weight, bias, *args: (OWN, args)
    modules |= {m.__name__: m for m in (ModuleType("fla.modules"), conv, norm)}
    for name in ("fla.backends", "fla.ops.backends"):
        modules[name] = ModuleType(name)
        modules[name].BaseBackend = StandInBackend
        modules[name]._DISPATCH_DISABLED = False
    if str(version).startswith("0.6"):
        del modules["fla.ops.backends"]

        def register(operation):
            assert operation == "gated_delta_rule"
            return lambda backend: registry.register(backend())

        modules["fla.backends"].register = register
    else:
        del modules["fla.backends"]
        modules[f"{OPS}.backends"] = ModuleType(f"{OPS}.backends")
        modules[f"{OPS}.backends"].gdr_registry = registry
    return modules, registry


@pytest.fixture
def ours(monkeypatch, no_interpreter):
    """`gdn_triton.integrations.fla` as if nothing had been registered in this process. Calls on the
    CPU go to the reference, which is far quicker than the interpreter."""
    monkeypatch.setenv("GDN_BACKEND", "auto")
    name = "gdn_triton.integrations.fla"
    package = importlib.import_module("gdn_triton.integrations")
    before = sys.modules.pop(name, None)
    module = importlib.import_module(name)
    yield module
    module.unregister()
    del sys.modules[name], package.fla
    if before is not None:
        sys.modules[name] = package.fla = before


@pytest.fixture(params=["0.5.2", "0.6.1.dev3"])
def fla(request, monkeypatch):
    """A stand-in, with its registry as an attribute."""
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    modules, registry = stand_in(request.param)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    ops = modules[OPS]
    ops.registry = registry
    return ops


def tensors(device="cpu", dtype=torch.float32):
    q, k = torch.randn(2, B, T, H, K, device=device, dtype=dtype)
    v = torch.randn(B, T, HV, V, device=device, dtype=dtype)
    g, beta = -torch.rand(2, B, T, HV, device=device)
    return q, k, v, g, -beta


def test_calls_reach_ours_and_undone_they_do_not(fla, ours):
    q, k, v, g, beta = tensors()
    chunk = fla.chunk_gated_delta_rule
    own_recurrent = fla.fused_recurrent_gated_delta_rule
    assert chunk(q, k, v, g=g, beta=beta) is OWN
    ours.register()
    expected, state = gdn_triton.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    o, final_state = chunk(q, k, v, g=g, beta=beta, output_final_state=True)
    assert same_bits(o, expected) and same_bits(final_state, state)
    expected, _ = gdn_triton.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)
    layer = sys.modules["fla.layers.gated_deltanet"]
    for function in (
        fla.fused_recurrent_gated_delta_rule,
        fla.fused_recurrent_gdn,
        layer.fused_recurrent_gated_delta_rule,
    ):
        o, final_state = function(q, k, v, g=g, beta=beta)
        assert same_bits(o, expected) and final_state is None
    ours.unregister()
    assert chunk(q, k, v, g=g, beta=beta) is OWN
    assert fla.fused_recurrent_gated_delta_rule is own_recurrent
    assert fla.fused_recurrent_gdn is own_recurrent
    assert layer.fused_recurrent_gated_delta_rule is own_recurrent


def test_twice_is_once(fla, ours):
    own_recurrent = fla.fused_recurrent_gated_delta_rule
    ours.unregister()  # of nothing
    for _ in range(2):
        ours.register()
        ours.register()
        assert fla.chunk_gated_delta_rule(*tensors()) is not OWN
        assert list(fla.registry.backends) == ["gdn_triton"]
        ours.unregister()
        ours.unregister()
        assert fla.fused_recurrent_gated_delta_rule is own_recurrent
        assert fla.chunk_gated_delta_rule(*tensors()) is OWN


def test_block_leaves_what_it_found(fla, ours):
    with pytest.raises(KeyError, match="in the block"), ours.routed():
        assert fla.chunk_gated_delta_rule(*tensors()) is not OWN
        raise KeyError("in the block")
    assert fla.chunk_gated_delta_rule(*tensors()) is OWN
    ours.register()
    with ours.routed():
        pass
    assert fla.chunk_gated_delta_rule(*tensors()) is not OWN


def test_module_loaded_between(fla, ours, monkeypatch):
    own_recurrent = fla.fused_recurrent_gated_delta_rule
    ours.register()
    late = ModuleType("late")
    late.step = fla.fused_recurrent_gated_delta_rule  # as `from fla... import ... as step` would
    kept = [late.step]  # and in a table, where it is not found
    monkeypatch.setitem(sys.modules, "late", late)
    q, k, v, g, beta = tensors()
    assert late.step(q, k, v, g=g, beta=beta) is not OWN
    ours.unregister()
    assert late.step is own_recurrent
    assert kept[0](q, k, v, g=g, beta=beta) is OWN


def test_replacement_shows_flas_parameters(fla, ours):
    own = inspect.signature(fla.fused_recurrent_gated_delta_rule)
    ours.register()
    assert inspect.signature(fla.fused_recurrent_gated_delta_rule) == own


def test_convolution(fla, ours, caplog):
    """Where a layer took the name, and in FLA's module; other forms of the call stay FLA's."""
    layer = sys.modules["fla.layers.gated_deltanet"]
    own = layer.causal_conv1d
    x, weight, bias = torch.randn(1, T, 6), torch.randn(6, 4), torch.randn(6)
    offsets = torch.tensor([0, 7, T])
    ours.register()
    conv = layer.causal_conv1d
    assert conv is sys.modules["fla.modules.convolution"].causal_conv1d
    y, state = conv(x=x, weight=weight, bias=bias, activation="swish", backend="triton")
    assert same_bits(y, gdn_triton.causal_conv1d(x, weight, bias)) and state is None
    y, _ = conv(x, weight, cu_seqlens=offsets, chunk_indices=offsets, cu_seqlens_cpu=offsets)
    assert same_bits(y, gdn_triton.causal_conv1d(x, weight, None, None, cu_seqlens=offsets))
    for other in (
        {"residual": x},
        {"initial_state": torch.zeros(1, 6, 4)},
        {"output_final_state": True},
        {"backend": "cuda"},
        {"cp_context": object()},
        {"seq_idx": offsets},
    ):
        found, given = conv(x, weight=weight, **other)
        assert found is OWN and all(given[name] is y for name, y in other.items())
    assert conv(x.expand(2, T, 6), weight, cu_seqlens=offsets)[0] is OWN
    assert "FLA's own path runs causal_conv1d, not gdn_triton: x must" in caplog.text
    ours.unregister()
    assert layer.causal_conv1d is own and conv(x, weight)[0] is OWN


def test_gated_norm(fla, ours):
    module = sys.modules["fla.modules.fused_norm_gate"]
    x, gate, weight = torch.randn(2, T, 3, 8), torch.randn(2, T, 3, 8), torch.randn(8)
    ours.register()
    norm = module.rms_norm_gated
    y = norm(x=x, g=gate, weight=weight, bias=None, activation="sigmoid", eps=1e-5)
    assert same_bits(y, gdn_triton.rms_norm_gated(x, gate, weight, 1e-5, "sigmoid"))
    assert same_bits(norm(x, gate, weight, None), gdn_triton.rms_norm_gated(x, gate, weight))
    assert norm(x, gate, None, None)[0] is OWN
    assert norm(x, gate, weight, weight)[0] is OWN
    assert norm(x, gate, weight, None, residual=x)[1][1] is x
    assert norm(x, gate, weight, None, prenorm=True)[0] is OWN
    assert norm(x, gate, weight, None, "gelu")[0] is OWN
    ours.unregister()
    assert module.rms_norm_gated is not norm and norm(x, gate, weight, None)[0] is OWN


UNSERVED = {
    "unknown keyword": ({"head_first": False}, "head_first"),
    "bad value": ({"scale": "1"}, "scale"),
}


@pytest.mark.parametrize("changes, sentence", UNSERVED.values(), ids=UNSERVED)
def test_refused_call_is_flas_and_says_so_once(fla, ours, caplog, changes, sentence):
    q, k, v, g, beta = tensors()
    ours.register()
    caplog.set_level(logging.WARNING, "gdn_triton")
    for op in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        caplog.clear()
        for _ in range(3):
            assert op(q, k, v, g=g, beta=beta, **changes) is OWN
        (record,) = caplog.records
        assert sentence in record.getMessage() and "FLA's own path runs" in record.getMessage()
    assert sentence in fla.registry.rejections[0]


def test_named_backend_gives_nothing_back(fla, ours, monkeypatch):
    q, k, v, g, beta = tensors()
    ours.register()
    monkeypatch.setenv("GDN_BACKEND", "reference")
    for op in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        assert op(q, k, v, g=g, beta=beta) is not OWN
        with pytest.raises(TypeError, match="head_first"):
            op(q, k, v, g=g, beta=beta, head_first=False)
    monkeypatch.setenv("GDN_BACKEND", "fastest")
    for op in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match="GDN_BACKEND"):
            op(q, k, v, g=g, beta=beta)


def test_where_only_the_reference_runs_flas_kernels_do(fla, ours, caplog):
    """On the CPU the reference is all there is; on a device that has FLA's kernels it is not."""
    ours.register()
    q, k, v, g, beta = tensors(dtype=FP64)
    for op in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        assert op(q, k, v, g=g, beta=beta) is not OWN
    q, k, v, g, beta = tensors("meta", FP64)
    for op in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        caplog.clear()
        assert op(q, k, v, g=g, beta=beta) is OWN
        assert f"FLA's own path runs {op.__name__}" in caplog.text
        assert "Triton runs on cuda and xpu devices; the tensors are on meta" in caplog.text


def test_judged_once_for_calls_that_are_alike(fla, ours, monkeypatch):
    ours.register()
    judged = []
    explain = ours.explain_call
    monkeypatch.setattr(ours, "explain_call", lambda *a, **k: judged.append(a) or explain(*a, **k))
    q, k, v, g, beta = tensors()
    for _ in range(3):
        fla.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    assert len(judged) == 1
    fla.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True)
    assert len(judged) == 2


def test_forward_only(ours):
    x = torch.ones(3, requires_grad=True)
    doubled, nothing = ours._ForwardOnly.apply(lambda: (x * 2, None), x)
    assert nothing is None and doubled.requires_grad
    with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule"):
        doubled.sum().backward()


@pytest.mark.parametrize("version", ["0.5.1", "0.7.0.dev1", "1.0", None, "unknown"])
def test_unknown_version(version, ours, monkeypatch):
    for name, module in stand_in(version)[0].items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match=rf"0\.5\.2 to before 0\.7; found {version}"):
        ours.register()


def test_absent(ours, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="needs flash-linear-attention"):
        ours.register()


def test_dispatch_disabled(fla, ours):
    own = fla.fused_recurrent_gated_delta_rule
    for name in ("fla.backends", "fla.ops.backends"):
        if name in sys.modules:
            sys.modules[name]._DISPATCH_DISABLED = True
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        ours.register()
    assert not fla.registry.backends
    assert fla.fused_recurrent_gated_delta_rule is own


# With FLA itself.


@pytest.fixture
def real(ours):
    ops = pytest.importorskip(OPS, reason="flash-linear-attention is not installed")
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        pytest.skip("FLA_DISABLE_BACKEND_DISPATCH=1: FLA asks no backend")
    return ops


def test_real_ops(real, ours, device):
    q, k, v, g, beta = tensors(device)
    A_log, dt_bias = torch.rand(HV, device=device), torch.rand(HV, device=device)
    options = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": torch.randn(B, HV, V, K, device=device),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
    }
    own = real.fused_recurrent_gated_delta_rule
    with ours.routed():
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            got = getattr(real, name)(q, k, v, g=g, beta=beta, **options)
            expected = getattr(gdn_triton, name)(q, k, v, g=g, beta=beta, **options)
            assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True)), name
    assert real.fused_recurrent_gated_delta_rule is own


def test_real_gradients(real, ours, device):
    inputs = [x.requires_grad_() for x in tensors(device)]
    do = torch.randn(B, T, HV, V, device=device)
    with ours.routed():
        o, _ = real.chunk_gated_delta_rule(*inputs)
    got = torch.autograd.grad(o, inputs, do)
    o, _ = gdn_triton.chunk_gated_delta_rule(*inputs)
    expected = torch.autograd.grad(o, inputs, do)
    assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True))


def test_real_refusal_reaches_flas_path(real, ours, caplog, monkeypatch):
    """Its own op judges what ours refuses: here with its own error, not with ours."""
    q, k, v, g, beta = tensors()
    with ours.routed(), pytest.raises(ValueError, match="evenly divisible"):
        real.chunk_gated_delta_rule(q.expand(-1, -1, 3, -1), k.expand(-1, -1, 3, -1), v, g, beta)
    assert "FLA's own path runs chunk_gated_delta_rule" in caplog.text


def test_real_layer_trains_on_the_cpu(real, ours, monkeypatch):
    """All of FLA's layer that is a kernel of FLA runs here, with the layer of this package as the
    other computation, on the same weights."""
    reason = "the layers of flash-linear-attention are not installed"
    layers = pytest.importorskip("fla.layers.gated_deltanet", reason=reason)
    from gdn_triton.layers import GatedDeltaNet

    sizes = {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5}
    theirs, same = layers.GatedDeltaNet(**sizes), GatedDeltaNet(**sizes)
    same.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 70, 24)
    with ours.routed():
        o = theirs(x)[0]
        o.square().mean().backward()
    expected = same(x)
    expected.square().mean().backward()
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    wanted = dict(same.named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name].grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.gpu("FLA's convolution and norm are Triton kernels")
def test_real_recurrence_takes_inputs_that_require_gradients(real, ours):
    q, k, v, g, beta = tensors("cuda")
    with ours.routed():
        o, _ = real.fused_recurrent_gated_delta_rule(q.requires_grad_(), k, v, g=g, beta=beta)
    assert o.requires_grad
    with pytest.raises(NotImplementedError, match="has no backward"):
        o.sum().backward()


@pytest.mark.gpu("FLA's convolution and norm are Triton kernels")
def test_real_layer_trains_and_generates(real, ours, monkeypatch):
    """One step of FLA's own layer, and its tokens one by one after a prefill, beside the same layer
    on the reference, in float32 and in float64 between its own parts."""
    reason = "the layers of flash-linear-attention are not installed"
    layers = pytest.importorskip("fla.layers.gated_deltanet", reason=reason)
    utils = pytest.importorskip("fla.models.utils", reason=reason)
    layer = layers.GatedDeltaNet(
        hidden_size=128, head_dim=32, num_heads=2, num_v_heads=4, expand_v=1.5, layer_idx=0
    ).cuda()
    x = torch.randn(2, 150, 128, device="cuda")
    counts = {"chunk_gated_delta_rule": 0, "fused_recurrent_gated_delta_rule": 0}

    def run(wide):
        def counted(op):
            def call(*args, **kwargs):
                counts[op.__name__] += 1
                if not wide:
                    return op(*args, **kwargs)
                lift = {k: x.double() if hasattr(x, "double") else x for k, x in kwargs.items()}
                o, state = op(*args, **lift)
                return o.to(kwargs["v"].dtype), state

            return call

        for name in counts:
            monkeypatch.setattr(ours, name, counted(getattr(gdn_triton, name)))
        with ours.routed():
            layer.train().zero_grad()
            o = layer(x)[0]
            o.square().mean().backward()
            layer.eval()
            cache = utils.Cache()
            with torch.no_grad():
                steps = [layer(x[:, :100], past_key_values=cache, use_cache=True)[0]]
                for t in range(100, 104):
                    token = x[:, t : t + 1]
                    steps.append(layer(token, past_key_values=cache, use_cache=True)[0])
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        return {"o": o.detach(), "steps": torch.cat(steps, 1), **grads}

    monkeypatch.setenv("GDN_BACKEND", "triton")
    got = run(wide=False)
    assert counts == {"chunk_gated_delta_rule": 2, "fused_recurrent_gated_delta_rule": 4}
    monkeypatch.setenv("GDN_BACKEND", "reference")
    narrow, exact = run(wide=False), run(wide=True)
    # A gradient is a sum of terms that cancel, and goes through the layer's other sums, which are
    # float32 in all three: this many units of what a float32 product keeps, beside the budget.
    unit = 64 * Arithmetic(torch.float32, "cuda").unit
    for name, x in got.items():
        assert_within_budget(
            name, x, exact[name].to(FP64), narrow[name], dtype=torch.float32, unit=unit
        )
