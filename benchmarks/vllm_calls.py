"""What one process of benchmarks.vllm_engine does: it starts vLLM on a random Qwen3-Next, waits
until the other processes have started theirs, and measures while they wait.

vLLM is imported by `start` alone, after the environment that it reads has been set.
"""

import fcntl
import importlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer import launches
from benchmarks.measure import Device, Record, first_line
from benchmarks.shapes import Random, gate_parameters

OURS = "gdn_triton"
WITH_WINDOW = "gdn_triton, with a window"
# Each way through the layers, with vLLM's option for its prefill. Ours leaves vLLM's choice alone,
# since vLLM plans checkpoints of a prefill only where it chose FlashInfer.
WAYS = {"FlashInfer": "flashinfer", "Triton": "triton", OURS: "auto", WITH_WINDOW: "auto"}
LAYERS = 12
TOKENS_A_STEP = 16384
GIB = 1 << 30
CACHE_GIB = {
    "speed": 8,
    "cached": 4,
    "drafts": 6,
    "invariant": 4,
}  # of 32 heads' states, keys and values

# Tokens of each prompt, and tokens to generate.
PROMPTS = {
    "8 prompts of 4096": ([4096] * 8, 1),
    "1 prompt of 32768": ([32768], 1),
    "9 prompts of 42 to 9000": ([3001, 47, 1500, 9000, 500, 301, 101, 42, 1800], 1),
}
DECODES = {
    "decode of 1": ([128], 64),
    "decode of 64": ([64] * 64, 64),
    "decode of 256": ([32] * 256, 32),
}


class Job(NamedTuple):
    """kind: a key of `KINDS`. heads: "H/HV" of the Gated DeltaNet layers."""

    kind: str
    way: str
    heads: str
    attention: str = "FLASH_ATTN"
    repeats: int = 5

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.way}_{self.heads.replace('/', '_')}"


# ------------------------------------------------------------------------------------- the engine


def model_config(heads: str, layers: int = LAYERS) -> dict[str, Any]:
    """Qwen3-Next at its width, with few layers and, but for one layer, no experts: vLLM needs one
    layer that has them."""
    H, HV = map(int, heads.split("/"))
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": H,
        "linear_num_value_heads": HV,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": list(range(1, layers)),
        "max_position_embeddings": 65536,
        "num_nextn_predict_layers": 1,
    }


def scale_weights(model: torch.nn.Module) -> None:
    """Random weights of a size at which every layer moves the logits; vLLM's own dummy weights are
    of 1e-3, and the Gated DeltaNet layers then add nothing. The same name and shape gives the same
    weights in every process."""
    for name, weight in model.named_parameters():
        rand = Random(zlib.crc32(name.encode()), weight.device)
        if name.endswith("A_log"):
            made = gate_parameters("model", weight.shape[0], rand)[0].clamp(min=1e-3).log()
        elif name.endswith("dt_bias"):
            made = gate_parameters("model", weight.shape[0], rand)[1]
        elif weight.dim() == 1:
            # Norms multiply by 1 + weight, but for the gated norm.
            made = torch.full_like(weight, float(name.endswith("linear_attn.norm.weight")))
        elif "conv1d" in name:
            made = 0.5 * rand.normal(*weight.shape)
        elif "embed_tokens" in name:
            made = rand.normal(*weight.shape)
        else:
            # 3: some tokens are much likelier than others.
            size = 3.0 if "lm_head" in name else 1.0
            made = size * weight.shape[-1] ** -0.5 * rand.normal(*weight.shape)
        with torch.no_grad():
            weight.copy_(made)


def silence(model: torch.nn.Module) -> None:
    """The Gated DeltaNet layers add nothing from now on."""
    for name, weight in model.named_parameters():
        if name.endswith("linear_attn.out_proj.weight"):
            with torch.no_grad():
                weight.zero_()


def without_graphs(worker: Any) -> None:
    """Steps run eagerly from now on."""
    worker.model_runner.cudagraph_manager._graphs_captured = False


