"""The measuring scripts of the repository, as `narrowgauge bench` runs them."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE, HOUR = 60, 3600


@dataclass(frozen=True)
class Benchmark:
    """One run of `benchmarks/SCRIPT.py`.

    words: options of the run. quick: those of a small one, which shows that the script works, and whose figures say
    little; None: there is none, and why_not says why. limit_s: after which it is stopped. needs_gpu: left out where
    there is no CUDA device.
    """

    name: str
    script: str
    what: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ()
    limit_s: int = HOUR
    needs_gpu: bool = False
    why_not: str = ""


SEEDS = ("--seeds", "1")
DOWNLOADED = "it trains a model that is downloaded"
SHOWN = "parity shows that the script works"
SUITE = (
    Benchmark("import_time", "import_time", "seconds of `import narrowgauge`, over torch's", quick=("--repeats", "1")),
    Benchmark(
        "casts", "casts", "the casts of every recipe, against a copy of the same array, torch, torchao, bitsandbytes",
        quick=("--repeats", "3", "--peer-repeats", "2", "--values", str(1 << 20)),
    ),
    Benchmark(
        "linear", "linear", "forward and backward of a linear layer by every recipe, against torch and torchao",
        quick=("--size", "256", "--tokens", "256", "--repeats", "3", "--limit-s", "5"),
    ),
    Benchmark(
        "optimizer", "optimizer", "optimizer steps with 8-bit state, against torch, torchao and bitsandbytes",
        quick=("--matrices", "1", "--size", "512", "--small", "50", "--repeats", "3", "--limit-s", "30"),
    ),
    Benchmark(
        "sqnr", "sqnr", "signal to noise of a layer's products by every recipe, against its derivation",
        quick=("--size", "256", "--recipe", "fp8_current"),
    ),
    Benchmark(
        "memory", "memory", "bytes of parameters, gradients and states, and a step's peak, by every recipe",
        quick=("--no-peak", "--recipes", "narrow8"),
    ),
    Benchmark(
        "activation_memory", "activation_memory", "bytes saved for backward by FP8 layers", quick=("--batch", "2")
    ),
    Benchmark("state_error", "state_error", "signal to noise of optimizer states, by code", quick=("--steps", "2")),
    Benchmark(
        "reduction", "reduction", "what sums of gradients cost and lose by each way of adding them in 8 bits",
        quick=("--parts", "cost", "--repeats", "1"), limit_s=2 * HOUR,
    ),
    Benchmark(
        "communication", "communication", "bytes that gradients take on the wire",
        quick=("--preset", "tiny", "--no-memory"),
    ),
    Benchmark(
        "communication_fsdp", "communication_fsdp", "bytes of a step of sharded parameters", quick=("--steps", "1")
    ),
    Benchmark(
        "communication_tensor", "communication_tensor", "bytes of a tensor parallel step", quick=("--steps", "1")
    ),
    Benchmark(
        "communication_pipeline", "communication_pipeline", "bytes of a pipeline's step", quick=("--steps", "1")
    ),
    Benchmark(
        "two_nodes", "two_nodes", "steps of two nodes over a slow link", quick=None,
        why_not="it needs root, for network namespaces",
    ),
    Benchmark(
        "simulation", "simulation", "gpt-175b on 1,024 simulated ranks",
        quick=("--preset", "gpt-125m", "--shard", "2", "--tensor", "2"),
    ),
    Benchmark("plan", "plan", "predictions of memory, against runs", quick=("--shapes", "tiny")),
    Benchmark("rlhf_memory", "rlhf_memory", "bytes of RLHF's four models", quick=("--shape", "tiny")),
    Benchmark(
        "observation", "observation", "what observing a run costs, and that it changes no bit",
        quick=("--rounds", "1", "--steps", "2", "--recipes", "narrow8"),
    ),
    Benchmark(
        "report", "report", "opening the report of a long run",
        quick=("--steps", "500", "--layers", "20", "--every", "50", "--repeats", "1"),
    ),
    Benchmark(
        "guard", "guard", "injected faults, with the guard and without",
        quick=("--steps", "130", "--faults", "activations x 1000", "--repeats", "1", *SEEDS), limit_s=3 * HOUR,
    ),
    Benchmark(
        "tune", "tune", "chosen precision, against the hand rule", quick=("--small", "--seeds", "1"), limit_s=3 * HOUR
    ),
    Benchmark(
        "sft", "sft", "instruction tuning of SmolLM2-135M by three recipes", quick=None,
        why_not=DOWNLOADED, limit_s=2 * HOUR,
    ),
    Benchmark(
        "accelerate_bert", "accelerate_bert", "Accelerate's FP8 benchmark by our recipes", quick=None,
        why_not=DOWNLOADED, limit_s=3 * HOUR,
    ),
    Benchmark(
        "grpo", "grpo", "rewards of GRPO on sums", quick=None,
        why_not=DOWNLOADED, limit_s=3 * HOUR,
    ),
    Benchmark(
        "training", "training", "tokens/s and loss of the default GPT by narrow8, against torch's bfloat16 autocast",
        words=("--full",), quick=("--repeats", "1"), limit_s=3 * HOUR,
    ),
    Benchmark(
        "ablations", "ablations", "validation loss of a small GPT, one narrow format at a time", words=SEEDS,
        quick=("--rows", "exp_avg E4M3", "--steps", "1", *SEEDS), limit_s=4 * HOUR,
    ),
    Benchmark(
        "parallel", "parallel", "validation loss of a small GPT on two ranks, against one",
        quick=("--layouts", "data 2", "--recipes", "narrow8", "--steps", "1", *SEEDS), limit_s=6 * HOUR,
    ),
    Benchmark(
        "parity", "parity", "validation loss of a small GPT by every recipe, against float32",
        quick=("--recipes", "fp32", "narrow8", "--steps", "1", *SEEDS), limit_s=8 * HOUR,
    ),
    Benchmark(
        "parity-tiles", "parity", "the same, recipes with a scale for each tile", words=("--group", "tiles"),
        quick=None, why_not=SHOWN, limit_s=8 * HOUR,
    ),
    Benchmark(
        "parity-state", "parity", "the same, recipes of 8-bit state", words=("--group", "state"), quick=None,
        why_not=SHOWN, limit_s=8 * HOUR,
    ),
    Benchmark(
        "parity-moe", "parity", "the same, a mixture of experts",
        words=("--model", "moe", "--steps", "300", "--recipes", "fp32", "fp8_block", "mxfp8"), quick=None,
        why_not=SHOWN, limit_s=4 * HOUR,
    ),
    Benchmark(
        "gpu_check", "gpu_check", "the CUDA path, against the emulation", quick=(), limit_s=10 * MINUTE, needs_gpu=True
    ),
)  # fmt: skip
