"""The frozen encoders of a diffusers pipeline: T5 for text tokens, CLIP for the pooled text, and the autoencoder.

The folder is laid out as diffusers writes a FluxPipeline: ``tokenizer`` and ``text_encoder`` (CLIP), ``tokenizer_2`` and
``text_encoder_2`` (T5), ``vae``. Only safetensors are read, and nothing is fetched. Features are those of diffusers'
``FluxPipeline.encode_prompt``: texts are padded to a fixed number of tokens, and padding is encoded and attended to like
words, as the published models were trained.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_train.lazy import require
from titan_train.terminal import first_line
from titan_train.trust.published import refuse_code_in

_FOLDERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "vae")
_PARTS = {"text": _FOLDERS[:4], "images": _FOLDERS[4:]}


class Encoders:
    """Encode texts and images, and decode latents."""

    def __init__(
        self, folder: Path, *, text_tokens: int, device: torch.device | str = "cpu", text: bool = True
    ) -> None:
        """Load them.

        Args:
            folder: Of the pipeline.
            text_tokens: T5 tokens of a text.
            device: Where they compute: in float32 on the CPU, in bfloat16 elsewhere (the autoencoder in float32).
            text: Load the text encoders too, not the autoencoder alone.

        Raises:
            ValueError: A part is missing or cannot be loaded, or a library is not installed.
        """
        self._device = torch.device(device)
        self._text_tokens = text_tokens
        check_encoders(folder, text=text)
        diffusers, transformers = (
            require(library, extra="diffusion", purpose="diffusion.encoders")
            for library in ("diffusers", "transformers")
        )
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        for name in _FOLDERS:
            refuse_code_in(folder / name)
        try:
            self._vae: Any = _load(diffusers.AutoencoderKL, folder / "vae", torch.float32).to(self._device)
            if text:
                self._clip: Any = _load(transformers.CLIPTextModel, folder / "text_encoder", dtype).to(self._device)
                self._t5: Any = _load(transformers.T5EncoderModel, folder / "text_encoder_2", dtype).to(self._device)
                self._clip_tokenizer, self._t5_tokenizer = (
                    transformers.AutoTokenizer.from_pretrained(
                        folder / name, local_files_only=True, trust_remote_code=False
                    )
                    for name in ("tokenizer", "tokenizer_2")
                )
        except (OSError, ValueError, RuntimeError, KeyError) as err:
            raise ValueError(
                f"diffusion.encoders={str(folder)!r} cannot be loaded: {first_line(err)[:300]}. Fetch the pipeline's folder "
                "again, with its safetensors files."
            ) from err
        self.scale = float(self._vae.config.scaling_factor)
        self.shift = float(self._vae.config.shift_factor or 0.0)
        self.factor = 2 ** (len(self._vae.config.block_out_channels) - 1)
        """Pixels along one side of a latent place."""

    def move_decoder(self, device: torch.device | str) -> None:
        """Decode there from now on; of encoders that were loaded without those of texts."""
        self._device = torch.device(device)
        self._vae.to(self._device)

    @torch.no_grad()
    def encode_texts(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Features ``[B, T, text_dim]`` and pooled features ``[B, pooled_dim]``, float32 on the CPU."""
        words = self._ids(self._t5_tokenizer, captions, self._text_tokens)
        longest = min(self._clip_tokenizer.model_max_length, self._clip.config.max_position_embeddings)
        whole = self._ids(self._clip_tokenizer, captions, longest)
        return self._t5(words)[0].float().cpu(), self._clip(whole).pooler_output.float().cpu()

    @torch.no_grad()
    def encode_images(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the variance of latents, ``[B, C, H, W]``, scaled as the model takes them; float32 on the CPU.

        Args:
            pixels: ``[B, 3, side, side]``, -1 to 1.
        """
        found = self._vae.encode(pixels.to(self._device)).latent_dist
        mean = self.scale * (found.mean - self.shift)
        # the variance of scale * z is scale^2 times that of z
        logvar = found.logvar + 2.0 * torch.log(torch.tensor(self.scale))
        return mean.float().cpu(), logvar.float().cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels ``[B, 3, side, side]`` of about -1 to 1 from scaled latents; float32 on the CPU."""
        return self._vae.decode(latents.to(self._device) / self.scale + self.shift).sample.float().cpu()

    def _ids(self, tokenizer: Any, captions: Sequence[str], length: int) -> Tensor:
        taken = tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return taken.input_ids.to(self._device)


def check_encoders(folder: Path, *, text: bool = True) -> None:
    """Refuse a folder that lacks a part. Reads no weights.

    Raises:
        ValueError: Names what is missing.
    """
    wanted = [*(_PARTS["text"] if text else ()), *_PARTS["images"]]
    missing = [name for name in wanted if not (folder / name).is_dir()]
    if missing:
        raise ValueError(
            f"diffusion.encoders={str(folder)!r} lacks {', '.join(missing)}. Name a folder on this machine that holds a "
            "FluxPipeline of diffusers; nothing is fetched."
        )


def encoders_stamp(folder: Path) -> str:
    """Hash of the names, sizes and small files of the parts: other encoders have another one."""
    digest = hashlib.sha256()
    for name in _FOLDERS:
        for path in sorted((folder / name).glob("*")):
            size = path.stat().st_size
            digest.update(f"{name}/{path.name} {size}\n".encode())
            if path.suffix == ".json" and size < 2**24:
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _load(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "torch_dtype": dtype}
    return kind.from_pretrained(os.fspath(folder), **options).eval().requires_grad_(False)