def start(job: Job, folder: Path) -> Any:
    """The engine in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if job.kind == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = os.environ["GDN_BATCH_INVARIANT"] = "1"
    if job.way in (OURS, WITH_WINDOW):
        adapter = importlib.import_module("gdn_triton.integrations.vllm")
        adapter.register(window=job.way == WITH_WINDOW)
        print(adapter.status(), flush=True)
    vllm: Any = importlib.import_module("vllm")
    transformers: Any = importlib.import_module("transformers")
    HV = int(job.heads.split("/")[1])
    path = folder / f"model_{job.name}"
    config = model_config(job.heads)
    transformers.Qwen3NextConfig(**config).save_pretrained(path)
    graphs: dict[str, Any] = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 64, 256],
    }
    options: dict[str, Any] = {"compilation_config": graphs}
    if job.kind != "speed":
        options = {"enforce_eager": True}
    if job.kind == "drafts":
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    if WAYS[job.way] != "auto":
        options["gdn_prefill_backend"] = WAYS[job.way]
    engine = vllm.LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=36000,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_num_seqs=256,
        enable_prefix_caching=job.kind == "cached",
        attention_backend=job.attention,
        moe_backend="triton",
        # Several engines share the GPU, so that none may size its cache by what is free.
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=max(2, CACHE_GIB[job.kind] * HV // 32) * GIB,
        seed=0,
        **options,
    )
    engine.apply_model(scale_weights)
    return engine


# ---------------------------------------------------------------------------------- measurements


def prompts(lengths: Sequence[int], seed: int = 0) -> list[dict[str, list[int]]]:
    rand = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 32000, (n,), generator=rand).tolist() for n in lengths]
    return [{"prompt_token_ids": ids} for ids in made]


def generate(
    engine: Any, given: list[dict[str, list[int]]], tokens: int, **options: Any
) -> list[Any]:
    """Greedy tokens after each prompt."""
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )
    found: list[Any] = engine.generate(given, sampling, use_tqdm=False)
    return found


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def rates(
    engine: Any, calls: dict[str, tuple[list[int], int]], repeats: int, warm: bool = True
) -> dict[str, Record]:
    """Tokens a second of each call: of its prompts where it generates one token each, else of what
    it generates, the short prompts included in the time. The fastest of the repeats counts: the
    host's share of a step varies by a factor of two on a virtual machine."""
    found: dict[str, Record] = {}
    for name, (lengths, tokens) in calls.items():
        call = partial(generate, engine, prompts(lengths), tokens)
        if warm:
            call()
        times = seconds(call, repeats)
        count = sum(lengths) if tokens == 1 else tokens * len(lengths)
        found[name] = {"seconds": times, "rate": count / min(times)}
    return found


def scores(found: Sequence[Any]) -> Record:
    """Of each token of the prompts its log probability, and the likeliest token there."""
    of_given, likeliest = [], []
    for request in found:
        after_first = zip(request.prompt_token_ids[1:], request.prompt_logprobs[1:], strict=True)
        for token, entries in after_first:
            of_given.append(entries[token].logprob)
            likeliest.append(min(entries, key=lambda x: entries[x].rank))
    return {"logprobs": of_given, "likeliest": likeliest}


def generated(found: Sequence[Any]) -> Record:
    """The greedy tokens of each prompt and their log probabilities."""
    outputs = [request.outputs[0] for request in found]
    tokens = [list(map(int, x.token_ids)) for x in outputs]
    return {
        "tokens": tokens,
        "logprobs": [
            [entries[token].logprob for token, entries in zip(ids, x.logprobs, strict=True)]
            for ids, x in zip(tokens, outputs, strict=True)
        ],
    }


def count_launches(engine: Any) -> Record:
    """Kernels, copies and fills of a step of 4096 tokens of a prompt, and of a decode step of 64
    sequences, without graphs."""
    device = Device(torch.device("cuda"))
    one = launches(partial(generate, engine, prompts([4096]), 1), device)
    few, more = (
        launches(partial(generate, engine, prompts([64] * 64), n), device) for n in (2, 10)
    )
    return {"prompt": one, "decode": None if few is None or more is None else (more - few) / 8}


Parts = dict[str, Callable[[], Any]]


