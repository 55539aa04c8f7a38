"""The encoder of images: packed patches in, one feature for every 2 x 2 patches out, in the decoder's width.

The patches of all images of a microbatch are concatenated; no image is padded. Attention stays inside an image. Inside
an image, patches come in the order of the merger: the four of one feature are neighbours. Where a patch lies and how large its
image is travels beside it (`PatchPlaces`), so nothing here reads a number back from the device.

Shapes: P patches, N images (padded), d width of the encoder, H heads, M = merge * merge, D width of the decoder.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.common.packed import packed_attention
from titan_train.models.common.rope import apply_rope
from titan_train.models.common.shared_input import GeluInput, SharedInput
from titan_train.models.vision_language.args import EncoderArgs

_EPS = 1e-6
_ROPE_THETA = 10_000.0


def image_tokens(rows: int, columns: int, merge: int) -> int:
    """Tokens that stand for an image of ``rows`` x ``columns`` patches: what the tokenizer writes and the encoder returns.

    Raises:
        ValueError: The grid is not made of whole ``merge`` x ``merge`` squares.
    """
    if rows < merge or columns < merge or rows % merge or columns % merge:
        near = tuple(max(1, round(side / merge)) * merge for side in (rows, columns))
        raise ValueError(
            f"an image of {rows} x {columns} patches cannot be merged in squares of {merge} x {merge}. Resize it to {near[0]} x "
            f"{near[1]} patches."
        )
    return rows // merge * (columns // merge)


def patch_places(grids: Sequence[tuple[int, int]], merge: int) -> tuple[Tensor, Tensor]:
    """Where the patches of some images lie, in the merger's order.

    Args:
        grids: Rows and columns of patches, of each image.
        merge: Patches along one side of a feature.

    Returns:
        Row, column, rows and columns of each patch ``[P, 4]``, and the boundaries of images ``[N + 1]`` int32 from 0 to P.
    """
    places: list[Tensor] = []
    for rows, columns in grids:
        image_tokens(rows, columns, merge)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        blocks = (rows // merge, merge, columns // merge, merge)
        row, column = (x.reshape(blocks).transpose(1, 2).flatten() for x in (row, column))
        places.append(torch.stack((row, column, torch.full_like(row, rows), torch.full_like(row, columns)), dim=1))
    bounds = [0, *itertools.accumulate(rows * columns for rows, columns in grids)]
    return torch.cat(places), torch.tensor(bounds, dtype=torch.int32)


class PatchPlaces:
    """What every block needs to know of the patches.

    Neither a tuple nor a dataclass on purpose: FSDP2 casts the floating-point tensors in those, and the angles are float32.
    """

    __slots__ = ("bounds", "rope")

    def __init__(self, bounds: Tensor, rope: tuple[Tensor, Tensor]) -> None:
        """Boundaries of images ``[N + 1]`` int32; cosine and sine of the angles, ``[P, 1, d / H / 2]`` float32."""
        self.bounds = bounds
        self.rope = rope


class ImageAttention(nn.Module):
    """Attention in which every patch sees all of its image; no parameters."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        """``[P, H, d / H]``."""
        return packed_attention(q, k, v, bounds, q.shape[0], causal=False)


class PatchAttention(nn.Module):
    """Rotary attention over rows and columns, with biases."""

    def __init__(self, args: EncoderArgs) -> None:
        super().__init__()
        dim = args.vision_dim
        self.head_dim = dim // args.vision_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.linears = SharedInput()
        self.inner_attention = ImageAttention(args.vision_heads, self.head_dim)

    def forward(self, x: Tensor, places: PatchPlaces) -> Tensor:
        """``[P, d]`` to ``[P, d]``."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.linears(x, self.wq, self.wk, self.wv))
        q, k = apply_rope(q, *places.rope), apply_rope(k, *places.rope)
        return self.wo(self.inner_attention(q, k, v, places.bounds).flatten(-2))


class PatchMLP(nn.Module):
    """Feed-forward with the tanh form of GELU."""

    def __init__(self, args: EncoderArgs) -> None:
        super().__init__()
        self.up = nn.Linear(args.vision_dim, args.vision_ffn_dim)
        self.down = nn.Linear(args.vision_ffn_dim, args.vision_dim)
        self.linears, self.gelu = SharedInput(), GeluInput()

    def forward(self, x: Tensor) -> Tensor:
        """``[P, d]``."""
        (h,) = self.linears(x, self.up)
        return self.gelu(h, self.down)


