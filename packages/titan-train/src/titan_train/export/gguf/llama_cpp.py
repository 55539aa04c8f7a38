"""llama.cpp itself, through the package `xllamacpp`."""

import contextlib
import importlib
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