def speed_parts(engine: Any, job: Job) -> Parts:
    scored = prompts([2048] * 8, seed=2)

    def eager() -> dict[str, Record]:
        engine.collective_rpc(without_graphs)
        return rates(engine, DECODES, max(1, job.repeats // 2), warm=False)

    def silent() -> Record:
        engine.apply_model(silence)
        return scores(generate(engine, scored, 1, prompt_logprobs=1))

    return {
        "prompts": lambda: rates(engine, PROMPTS, job.repeats),
        "graphs": lambda: rates(engine, DECODES, job.repeats),
        "greedy": lambda: greedy_of_64(engine),
        "eager": eager,
        "scores": lambda: scores(generate(engine, scored, 1, prompt_logprobs=1)),
        "launches": lambda: count_launches(engine),
        "silent": silent,
    }


def greedy_of_64(engine: Any) -> Record:
    return generated(generate(engine, prompts([256] * 64, seed=1), 64, logprobs=0))


def cached_parts(engine: Any, job: Job) -> Parts:
    """Prompts that begin alike and go on apart: into an empty cache, then from it, then longer
    ones, from the cache and without it. Each is asked several times, and the fastest counts."""
    common = prompts([3000], seed=3)[0]["prompt_token_ids"]
    rest = [x["prompt_token_ids"] for x in prompts([6000] * 8, seed=4)]

    def ask(tokens: int) -> list[Any]:
        asked = [{"prompt_token_ids": common + ids[:tokens]} for ids in rest]
        return generate(engine, asked, 32, logprobs=0)

    def timed(tokens: int, before: Callable[[], Any]) -> Record:
        times: list[float] = []
        for _ in range(job.repeats):
            before()
            begin = time.perf_counter()
            found = ask(tokens)
            times.append(time.perf_counter() - begin)
        cached = [x.num_cached_tokens for x in found]
        return {**generated(found), "cached": cached, "seconds": min(times)}

    def shorter_cached() -> None:
        engine.reset_prefix_cache()
        ask(3096)

    def compiled() -> Record:
        ask(1096)
        return timed(3096, engine.reset_prefix_cache)

    return {
        "empty": compiled,
        "again": lambda: timed(3096, lambda: None),
        "longer, cached": lambda: timed(5000, shorter_cached),
        "longer, empty": lambda: timed(5000, engine.reset_prefix_cache),
    }


def drafts_parts(engine: Any, job: Job) -> Parts:
    calls = {"decode of 64": DECODES["decode of 64"]}
    return {
        "greedy": lambda: greedy_of_64(engine),
        "eager": lambda: rates(engine, calls, job.repeats),
    }


def invariant_parts(engine: Any, job: Job) -> Parts:
    """One prompt alone, and among others that fit into one step with it."""
    one, *others = prompts(PROMPTS["9 prompts of 42 to 9000"][0], seed=5)

    def first(given: list[dict[str, list[int]]]) -> Record:
        scored = generate(engine, given, 1, prompt_logprobs=1)[:1]
        return {
            "scores": scores(scored),
            "greedy": generated(generate(engine, given, 64, logprobs=0)[:1]),
        }

    return {"alone": lambda: first([one]), "among 8": lambda: first([one, *others])}


KINDS: dict[str, Callable[[Any, Job], Parts]] = {
    "speed": speed_parts,
    "cached": cached_parts,
    "drafts": drafts_parts,
    "invariant": invariant_parts,
}


@contextmanager
def turns(lock: Path) -> Iterator[Callable[[], None]]:
    """Around a process that shares the GPU. The function that it gives waits until no process is
    starting or measuring; from then on this one measures."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        def alone() -> None:
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.flock(file, fcntl.LOCK_EX)

        yield alone


def work(job: Job, folder: Path) -> Record:
    """Everything of a job; a part that fails is recorded with its error, and so is a start."""
    answer: Record = {}
    with turns(folder / "lock") as alone:
        begin = time.perf_counter()
        try:
            engine = start(job, folder)
        except Exception as error:
            print(f"{job.name} does not start: {error!r}", flush=True)
            return {"failed": f"start: {first_line(error)}"}
        answer["start"] = time.perf_counter() - begin
        alone()
        for name, part in KINDS[job.kind](engine, job).items():
            try:
                answer[name] = part()
            except Exception as error:
                print(f"{job.name}, {name}: {error!r}", flush=True)
                answer[name] = {"failed": first_line(error)}
            (folder / f"{job.name}.json").write_text(json.dumps(answer))
    return answer
