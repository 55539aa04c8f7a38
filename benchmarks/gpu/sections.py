"""What `run.py` runs, most valuable first: one value per section.

A section is one command in a process of its own, so that a crash, a hang or an out-of-memory of one leaves the others
alone. The last JSON object in its output is its result; long ones print it after each piece, so that a section that is ended
keeps what it measured. `{workers}` in a command stands for pytest-xdist's processes, where it is installed. The expected
seconds of all sections together fit the default budget, 800 s.
"""

from dataclasses import dataclass

PYTEST = "-m pytest -q -c benchmarks/gpu/pytest.ini --rootdir . -p no:titan_testing -p titan_testing.plugin -p no:cacheprovider"

_APP = ("zstandard", "xxhash", "sentencepiece", "tiktoken", "pydantic", "tomli_w")
"""What titan-train needs beside torch."""


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
    expected_s: int = 15
    """Seconds that it is expected to take: it is not started with less. An H200 has run the first seven."""
    limit_s: int = 150
    """Seconds after which the section is ended."""
    gpus: int = 1
    """Devices without which the section is skipped."""


SECTIONS = (
    Section(
        "run",
        "Does the Trainer train here: bf16, resumed, CUDA graphs, offload, compile, float8, experts, the command, an 8B shape?",
        "benchmarks/gpu/product.py --device cuda",
        "benchmarks/gpu/product.py --device cpu --tiny",
        needs=_APP,
        expected_s=110,
        limit_s=220,
    ),
    Section(
        "layouts",
        "Do recipes on one rank, and layouts of two and four that share the device, give the CPU's losses and gradients?",
        "benchmarks/gpu/layouts.py --device cuda",
        "benchmarks/gpu/layouts.py --device cpu --sizes 1 --only SGD",
        needs=_APP,
        expected_s=100,
        limit_s=400,
    ),
    Section(
        "commands",
        "Do sampling, evaluation, export, serving, traces, calibration and the shipped starting points work here?",
        "benchmarks/gpu/commands.py --device cuda",
        "benchmarks/gpu/commands.py --device cpu --tiny --only images",
        needs=_APP,
        expected_s=100,
        limit_s=300,
    ),
    Section(
        "multi",
        "Does the same run give the same losses on two GPUs: FSDP2, DDP, tensor, context and pipeline parallelism, recorded?",
        "benchmarks/gpu/product.py --device cuda --ranks 2",
        "benchmarks/gpu/product.py --device cpu --tiny --ranks 2 --only fsdp zbv",
        needs=_APP,
        expected_s=120,
        limit_s=300,
        gpus=2,
    ),
    Section(
        "transports",
        "Do the tests of pipeline messages over NCCL pass?",
        f"{PYTEST} --gpu -m multi_gpu packages/titan-pipeline/tests/test_transports.py",
        f"{PYTEST} --collect-only -m multi_gpu packages/titan-pipeline/tests/test_transports.py",
        expected_s=20,
        gpus=2,
    ),
    Section(
        "kernels",
        "Does every float8 kernel give the reference's bits on this device?",
        f"{PYTEST} {{workers}} --gpu -m gpu packages/titan-fp8/tests/kernels/test_on_device.py",
        f"{PYTEST} {{workers}} packages/titan-fp8/tests/test_stats.py",
        expected_s=50,
        limit_s=300,
    ),
    Section(
        "paths",
        "Do the models, attention, experts, float8 layers and FSDP's float8 gather compute on the device what the CPU does?",
        "benchmarks/gpu/correctness.py --device cuda",
        "benchmarks/gpu/correctness.py --device cpu --tiny",
        expected_s=40,
    ),
    Section(
        "models",
        "Tokens/s, MFU and memory of an 8B-shaped model in bfloat16 and float8, eager, beside a hand-written FSDP2 loop",
        "benchmarks/gpu_llama.py --layers 4 --seq-len 8192 --rounds 1 --steps 5 --build eager",
        "benchmarks/gpu_llama.py --check",
        needs=_APP,
        expected_s=45,
    ),
    Section(
        "tests",
        "Do the CUDA tests of attention backends, checkpoint staging, the loader and memory statistics pass?",
        f"{PYTEST} --gpu -m gpu packages/titan-cp/tests/test_backends.py packages/titan-ckpt/tests/test_async.py "
        "packages/titan-train/tests/data/test_loader.py packages/titan-train/tests/observe/test_memory.py",
        f"{PYTEST} packages/titan-cp/tests/test_backends.py -k cpu_flash_gives",
        needs=_APP,
        expected_s=30,
    ),
    Section(
        "compiled",
        "The same 8B-shaped models under torch.compile, beside torchtitan's recipe (FSDP2, compile, torchao)",
        "benchmarks/gpu_llama.py --layers 4 --seq-len 8192 --rounds 1 --steps 5 --build compiled",
        "benchmarks/gpu_llama.py --check",
        needs=_APP,
        expected_s=90,
        limit_s=200,
    ),
    Section(
        "linears",
        "How much faster than bfloat16 is a float8 linear layer, forward and backward, host time included?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections linears --shapes 8b --repeats 8",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections linears",
        expected_s=35,
    ),
    Section(
        "casts",
        "Which share of the copy bandwidth do the casts reach, and are they exact?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections casts --repeats 12",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections casts",
        expected_s=25,
    ),
    Section(
        "head",
        "What do the head and its loss cost in chunks of tokens, and with whole logits?",
        "benchmarks/gpu/head_loss.py --device cuda",
        "benchmarks/gpu/head_loss.py --device cpu --tiny",
        needs=_APP,
    ),
    Section(
        "attention",
        "Causal, packed, packed with a dense mask, and latent attention: time and memory",
        "benchmarks/gpu/attention.py --device cuda",
        "benchmarks/gpu/attention.py --device cpu --tiny",
    ),
    Section(
        "choices",
        "Which kernels of fla and torch equal plain torch here, for state layers and windowed or packed attention, and how fast?",
        "benchmarks/gpu/kernel_choices.py --device cuda",
        "benchmarks/gpu/kernel_choices.py --device cpu --tiny",
        expected_s=15,
        limit_s=240,
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
        "grouped",
        "How much faster than bfloat16 are grouped float8 products of experts?",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections grouped --repeats 8",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections grouped",
        expected_s=20,
    ),
    Section(
        "fsdp",
        "What do the float8 gather's cast, its byte transpose and a gathered step cost on one rank?",
        "benchmarks/gpu/fsdp_float8.py --device cuda",
        "benchmarks/gpu/fsdp_float8.py --device cpu --tiny",
    ),
    Section(
        "stack",
        "A stack of eager 8B blocks in every recipe: speed, memory, share of time in casts",
        "packages/titan-fp8/benchmarks/on_gpu.py --sections stack --repeats 5",
        "packages/titan-fp8/benchmarks/on_gpu.py --check --sections stack",
        expected_s=20,
    ),
)
