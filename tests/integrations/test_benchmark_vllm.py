"""The benchmark of vLLM end to end, as far as it goes without vLLM: rows of answers, weights, turns
on the GPU. The engine itself needs a GPU and vLLM."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import page, vllm_calls, vllm_engine
from benchmarks.vllm_calls import Job


def scores(logprobs: list[float], likeliest: list[int]) -> dict[str, Any]:
    return {"logprobs": logprobs, "likeliest": likeliest}


def greedy(tokens: list[list[int]], logprob: float) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": [[logprob] * len(x) for x in tokens]}


def test_agreement() -> None:
    """By hand: a difference of 0.5 in one of two tokens; tokens that differ from the third on."""
    x, y = scores([-1.0, -2.0], [3, 4]), scores([-1.5, -2.0], [3, 5])
    assert vllm_engine.score_agreement(x, y) == {"difference": 0.25, "likeliest": 0.5}
    found = vllm_engine.greedy_agreement(
        greedy([[1, 2, 3, 4], [5, 6, 7, 8]], -1.0), greedy([[1, 2, 9, 4], [5, 6, 7, 8]], -1.25)
    )
    assert found == {"sequences": 0.5, "before": 6 / 8, "difference": 0.25}


def test_rows_and_table(tmp_path: Path) -> None:
    """A way whose engine did not start has no number, and its reason is below the table."""
    calls = {**vllm_calls.PROMPTS, **vllm_calls.DECODES}
    rates = {name: {"seconds": [1.0], "rate": 2000.0} for name in calls}
    tokens = greedy([[1, 2]], -1.0)
    given = scores([-1.0, -2.0], [3, 4])
    answer = {
        **{part: rates for part in vllm_engine.PARTS},
        **{"greedy": tokens, "scores": given, "silent": scores([-4.0, -2.0], [1, 4])},
        "launches": {"prompt": 100, "decode": 50.0},
    }
    failed = {"failed": "start: ImportError: no"}
    answers = {
        Job("speed", "Triton", "4/8"): answer,
        Job("speed", "gdn_triton", "4/8"): failed,
        Job("drafts", "Triton", "4/8"): {"greedy": tokens, "eager": rates},
        Job("invariant", "gdn_triton", "4/8"): {
            "alone": {"scores": given, "greedy": tokens},
            "among 8": {"scores": given, "greedy": greedy([[1, 3]], -1.0)},
        },
    }
    rows = vllm_engine.rows_of(answers)
    head = {"kind": "header", "date": "today", "command": "python -m benchmarks.vllm_engine"}
    head |= {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "x", "implementations": {}}
    path = tmp_path / "a_gpu.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in (head, *rows)))
    assert page.rows_page(path).startswith("# vLLM end to end\n") and page.all_ratios([path]) == []
    assert all(json.dumps(row) for row in rows) and {row["kind"] for row in rows} == {"engine"}
    assert page.kinds_table([path]) == ""  # no prompts from a cache
    empty = {"Triton": {"seconds": 1.5, "cached": [0, 64]}, "gdn_triton": failed}
    cached = {"kind": "engine", "heads": "4/8", "what": "8 prompts, empty", "results": empty}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(cached)}\n")
    assert page.kinds_table([path]) == (
        "| heads | what | Triton | gdn_triton |\n|---|---|---|---|\n"
        "| 4/8 | 8 prompts, empty | 1500 ms (64 tokens cached) | - |\n"
    )
    text = vllm_engine.tables(rows, ["Triton", "gdn_triton"])
    assert "\n| 4/8 | 8 prompts of 4096 | 2.00 | - |" in text
    assert "\n| 4/8 | launches, decode | 50 | - |" in text
    assert "\n| 4/8 | scores, against no Gated DeltaNet | 1.5000 (50.0%) | - |" in text
    assert "\n| 4/8 | greedy, drafts, against none | 0.0000 (100.0%, 100% of sequences) |" in text
    assert "\n| 4/8 | a prompt alone and among 8 | - | other bits (0.0000) |" in text
    assert "\ngdn_triton, 4/8, 8 prompts of 4096: start: ImportError: no" in text


def test_weights() -> None:
    """The same name has the same weights anywhere, and the layer's output is not tiny."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_attn = torch.nn.Module()
            part: Any = self.linear_attn
            part.A_log = torch.nn.Parameter(torch.empty(64))
            part.dt_bias = torch.nn.Parameter(torch.empty(64))
            part.norm = torch.nn.LayerNorm(8, bias=False)
            part.out_proj = torch.nn.Linear(400, 300, bias=False, dtype=torch.bfloat16)
            self.input_layernorm = torch.nn.LayerNorm(8, bias=False)

    x, y = Layer(), Layer()
    for layer in (x, y):
        vllm_calls.scale_weights(layer)
    for a, b in zip(x.parameters(), y.parameters(), strict=True):
        assert torch.equal(a, b)
    part: Any = x.linear_attn
    assert part.A_log.exp().max() > 10 and part.dt_bias.max() < 0
    assert (part.norm.weight == 1).all() and not x.input_layernorm.weight.any()
    assert part.out_proj.weight.float().std().item() == pytest.approx(400**-0.5, rel=0.02)
    vllm_calls.silence(x)
    assert not part.out_proj.weight.any() and part.A_log.any()


