"""Read a GGUF file back, without anything of the code that trained or wrote it.

`GgufModel` computes logits from the tensors that gguf's own reader dequantizes, by the settings in the file's metadata, as
llama.cpp's graphs of the architectures ``llama``, ``qwen3``, ``qwen3moe``, ``gpt2`` and ``deepseek2`` do, in float32. Where
llama.cpp is installed (the package `xllamacpp`), text and token ids come from llama.cpp itself.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_train.export.gate import check_positions
from titan_train.export.gguf.folder import FILE, gguf_library
from titan_train.export.tokenizer_json import folder_ids

_SIGMOID = 2  # llama.cpp's number of this gating function


class GgufModel:
    """An exported folder with a GGUF file."""

    def __init__(self, folder: Path) -> None:
        gguf = gguf_library()
        reader = gguf.GGUFReader(folder / FILE)
        self._tensors = {
            t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).float() for t in reader.tensors
        }
        self._fields = {name: field.contents() for name, field in reader.fields.items() if "tokens" not in name}
        self._kind: str = self._fields["general.architecture"]
        eos: int = self._fields["tokenizer.ggml.eos_token_id"]
        self._server = LlamaCpp(folder / FILE, eos) if importlib.util.find_spec("xllamacpp") else None
        self._ids = folder_ids(folder)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        self._check(len(prompt) + count - 1)  # the last token is not read
        if self._server is not None:
            return self._server.greedy(prompt, count)
        row = list(prompt)
        for _ in range(count):
            row.append(int(self.logits(torch.tensor([row]))[0, -1].argmax()))
        return row[len(prompt) :]

    def ids(self, text: str) -> list[int] | None:
        return self._ids(text) if self._server is None else self._server.ids(text)

    def logits(self, tokens: Tensor) -> Tensor:
        self._check(tokens.shape[1])
        x = self._tensors["token_embd.weight"][tokens]
        if self._kind == "gpt2":
            x = x + self._tensors["position_embd.weight"][: tokens.shape[1]]
        for layer in range(self._setting("block_count")):
            x = x + self._attention(f"blk.{layer}", self._norm(f"blk.{layer}.attn_norm", x))
            x = x + self._feed_forward(f"blk.{layer}", self._norm(f"blk.{layer}.ffn_norm", x))
        head = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        return F.linear(self._norm("output_norm", x), head)

    def _check(self, length: int) -> None:
        check_positions(length, len(self._tensors["position_embd.weight"]) if self._kind == "gpt2" else None)

    def _setting(self, name: str) -> Any:
        return self._fields[f"{self._kind}.{name}"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        if self._kind == "gpt2":
            eps = self._setting("attention.layer_norm_epsilon")
            return F.layer_norm(x, weight.shape, weight, self._tensors[f"{name}.bias"], eps)
        return F.rms_norm(x, weight.shape, weight, self._setting("attention.layer_norm_rms_epsilon"))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _attention(self, block: str, x: Tensor) -> Tensor:
        heads, sharpened = self._setting("attention.head_count"), 1.0
        if self._kind == "deepseek2":
            (q, k, v), sharpened = self._from_latent(block, x), self._yarn_scale()
        elif self._kind == "gpt2":
            q, k, v = self._linear(f"{block}.attn_qkv", x).chunk(3, dim=-1)
            q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))
        else:
            width = self._setting("attention.key_length")
            q, k, v = (self._linear(f"{block}.attn_{name}", x).unflatten(-1, (-1, width)) for name in "qkv")
            if self._kind != "llama":
                q, k = self._norm(f"{block}.attn_q_norm", q), self._norm(f"{block}.attn_k_norm", k)
            q, k = self._rotated(q), self._rotated(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) * (sharpened / q.shape[-1] ** 0.5)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self._linear(f"{block}.attn_output", out.transpose(1, 2).flatten(-2))

    def _from_latent(self, block: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, as DeepSeek makes them."""
        rank, width = self._setting("attention.kv_lora_rank"), self._setting("attention.key_length_mla")
        rotated = self._setting("rope.dimension_count")
        if f"{block}.attn_q.weight" in self._tensors:
            q = self._linear(f"{block}.attn_q", x)
        else:
            q = self._linear(
                f"{block}.attn_q_b", self._norm(f"{block}.attn_q_a_norm", self._linear(f"{block}.attn_q_a", x))
            )
        q_plain, q_turned = q.unflatten(-1, (-1, width)).split([width - rotated, rotated], dim=-1)
        latent, shared_key = self._linear(f"{block}.attn_kv_a_mqa", x).split([rank, rotated], dim=-1)
        latent = self._norm(f"{block}.attn_kv_a_norm", latent)
        k_plain = torch.einsum("bsr,hrn->bshn", latent, self._tensors[f"{block}.attn_k_b.weight"])
        v = torch.einsum("bsr,her->bshe", latent, self._tensors[f"{block}.attn_v_b.weight"])
        k_turned = self._rotated(shared_key[:, :, None]).expand(-1, -1, k_plain.shape[2], -1)
        return torch.cat((q_plain, self._rotated(q_turned)), -1), torch.cat((k_plain, k_turned), -1), v

    def _yarn_scale(self) -> float:
        """What scores are multiplied by: the file holds a tenth of the setting."""
        factor = self._fields.get("deepseek2.rope.scaling.factor", 1.0)
        return (1 + self._fields.get("deepseek2.rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)) ** 2

    def _yarn_frequencies(self, frequencies: Tensor, width: int) -> Tensor:
        """Slow pairs divided by the factor, fast ones kept, and a ramp over the pairs between."""
        base, factor = self._setting("rope.freq_base"), self._setting("rope.scaling.factor")
        original = self._setting("rope.scaling.original_context_length")
        ends: list[float] = []
        for turns in (self._setting("rope.scaling.yarn_beta_fast"), self._setting("rope.scaling.yarn_beta_slow")):
            ends.append(width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))
        low, high = max(0, math.floor(ends[0])), min(width - 1, math.ceil(ends[1]))
        slow = ((torch.arange(width // 2).double() - low) / max(0.001, high - low)).clamp(0, 1)
        return frequencies * (1 - slow) + frequencies / factor * slow

    def _rotated(self, x: Tensor) -> Tensor:
        """Neighbours are a pair in the architectures llama and deepseek2, halves in the others."""
        width = x.shape[-1]
        frequencies = self._setting("rope.freq_base") ** (-torch.arange(0, width, 2).double() / width)
        if f"{self._kind}.rope.scaling.factor" in self._fields:
            frequencies = self._yarn_frequencies(frequencies, width)
        if "rope_freqs.weight" in self._tensors:
            frequencies = frequencies / self._tensors["rope_freqs.weight"].double()
        angles = (torch.arange(x.shape[1])[:, None] * frequencies)[:, None]
        turn = torch.polar(torch.ones_like(angles), angles)
        neighbours = self._kind in ("llama", "deepseek2")
        pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn).float()
        return (turned if neighbours else turned.transpose(-1, -2)).flatten(-2)

    def _feed_forward(self, block: str, x: Tensor) -> Tensor:
        if self._kind == "gpt2":
            return self._linear(f"{block}.ffn_down", F.gelu(self._linear(f"{block}.ffn_up", x), approximate="tanh"))
        if f"{block}.ffn_gate_inp.weight" in self._tensors:
            return self._experts(block, x)
        return self._gated(block, x, "")

    def _gated(self, block: str, x: Tensor, suffix: str) -> Tensor:
        gate, up = self._linear(f"{block}.ffn_gate{suffix}", x), self._linear(f"{block}.ffn_up{suffix}", x)
        return self._linear(f"{block}.ffn_down{suffix}", F.silu(gate) * up)

    def _experts(self, block: str, x: Tensor) -> Tensor:
        """Every expert on every token, weighted by what the router gives the chosen ones."""
        weights = self._routed(block, self._linear(f"{block}.ffn_gate_inp", x))
        gate, up, down = (self._tensors[f"{block}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        hidden = F.silu(torch.einsum("bsd,efd->bsef", x, gate)) * torch.einsum("bsd,efd->bsef", x, up)
        out = torch.einsum("bsef,edf,bse->bsd", hidden, down, weights)
        return out + self._gated(block, x, "_shexp") if f"{block}.ffn_gate_shexp.weight" in self._tensors else out

    def _routed(self, block: str, logits: Tensor) -> Tensor:
        """The weight of each expert for each token, zero where it is not chosen."""
        scores = (
            logits.sigmoid() if self._fields.get("deepseek2.expert_gating_func") == _SIGMOID else logits.softmax(-1)
        )
        bias = self._tensors.get(f"{block}.exp_probs_b.bias")
        preference = scores if bias is None else scores + bias
        if groups := self._fields.get("deepseek2.expert_group_count"):
            grouped = preference.unflatten(-1, (groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self._setting("expert_group_used_count"), dim=-1).indices
            closed = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
            preference = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
        chosen = preference.topk(self._setting("expert_used_count"), dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self._fields.get("deepseek2.expert_weights_norm", True):
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self._fields.get("deepseek2.expert_weights_scale", 1.0)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class LlamaCpp:
    """llama.cpp on the CPU, with a float32 cache."""

    def __init__(self, file: Path, eos: int) -> None:
        """Load a file; ``eos`` is the token that ends a text.

        Raises:
            ValueError: llama.cpp refuses the file.
        """
        xllamacpp: Any = importlib.import_module("xllamacpp")

        self._eos = eos

        params: Any = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_gpu_layers = 0
        params.n_parallel = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.warmup = False
        params.verbosity = -1
        params.port = 0
        try:
            self._server: Any = xllamacpp.Server(params)
        except RuntimeError as err:
            raise ValueError(
                f"llama.cpp does not load {file}: {err} Export with --to hf, and please report this."
            ) from err
        # A server that is dropped before its loop has begun waits for that loop for ever; an answer shows that it runs.
        self._ask("completion", {"prompt": [eos], "n_predict": 0})

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt. A token that ends a text is one among others."""
        found: list[int] = []
        while len(found) < count:
            answer = self._ask(
                "completion",
                {
                    "prompt": [*prompt, *found], "n_predict": count - len(found), "temperature": 0.0, "top_k": 1,
                    "return_tokens": True, "cache_prompt": False, "repeat_penalty": 1.0,
                },
            )  # fmt: skip
            found += [int(token) for token in answer["tokens"]]
            if len(answer["tokens"]) < max(1, answer["tokens_predicted"]):
                found.append(self._eos)  # it stopped there and does not say so
        return found[:count]

    def ids(self, text: str) -> list[int]:
        answer = self._ask("tokenize", {"content": text, "add_special": False, "parse_special": False})
        return [int(token) for token in answer["tokens"]]

    def _ask(self, what: str, content: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._server.listening_address}/{what}",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with contextlib.closing(urllib.request.urlopen(request, timeout=600)) as answer:
            return json.load(answer)
