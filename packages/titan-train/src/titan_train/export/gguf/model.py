"""Read a GGUF file back, without anything of the code that trained or wrote it.

`GgufModel` computes logits from the tensors that gguf's own reader dequantizes, by the settings in the file's metadata, as
llama.cpp's graphs of the architectures ``llama``, ``qwen3``, ``qwen3moe`` and ``gpt2`` do, in float32. Where llama.cpp is
installed (the package `xllamacpp`), text and token ids come from llama.cpp itself.
"""

import contextlib
import importlib
import importlib.util
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_train.export.gguf.folder import FILE, gguf_library
from titan_train.export.tokenizer_json import folder_ids


class GgufModel:
    """An exported folder with a GGUF file."""

    def __init__(self, folder: Path) -> None:
        """Read the file."""
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

    @property
    def by_llama_cpp(self) -> bool:
        """Whether llama.cpp gives the text and the ids."""
        return self._server is not None

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt."""
        if self._server is not None:
            return self._server.greedy(prompt, count)
        row = list(prompt)
        for _ in range(count):
            row.append(int(self.logits(torch.tensor([row]))[0, -1].argmax()))
        return row[len(prompt) :]

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text."""
        return self._ids(text) if self._server is None else self._server.ids(text)

    def logits(self, tokens: Tensor) -> Tensor:
        """``[B, S]`` to ``[B, S, V]``."""
        x = self._tensors["token_embd.weight"][tokens]
        if self._kind == "gpt2":
            x = x + self._tensors["position_embd.weight"][: tokens.shape[1]]
        for layer in range(self._setting("block_count")):
            x = x + self._attention(f"blk.{layer}", self._norm(f"blk.{layer}.attn_norm", x))
            x = x + self._feed_forward(f"blk.{layer}", self._norm(f"blk.{layer}.ffn_norm", x))
        head = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        return F.linear(self._norm("output_norm", x), head)

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
        heads = self._setting("attention.head_count")
        if self._kind == "gpt2":
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
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self._linear(f"{block}.attn_output", out.transpose(1, 2).flatten(-2))

    def _rotated(self, x: Tensor) -> Tensor:
        """Neighbours are a pair in the architecture llama, halves in the others."""
        width = x.shape[-1]
        frequencies = self._setting("rope.freq_base") ** (-torch.arange(0, width, 2).double() / width)
        if "rope_freqs.weight" in self._tensors:
            frequencies = frequencies / self._tensors["rope_freqs.weight"].double()
        angles = (torch.arange(x.shape[1])[:, None] * frequencies)[:, None]
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = x.unflatten(-1, (-1, 2)) if self._kind == "llama" else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn).float()
        return (turned if self._kind == "llama" else turned.transpose(-1, -2)).flatten(-2)

    def _feed_forward(self, block: str, x: Tensor) -> Tensor:
        if self._kind == "gpt2":
            return self._linear(f"{block}.ffn_down", F.gelu(self._linear(f"{block}.ffn_up", x), approximate="tanh"))
        if self._kind == "qwen3moe":
            return self._experts(block, x)
        gate, up = self._linear(f"{block}.ffn_gate", x), self._linear(f"{block}.ffn_up", x)
        return self._linear(f"{block}.ffn_down", F.silu(gate) * up)

    def _experts(self, block: str, x: Tensor) -> Tensor:
        """Every expert on every token, weighted by what the router gives the chosen ones."""
        scores = self._linear(f"{block}.ffn_gate_inp", x).softmax(-1)
        best = scores.topk(self._setting("expert_used_count"), dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        gate, up, down = (self._tensors[f"{block}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        hidden = F.silu(torch.einsum("bsd,efd->bsef", x, gate)) * torch.einsum("bsd,efd->bsef", x, up)
        return torch.einsum("bsef,edf,bse->bsd", hidden, down, weights)


class LlamaCpp:
    """llama.cpp on the CPU, with a float32 cache."""

    def __init__(self, file: Path, eos: int) -> None:
        """Load a file; ``eos`` is the token that ends a text."""
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
        self._server: Any = xllamacpp.Server(params)

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
            if len(found) < count and (not found or found[-1] != self._eos):
                found.append(self._eos)  # it stopped there and does not say so
        return found

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
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