class PatchBlock(nn.Module):
    """One block of the encoder."""

    norm_readers = (("attention_norm", "attention"), ("mlp_norm", "mlp"))
    """Norms, and the modules that alone read them."""

    def __init__(self, args: EncoderArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.vision_dim, eps=_EPS)
        self.attention = PatchAttention(args)
        self.mlp_norm = nn.LayerNorm(args.vision_dim, eps=_EPS)
        self.mlp = PatchMLP(args)

    def forward(self, x: Tensor, places: PatchPlaces) -> Tensor:
        """``[P, d]`` to ``[P, d]``."""
        x = x + self.attention(self.attention_norm(x), places)
        return x + self.mlp(self.mlp_norm(x))


class Projector(nn.Module):
    """M neighbouring patches to one feature of the decoder's width."""

    def __init__(self, args: EncoderArgs, dim: int, *, norm_joined: bool) -> None:
        """``dim``: D. ``norm_joined``: normalise the joined patches, not each by itself (deepstack)."""
        super().__init__()
        self.joined = args.vision_dim * args.merge**2
        self.norm_joined = norm_joined
        self.norm = nn.LayerNorm(self.joined if norm_joined else args.vision_dim, eps=_EPS)
        self.up = nn.Linear(self.joined, self.joined)
        self.down = nn.Linear(self.joined, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[P / M, D]`` from ``[P, d]``."""
        x = self.norm(x.reshape(-1, self.joined)) if self.norm_joined else self.norm(x).reshape(-1, self.joined)
        return self.down(F.gelu(self.up(x)))


class PatchEmbedding(nn.Module):
    """A linear of a patch's values; its weight has the shape that checkpoints give it."""

    def __init__(self, args: EncoderArgs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(args.vision_dim, 3, args.frames, args.patch, args.patch))
        self.bias = nn.Parameter(torch.empty(args.vision_dim))

    def reset_parameters(self) -> None:
        """As a convolution of this shape."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[P, d]`` from ``[P, 3 * frames * patch * patch]``."""
        return F.linear(pixels, self.weight.flatten(1), self.bias)


class VisionEncoder(nn.Module):
    """Patches to features: one for the decoder's input, and one for each of its first layers (deepstack)."""

    def __init__(self, args: EncoderArgs, dim: int) -> None:
        """``dim``: D."""
        super().__init__()
        self.args = args
        self.patch_embedding = PatchEmbedding(args)
        self.positions = nn.Embedding(args.position_side**2, args.vision_dim)
        self.blocks = nn.ModuleDict({str(i): PatchBlock(args) for i in range(args.vision_layers)})
        self.projector = Projector(args, dim, norm_joined=False)
        # keyed by its place, as in checkpoints
        self.deepstack = nn.ModuleDict(
            {str(i): Projector(args, dim, norm_joined=True) for i in range(len(args.deepstack_layers))}
        )

    def forward(self, pixels: Tensor, patches: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        """Encode the images of a microbatch.

        Args:
            pixels: ``[P, 3 * frames * patch * patch]``, about -1 to 1.
            patches: ``[P, 4]`` int64, by `patch_places`.
            bounds: ``[N + 1]`` int32, likewise; it may end with more of the last number.

        Returns:
            ``[P / M, D]``: the features, then those of each deepstack layer.
        """
        x = self.patch_embedding(pixels)
        taps, weights = position_taps(patches, self.args.position_side)
        x = x + (self.positions(taps) * weights.to(x.dtype)[..., None]).sum(1)
        places = PatchPlaces(bounds, patch_rope(patches, self.args.vision_dim // self.args.vision_heads))
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks.values()):
            x = block(x, places)
            if number in self.args.deepstack_layers:
                deep.append(self.deepstack[str(len(deep))](x))
        return self.projector(x), *deep


def position_taps(patches: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four learned positions around each patch, and their weights: bilinear, with the corners of both grids aligned.

    Args:
        patches: ``[P, 4]``, by `patch_places`.
        side: Rows and columns of the learned grid.

    Returns:
        Indices into the flat grid ``[P, 4]`` int64, and weights ``[P, 4]`` float32.
    """
    place = patches[:, :2].float() * (side - 1) / (patches[:, 2:] - 1).clamp(min=1)
    low = place.floor()
    share = place - low
    near = torch.stack((low, low + 1), dim=-1).long().clamp(max=side - 1)
    weight = torch.stack((1 - share, share), dim=-1)
    taps = near[:, 0, :, None] * side + near[:, 1, None, :]
    return taps.flatten(1), (weight[:, 0, :, None] * weight[:, 1, None, :]).flatten(1)


def patch_rope(patches: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Angles of the rows for the first half of a head's channel pairs, of the columns for the second.

    Args:
        patches: ``[P, 4]``, by `patch_places`.
        head_dim: Channels of a head, a multiple of 4.

    Returns:
        Cosine and sine, ``[P, 1, head_dim / 2]`` float32.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, device=patches.device, dtype=torch.float64) / half
    angles = (patches[:, :2, None].double() * _ROPE_THETA**-exponents).flatten(1).unsqueeze(1)
    return angles.cos().float(), angles.sin().float()
