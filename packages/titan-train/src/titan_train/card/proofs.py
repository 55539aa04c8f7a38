"""What a small model is compared with transformers in, in one process: values, gradients, documents, files, text.

Each proof returns a `Proof`. A proof that raises ValueError is refused, in the words of the message; any other error is shown
as it is, so that one family's defect does not end the card.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from titan_ckpt import KeyMap
from torch import Tensor

from titan_train.card.subject import VOCABULARY

LOGITS, GRADIENTS, ROUNDING, UNPROVEN = 1e-5, 2e-5, 1e-9, 5e-5
"""Largest difference of logits in float32, relative to their spread; of a gradient, relative to its largest entry or a hundredth
of the model's; of either in float64, where float32 rounds more than that; and in float32 where a family has no float64."""
_DOCUMENTS = [0, 5, 6, 17, 29]


@dataclass(frozen=True, slots=True)
class Proof:
    """One row of the card."""

    name: str
    result: Literal["equal", "differs", "refused", "fails"]
    figure: str
    """What was measured, or the reason."""
    seconds: float = 0.0
    command: str = ""


def attempt(name: str, check: Callable[[], Proof], command: str = "") -> Proof:
    """Run a proof; what it raises becomes its row."""
    began = time.monotonic()
    try:
        proof = check()
    except ValueError as err:
        proof = Proof(name, "refused", first_words(str(err)))
    except Exception as err:
        proof = Proof(name, "fails", first_words(f"{type(err).__name__}: {err}"))
    return replace(proof, seconds=time.monotonic() - began, command=command)


def first_words(text: str) -> str:
    """The first sentence of a message, without the place of the small model."""
    text = re.sub(r"hf:/\S*/small\b", "hf:small", text)
    line = text.strip().splitlines()[-1] if text.strip() else ""
    return line.split(". ")[0].strip()[:200]


def largest(differences: Iterable[float]) -> float:
    """The largest of some differences; infinite if one is not a number, which `max` may pass over."""
    return max(value if math.isfinite(value) else math.inf for value in differences)


class Comparison:
    """The small model here and in transformers, with the same weights."""

    def __init__(self, config: Any, folder: Path) -> None:
        """Build both.

        Args:
            config: A configuration whose ``model.init`` is the folder.
            folder: Of the small model.

        Raises:
            ValueError: The model is refused.
        """
        import titan_fsdp as fsdp
        from titan_ckpt import import_hf
        from transformers import AutoModelForCausalLM

        from titan_train.models import build_model, init_for
        from titan_train.parallel.check import check_model
        from titan_train.parallel.layout.run import plan_run
        from titan_train.train.warm_start import check_init

        plan = plan_run(config, 1)
        self.own: Any = build_model(config.model, vocab_size=VOCABULARY)
        check_model(config, plan.layout, plan.batch, self.own)
        _, self.names = check_init(config.model.init, self.own, config.model)
        fsdp.materialize(self.own, "cpu", init_for(self.own), seed=3)
        import_hf(folder, self.own, names=self.names)
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.own.eval()
        self.theirs.eval()

    def packed(self) -> Proof:
        """A packed row here is its documents alone in transformers."""
        ids = _tokens(_DOCUMENTS[-1])
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(_DOCUMENTS)])[None]
        bounds = torch.tensor([_DOCUMENTS], dtype=torch.int32)

        def off() -> float:
            got = self.own(ids, positions=positions, cu_seqlens=bounds)
            alone = [self.theirs(ids[:, a:b], use_cache=False).logits for a, b in pairwise(_DOCUMENTS)]
            return _off(got, torch.cat(alone, dim=1))

        return self._exactly("packed documents", off, LOGITS)

    def logits(self) -> Proof:
        """Logits of a row are those of transformers."""
        ids = _tokens(24)
        return self._exactly("logits", lambda: _off(self.own(ids), self.theirs(ids, use_cache=False).logits), LOGITS)

    def gradients(self) -> Proof:
        """Every gradient of the cross-entropy is that of transformers."""
        ids = _tokens(25)

        def off() -> float:
            for model, logits in (
                (self.own, lambda: self.own(ids[:, :-1])),
                (self.theirs, lambda: self.theirs(ids[:, :-1], use_cache=False).logits),
            ):
                model.zero_grad()
                F.cross_entropy(logits().flatten(0, 1), ids[0, 1:]).backward()
            theirs = self._translated_gradients()
            own = {name: p.grad for name, p in self.own.named_parameters() if p.grad is not None and name in theirs}
            # some gradients are zero but for rounding, as of a key's bias: softmax does not see it
            least = 1e-2 * max((float(value.abs().max()) for value in theirs.values()), default=0.0)
            found = [
                float((grad - theirs[name]).abs().max()) / max(float(theirs[name].abs().max()), least)
                for name, grad in own.items()
            ]
            if not found:
                raise RuntimeError("no gradient could be compared")
            return largest(found)

        with torch.enable_grad():
            return self._exactly("gradients", off, GRADIENTS)

    def _exactly(self, name: str, off: Callable[[], float], limit: float) -> Proof:
        """In float32; where rounding goes with more bits, in float64."""
        grad = torch.enable_grad if name == "gradients" else torch.no_grad
        with grad():
            single = off()
            if single <= limit:
                return Proof(name, "equal", f"{single:.1e}")
            self.own.double()
            self.theirs.double()
            try:
                double = off()
            except RuntimeError as err:  # grouped products have no float64
                known = f"{single:.1e}, not in float64: {first_words(str(err))}"
                return Proof(name, "equal" if single <= UNPROVEN else "differs", known)
            finally:
                self.own.float()
                self.theirs.float()
        result = "equal" if double <= ROUNDING else "differs"
        return Proof(name, result, f"{single:.1e}, in float64 {double:.1e}")

    def _translated_gradients(self) -> dict[str, Tensor]:
        """Gradients of transformers under our names and in our layout, by the files that transformers writes of them."""
        import tempfile

        from titan_ckpt.interop.safetensors_folder import SafetensorsReader
        from titan_ckpt.interop.translate import from_hf
        from titan_ckpt.interop.views import whole_box

        wanted = {name: tuple(p.shape) for name, p in self.own.named_parameters()}
        weights = {name: p.data for name, p in self.theirs.named_parameters()}
        with tempfile.TemporaryDirectory() as scratch:
            try:
                for p in self.theirs.parameters():
                    p.data = torch.zeros_like(p) if p.grad is None else p.grad
                self.theirs.save_pretrained(scratch)
            finally:
                for name, p in self.theirs.named_parameters():
                    p.data = weights[name]
            views = from_hf(SafetensorsReader(Path(scratch)).views(), self.names, wanted)
            found = {
                name: torch.empty(view.shape, dtype=self.theirs.dtype) for name, view in views.items() if name in wanted
            }
            for name, into in found.items():
                views[name].fill(whole_box(into.shape), into)
            return found