def test_turns(tmp_path: Path) -> None:
    """Whoever measures is alone: it waits until all have started, and the others wait for it."""
    events: list[str] = []
    both = threading.Barrier(2)

    def run(name: str, start: float) -> None:
        with vllm_calls.turns(tmp_path / "lock") as alone:
            both.wait()
            time.sleep(start)
            events.append("started")
            alone()
            events.append(f"begin {name}")
            time.sleep(0.1)
            events.append(f"end {name}")

    threads = [threading.Thread(target=run, args=x) for x in (("fast", 0.0), ("slow", 0.2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:2] == ["started", "started"]
    first, second = events[2].split()[1], events[4].split()[1]
    assert events[2:] == [f"begin {first}", f"end {first}", f"begin {second}", f"end {second}"]


def test_scores_of_requests() -> None:
    """The log probability of each given token but the first, and the token of rank 1."""

    def entry(logprob: float, rank: int) -> SimpleNamespace:
        return SimpleNamespace(logprob=logprob, rank=rank)

    request = SimpleNamespace(
        prompt_token_ids=[5, 6, 7],
        prompt_logprobs=[None, {6: entry(-2.0, 9), 1: entry(-0.5, 1)}, {7: entry(-0.1, 1)}],
    )
    assert vllm_calls.scores([request]) == scores([-2.0, -0.1], [1, 7])


def test_a_start_that_fails_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(vllm_calls, "start", broken)
    answer = vllm_calls.work(Job("speed", "Triton", "4/8"), tmp_path)
    assert answer == {"failed": "start: RuntimeError: no engine"}
    assert "does not start" in capsys.readouterr().out


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = vllm_engine.parse(["--ways", "Triton", "gdn_triton", "--kinds", "speed", "cached"])
    jobs = vllm_engine.jobs_of(options)
    assert [(x.kind, x.heads) for x in jobs if x.way == "Triton"] == [
        *(("speed", "16/32"), ("speed", "4/8"), ("cached", "16/32")),
    ]
    assert len({job.name for job in jobs}) == len(jobs) == 6
    assert vllm_calls.WITH_WINDOW not in vllm_engine.parse([]).ways
    chosen = vllm_engine.parse(["--ways", vllm_calls.WITH_WINDOW, "--kinds", "speed"])
    assert len(vllm_engine.jobs_of(chosen)) == 2
    with pytest.raises(SystemExit):
        vllm_engine.parse(["--resume"])
    assert "--resume needs --logs" in capsys.readouterr().err


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="a CUDA GPU"):
        vllm_engine.main([])


def test_each_repeat_finds_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that caches whole prompts: before each longer prompt it holds the shorter ones."""
    held: list[int] = []
    engine = SimpleNamespace(reset_prefix_cache=held.clear)

    def generate(of: Any, given: list[Any], tokens: int, **options: Any) -> list[Any]:
        assert of is engine and len(given) == 8
        count = len(given[0]["prompt_token_ids"])
        cached = max((n for n in held if n <= count), default=0)
        held.append(count)
        output = SimpleNamespace(token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=-1.0)}])
        return [SimpleNamespace(outputs=[output], num_cached_tokens=cached)] * 8

    monkeypatch.setattr(vllm_calls, "generate", generate)
    parts = vllm_calls.cached_parts(engine, Job("cached", "Triton", "4/8", repeats=3))
    found = {name: part()["cached"][0] for name, part in parts.items()}
    assert found == {"empty": 0, "again": 6096, "longer, cached": 6096, "longer, empty": 0}
