"""How fast is generation with the key-value cache, beside no cache and beside transformers?

Question: new tokens per second of CPU time for one row that ends at a given context length, greedy, float32, one thread:
`titan_train.generation.generate` with its cache, the same without a cache, and ``generate`` of transformers' model of
the same weights (its dynamic cache).

Method: one process; the contestants take turns, and each round gives ratios. A turn makes one token and then all of them, the
prompt's forward included in both: the difference, over the further tokens, is the time of a token. Without a cache there is
one turn, in the first round. All must give the same tokens, which is checked.

Output: medians over the rounds. The last line is one JSON object.

Limits: a small model on a CPU; nothing here says anything about GPUs. A shared machine is noisy: CPU time and paired turns
are for that.

    OMP_NUM_THREADS=1 python benchmarks/generation_throughput.py --rounds 5
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from titan_train.config.model import ModelConfig
from titan_train.generation import generate
from titan_train.models import build_model, init_for
from titan_train.models.registry import family_of
from transformers import LlamaConfig, LlamaForCausalLM


def models(name: str):
    """Our model and transformers' with the same weights, far enough from zero that greedy texts do not hang on ties."""
    ours = build_model(ModelConfig(name=name), vocab_size=4096, device="cpu").requires_grad_(False).eval()
    init = init_for(ours)
    for number, (fqn, parameter) in enumerate(ours.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(number))
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    hf = family_of(ours).load_hf()
    theirs = LlamaForCausalLM(LlamaConfig(**hf.config_of(ours.args), max_position_embeddings=4096)).float().eval()
    state = {}
    for native, parameter in ours.named_parameters():
        pair, letters = hf.key_map.match_native(native)
        state[pair.hf.format(**letters)] = parameter.data
    missing = theirs.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    theirs.tie_weights()
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_small")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = models(arguments.model)
    length = arguments.context - arguments.new
    prompt = torch.randint(4096, (length,), generator=torch.Generator().manual_seed(0)).tolist()

    def hf(new: int) -> list[int]:
        found = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.int64), do_sample=False,
            max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return found[0, length:].tolist()

    runs = {
        "cache": lambda new: generate(ours, [prompt], max_new_tokens=new)[0],
        "no_cache": lambda new: generate(ours, [prompt], max_new_tokens=new, use_cache=False)[0],
        "transformers": hf,
    }
    texts = {name: run(arguments.new) for name, run in runs.items()}  # warm-up, and the same text of all
    assert texts["cache"] == texts["no_cache"] == texts["transformers"], texts
    whole: dict[str, list[float]] = {name: [] for name in runs}
    token: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(arguments.rounds):
        for name in [*runs][number % 3 :] + [*runs][: number % 3]:
            if name == "no_cache" and number:
                continue
            first, all_of_them = (_seconds(runs[name], new) for new in (1, arguments.new))
            whole[name].append(all_of_them)
            token[name].append((all_of_them - first) / (arguments.new - 1))
    result = {
        "benchmark": "generation_throughput",
        "tokens_per_cpu_s": {name: round(arguments.new / statistics.median(times), 1) for name, times in whole.items()},
        "cpu_ms_per_token": {name: round(1e3 * statistics.median(times), 2) for name, times in token.items()},
        "cache_over_no_cache": round(_ratio(whole["no_cache"], whole["cache"][:1]), 2),
        "cache_over_transformers": round(_ratio(whole["transformers"], whole["cache"]), 2),
        "token_over_transformers": round(_ratio(token["transformers"], token["cache"]), 2),
        "model": arguments.model, "context": arguments.context, "new_tokens": arguments.new, "rounds": arguments.rounds,
        "device": "cpu, one thread",
        "versions": {name: version(name) for name in ("torch", "transformers", "titan-train")},
    }  # fmt: skip
    print(json.dumps(result))


def _seconds(run: Callable[[int], object], new: int) -> float:
    start = time.process_time()
    run(new)
    return time.process_time() - start


def _ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


if __name__ == "__main__":
    main()
