"""What `run.py` runs, most valuable first: one value per section.

A section is one command in a process of its own, so that a crash, a hang or an out-of-memory of one leaves the others
alone. Its last line of output, where that is a JSON object, is its result. `{tiny}` in a command is replaced by the
arguments that make it run on a CPU in seconds.
"""

from dataclasses import dataclass

PYTEST = "-m pytest -q -c benchmarks/gpu/pytest.ini --rootdir . -p no:titan_testing -p titan_testing.plugin -p no:cacheprovider"


@dataclass(frozen=True)
class Section:
    """One question to the device."""

    name: str
    question: str
    command: str
    """Arguments of the Python interpreter, run from the root of the repository."""
    on_cpu: str
    """The same for ``--device cpu --tiny``."""
    needs: tuple[str, ...] = ()
    """Modules without which the section is skipped, beside torch, numpy and pytest."""
    limit_s: int = 150
    """Seconds after which the section is ended."""


SECTIONS = (
    Section(
        "kernels",
        "Does every float8 kernel give the reference's bits on this device?",
        f"{PYTEST} --gpu -m gpu packages/titan-fp8/tests/kernels/test_on_device.py",
        f"{PYTEST} packages/titan-fp8/tests/test_stats.py",
    ),
    Section(
        "paths",
        "Do the models, attention, experts, float8 layers and FSDP's float8 gather compute on the device what the CPU does?",
        "benchmarks/gpu/correctness.py --device cuda",
        "benchmarks/gpu/correctness.py --device cpu --tiny",
    ),
    Section(
        "tests",
        "Do the CUDA tests of attention backends, checkpoint staging, the loader and memory statistics pass?",
        f"{PYTEST} --gpu -m gpu packages/titan-cp/tests/test_backends.py packages/titan-ckpt/tests/test_async.py "
        "packages/titan-train/tests/data/test_loader.py packages/titan-train/tests/observe/test_memory.py",
        f"{PYTEST} packages/titan-cp/tests/test_backends.py -k cpu_flash_gives",
        needs=("zstandard", "xxhash", "sentencepiece", "tiktoken", "pydantic", "tomli_w"),
    ),
    Section(
        "models",
        "Tokens/s, MFU and memory of an 8B-shaped model in bfloat16 and float8, eager, beside a hand-written FSDP2 loop",
        "benchmarks/gpu_llama.py --layers 4 --seq-len 8192 --rounds 1 --steps 5 --build eager",
        "benchmarks/gpu_llama.py --check",
        needs=("pydantic", "tomli_w", "zstandard", "xxhash"),
    ),
    Section(
        "linears",
        "How much faster than bfloat16 is a float8 linear layer, forward and backward, host time included?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections linears --shapes 8b --repeats 8",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections linears",
    ),
    Section(
        "compiled",
        "The same 8B-shaped models under torch.compile, beside torchtitan's recipe (FSDP2, compile, torchao)",
        "benchmarks/gpu_llama.py --layers 4 --seq-len 8192 --rounds 1 --steps 5 --build compiled",
        "benchmarks/gpu_llama.py --check",
        needs=("pydantic", "tomli_w", "zstandard", "xxhash"),
    ),
    Section(
        "casts",
        "Which share of the copy bandwidth do the casts reach, and are they exact?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections casts --repeats 12",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections casts",
    ),
    Section(
        "fsdp",
        "What do the float8 gather's cast, its byte transpose and a gathered step cost on one rank?",
        "benchmarks/gpu/fsdp_float8.py --device cuda",
        "benchmarks/gpu/fsdp_float8.py --device cpu --tiny",
    ),
    Section(
        "attention",
        "Causal, packed, packed with a dense mask, and latent attention: time and memory",
        "benchmarks/gpu/attention.py --device cuda",
        "benchmarks/gpu/attention.py --device cpu --tiny",
    ),
    Section(
        "grouped",
        "How much faster than bfloat16 are grouped float8 products of experts?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections grouped --repeats 8",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections grouped",
    ),
    Section(
        "ring",
        "Which share of one flash call's speed is left when attention is cut into the steps of a ring?",
        "packages/titan-cp/benchmarks/simulated_ring.py --tokens 8192 --ranks 2 8 --repeats 5",
        "packages/titan-cp/benchmarks/simulated_ring.py --device cpu --dtype float32 --tokens 64 --ranks 2 --heads 4 "
        "--kv-heads 2 --head-dim 16 --repeats 2",
    ),
    Section(
        "staging",
        "How long does an asynchronous save hold the training step, against a plain copy to pinned memory?",
        "benchmarks/gpu/staging.py --device cuda",
        "benchmarks/gpu/staging.py --device cpu --tiny",
        needs=("zstandard", "xxhash"),
    ),
    Section(
        "stack",
        "A stack of eager 8B blocks in every recipe: speed, memory, share of time in casts",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections stack --repeats 5",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections stack",
    ),
)