def files(run: Path, published: Path, out: Path, names: KeyMap) -> Proof:
    """A run's export has transformers' names or the published ones, and transformers reads and writes it bit by bit."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ours = load_file(out / "model.safetensors")
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again = run / "again"
    theirs.save_pretrained(again)
    written, first = load_file(again / "model.safetensors"), load_file(published / "model.safetensors")
    renamed = "" if ours.keys() == written.keys() else ", by the published names"
    if renamed:
        ours, written, first = (by_native_name(names, tensors) for tensors in (ours, written, first))
    if ours.keys() != first.keys():
        return Proof("files", "differs", f"names differ: {', '.join(sorted(ours.keys() ^ first.keys())[:3])}")
    changed = [name for name in ours if not torch.equal(ours[name], written[name])]
    if changed:
        return Proof("files", "differs", f"{len(changed)} of {len(ours)} tensors, first {changed[0]}")
    return Proof("files", "equal", f"{len(ours)} tensors, every bit{renamed}")


def by_native_name(names: KeyMap, values: Mapping[str, Any]) -> dict[str, Any]:
    """What files have for each tensor, by its name here and the number of an expert: two files may name it differently."""
    found = {name: names.match_hf(name)[0] for name in values}
    return {f"{pair.native.format(**at)}[{at.get('j', '')}]": values[name] for name, (pair, at) in found.items()}


def text(run: Path, out: Path) -> Proof:
    """Greedy tokens of a run are those of transformers from its export."""
    from transformers import AutoModelForCausalLM

    from titan_train.generation import load_run
    from titan_train.generation.decode import generate

    prompt = _tokens(9)
    published: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()

    def theirs(*, cached: bool) -> list[int]:
        found = published.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=cached,
        )
        return found[0, 9:].tolist()

    got = generate(load_run(run, device="cpu").model, prompt.tolist(), max_new_tokens=8)[0]
    for cached, words in ((True, "8 tokens"), (False, "8 tokens, of transformers without its cache")):
        if got == theirs(cached=cached):
            return Proof("greedy text", "equal", words)
    return Proof("greedy text", "differs", f"{got} here, {theirs(cached=True)} there")


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(4))


def _off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())
