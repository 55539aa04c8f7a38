"""The head and its cross-entropy together, a chunk of tokens at a time: no logits of a whole batch, in any dtype.

Problem: logits of B rows take ``B * S * V`` elements, and a loss on them in float32 keeps several copies: with V = 128k
they are the largest tensors of a step. Idea: the gradient of the loss with respect to the logits needs the logits of its
own token only, and is known as soon as they are. So forward computes the logits of some tokens, their loss, and at once
what they add to the gradients of the hidden states and of the weight; then it drops them. Backward multiplies the two
gradients by the one that arrives. The products are those of the plain head: nothing is computed twice.

With ``p`` the softmax of a token's logits, ``y`` its label and ``z`` the weight of the z-loss (PaLM, arXiv:2204.02311,
section 5: ``z * log(Z)^2`` pulls the log-sum-exp Z towards one):

    d logits = p * (1 + 2 z log Z) - onehot(y)          d hidden = d logits @ W          d W = d logits^T @ hidden

The z-loss changes the gradients alone; what is returned is the cross-entropy, which runs can be compared by.

Under tensor parallelism a rank holds some rows of W. It then exchanges two numbers a token: the log-sum-exp of its own
logits, and the label's logit if it has that one; one all-gather a chunk.

Cost: one chunk of logits (in half precision on a GPU, where `titan_fp8.softmax_sums` and `titan_fp8.softmax_gradient_` read
it, and in float32 elsewhere), and the gradient of W in float32 from forward to backward. In half precision the products of
each chunk are rounded once, and summed over chunks in float32.

Shapes: T tokens, d width, V_r vocabulary entries of this rank, n ranks.
"""

import functools
import importlib.util
import inspect
from typing import Any, NamedTuple, cast

import titan_fp8
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.models.common.loss import IGNORE_INDEX, LogitsChange
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.shape import head_chunk_rows
from titan_train.models.traits import traits_of
from titan_train.parallel.param_shard import ParamShards
from titan_train.parallel.tensor.styles import style_of


class VocabShard(NamedTuple):
    """The rows of the head that this rank holds."""

    group: dist.ProcessGroup
    """The ranks that hold the others."""
    offset: int
    """The first vocabulary entry here."""
    largest: int = 0
    """Most entries of any rank: by it all choose chunks of the same size. 0 where the caller names that size."""


class LossHead(nn.Linear):
    """The linear to the vocabulary: logits, or, given labels, the sum of their cross-entropy."""

    z_loss: float = 0.0
    """Weight of the z-loss in the gradients."""
    shard: VocabShard | None = None
    """Where tensor parallelism has cut the vocabulary."""
    chunk_tokens: int = 0
    """As in `linear_cross_entropy_sum`."""
    change: LogitsChange | None = None
    """Likewise."""

    @classmethod
    def of(cls, linear: nn.Linear, z_loss: float = 0.0) -> "LossHead":
        """A head with the parameters of ``linear``: the same objects, so that tied ones stay tied."""
        head = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        head.z_loss = z_loss
        return head

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits ``[..., V]`` of hidden states ``[..., d]``; with labels ``[...]``, what `linear_cross_entropy_sum` gives."""
        if labels is None:
            return super().forward(input)
        bias = cast("Tensor | None", self.bias)
        return linear_cross_entropy_sum(
            input, self.weight, labels, bias=bias, z_loss=self.z_loss, shard=self.shard, chunk_tokens=self.chunk_tokens,
            change=self.change,
        )  # fmt: skip


def fuse_head_loss(part: nn.Module, *, z_loss: float, vocab_size: int) -> str | None:
    """Let the head of a model, or of its last pipeline stage, compute the loss; in place, before the model is cut.

    A model can if it names the head in ``loss_head``, an exact `nn.Linear`, and its ``forward`` takes ``labels`` by name,
    which it hands to the head as second argument, returning what comes back.

    Args:
        part: After conversion to float8.
        z_loss: Weight of the z-loss.
        vocab_size: The tokenizer's.

    Returns:
        The head's name; None where nothing was changed.

    Raises:
        ValueError: The head is float8, or has fewer rows than the tokenizer has tokens.
    """
    name = traits_of(part).loss_head
    if name is None or "labels" not in inspect.signature(part.forward).parameters:
        return None
    owner, _, leaf = name.rpartition(".")
    head = getattr(part.get_submodule(owner), leaf, None)
    if isinstance(head, titan_fp8.Float8Linear):
        raise ValueError(
            f"{name} is float8, but train.fused_loss=true computes the loss from the logits of a few tokens at a time, in "
            f"high precision: a float8 head would make those of the whole batch. Add {name!r} to float8.skip, or set "
            "train.fused_loss=false."
        )
    if type(head) is not nn.Linear:
        return None
    if head.out_features < vocab_size:
        raise ValueError(
            f"{name} of {type(part).__name__} gives {head.out_features} logits for {vocab_size} tokens: some tokens could "
            "not be predicted. Give it at least as many rows as the tokenizer has tokens."
        )
    loss_head = LossHead.of(head, z_loss)
    loss_head.change = traits_of(part).logits_change
    part.set_submodule(name, loss_head)
    return name


def locate_vocabulary(
    part: nn.Module, name: str, cuts: ParamShards, table: StyleTable, group: dist.ProcessGroup
) -> None:
    """Tell the head that computes the loss which rows tensor parallelism left it.

    Args:
        part: With its head, which `fuse_head_loss` replaced.
        name: Of the head.
        cuts: What tensor parallelism cut.
        table: By which it cut.
        group: Its ranks.

    Raises:
        ValueError: The head is cut by another style than ``head``.
    """
    cut = cuts.get(f"{name}.weight")
    if cut is None or cut.pieces == 1:
        return
    style = style_of(name, table)
    if style != "head":
        raise ValueError(
            f"parallel.tp_plan cuts {name}, the linear to the vocabulary, by the style {style!r}: the loss "
            "would miss the logits of other ranks. Give it the style 'head'."
        )
    head = part.get_submodule(name)
    assert isinstance(head, LossHead)
    head.shard = VocabShard(group, cut.offset[0], -(-cut.global_shape[0] // group.size()))


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
    chunk_tokens: int = 0,
    change: LogitsChange | None = None,
) -> Tensor:
    """Sum over valid labels of the cross-entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    Args:
        hidden: ``[..., d]``, any float dtype; the loss is computed in float32, or in float64 for float64 hidden states.
        weight: ``[V_r, d]``: the head's, or the rows of it that ``shard`` describes.
        labels: ``[...]`` int64, in the whole vocabulary; `titan_train.models.common.loss.IGNORE_INDEX` where there is
            nothing to predict.
        bias: ``[V_r]``, or None.
        z_loss: Weight of ``log(Z)^2`` of every valid label in the gradients; the returned loss does not hold it.
        shard: Where other ranks hold other rows. All of them must make this call with the same labels; the gradient of
            ``hidden`` is then this rank's summand.
        chunk_tokens: Tokens whose logits are held at once; 0 chooses by the device.
        change: What becomes of each logit before the loss.

    Returns:
        A float32 scalar in nats (float64 for float64 hidden states), the same on every rank of the shard; 0 if every
        label is ignored. Its backward can run once.

    Raises:
        ValueError: ``hidden`` is not ``[*labels.shape, d]``.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"the head was given hidden states of shape {tuple(hidden.shape)}, a weight of shape {tuple(weight.shape)} and "
            f"labels of shape {tuple(labels.shape)}: hidden states must be [B, S, {weight.shape[-1]}] and labels [B, S]. "
            "Under parallel.tp, the linear to the vocabulary must have the style 'head' in parallel.tp_plan."
        )
    training = (
        torch.is_grad_enabled()
    )  # inputs require a gradient in a validation too, and inside forward none is recorded
    given = (hidden, weight, bias, labels, z_loss, shard, chunk_tokens, change, training)
    return cast(Tensor, _LinearCrossEntropy.apply(*given))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        z_loss: float,
        shard: VocabShard | None,
        chunk_tokens: int,
        change: LogitsChange | None,
        training: bool,
    ) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        gradients = ctx.needs_input_grad[:3] if training else (False, False, False)
        sums = _Sums(flat, weight, bias, gradients, z_loss, shard, change)
        wanted = labels.reshape(-1)
        rows = weight.shape[0] if shard is None else max(weight.shape[0], shard.largest)
        step = chunk_tokens or head_chunk_rows(rows, hidden.device.type)
        if change is not None and change.cap and not chunk_tokens:  # whose slopes are further chunks, in float32
            step = max(64, step // 4)
        for start in range(0, wanted.shape[0], step):
            sums.add(slice(start, start + step), wanted[start : start + step])
        ctx.gradients = sums.gradients(hidden.shape)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return sums.loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, ctx.gradients = ctx.gradients, None
        if kept is None:
            raise RuntimeError("the gradients of this loss were already used: its backward can run once.")
        scaled = [
            None if g is None else _scaled(g, grads[0].to(g.dtype), dtype)
            for g, dtype in zip(kept, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None, None


class _Sums:
    """The loss and the gradients, as chunks are added."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        z_loss: float,
        shard: VocabShard | None,
        change: LogitsChange | None,
    ) -> None:
        self._change, self._slope = change, cast("Tensor | float", 1.0)
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._z_loss, self._shard = z_loss, shard
        self._wide = torch.promote_types(hidden.dtype, torch.float32)
        self.loss = hidden.new_zeros((), dtype=self._wide)
        self._training = any(wanted)
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        make = weight.new_empty if hidden.shape[0] else weight.new_zeros  # the first chunk overwrites it
        self._of_weight = make(weight.shape, dtype=self._wide) if wanted[1] else None
        self._of_bias = weight.new_zeros(weight.shape[:1], dtype=self._wide) if wanted[2] else None

    def add(self, rows: slice, labels: Tensor) -> None:
        """Compute the logits of some tokens, and what follows from them."""
        hidden = self._hidden[rows]
        valid = labels != IGNORE_INDEX
        logits = torch.mm(hidden, self._weight.t()) if self._bias is None else torch.addmm(
            self._bias, hidden, self._weight.t()
        )  # fmt: skip
        if self._change is not None:
            logits, self._slope = self._change.with_slope(logits, self._wide)
        own, here = _own_labels(labels, valid, self._shard, logits.shape[-1])
        # All in float32 from here on. The largest probability is at least 1 / V, so its logarithm is exact where the
        # label's own may be that of zero.
        by_kernels = self._by_kernels(logits)
        if by_kernels:  # which take the softmax when the gradient is taken, in the logits' place
            p = logits
            largest, sums, at_label = titan_fp8.softmax_sums(logits, own)
            log_of_largest = sums.log_().neg_()
        else:
            p = torch.softmax(logits, -1, dtype=self._wide)
            largest, log_of_largest = logits.amax(-1).to(self._wide), p.amax(-1).log_()
            at_label = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).to(self._wide)
        del logits
        above = at_label - largest
        log_p, total = above + log_of_largest, largest - log_of_largest
        scale: Tensor | None = None
        if self._shard is not None:
            local = total
            total, log_p = _over_ranks(local, (above + largest).masked_fill(~here, 0.0), self._shard.group)
            scale = (local - total).exp_()
        if self._z_loss:
            pull = 1 + 2 * self._z_loss * total
            scale = pull if scale is None else scale * pull
        self.loss -= log_p.masked_fill(~valid, 0.0).sum()
        if not self._training:
            return
        if by_kernels:
            factor = log_of_largest.exp() if scale is None else log_of_largest.exp() * scale
            titan_fp8.softmax_gradient_(p, own, largest, factor.masked_fill(~valid, 0.0), here.to(factor.dtype))
            if self._change is not None:
                p.mul_(self._slope)
            self._add_products(rows, p, hidden)
            return
        if scale is not None:
            p *= scale.unsqueeze(-1)
        self._add_gradients(rows, p, own, here, valid)

    def _by_kernels(self, logits: Tensor) -> bool:
        """Whether kernels read the logits. A bias, whose gradient is a sum of whole rows, is rare."""
        half = logits.dtype in (torch.bfloat16, torch.float16)
        return half and logits.is_cuda and self._bias is None and _has_triton()

    def _add_gradients(self, rows: slice, p: Tensor, own: Tensor, here: Tensor, valid: Tensor) -> None:
        """``p`` becomes the gradient of the logits, but for tokens without a label, which are left out of the products."""
        p.scatter_add_(-1, own.unsqueeze(-1), -here.to(p.dtype).unsqueeze(-1))
        if self._change is not None:
            p *= self._slope
        hidden, mask = self._hidden[rows], valid.unsqueeze(-1)
        self._add_products(rows, p.to(hidden.dtype), hidden * mask)
        if self._of_hidden is not None:
            self._of_hidden[rows].mul_(mask)
        if self._of_bias is not None:
            self._of_bias.addmv_(p.t(), valid.to(p.dtype))

    def _add_products(self, rows: slice, of_logits: Tensor, hidden: Tensor) -> None:
        if self._of_hidden is not None:
            torch.mm(of_logits, self._weight, out=self._of_hidden[rows])
        if self._of_weight is not None:
            _add_product(self._of_weight, of_logits, hidden, first=rows.start == 0)

    def gradients(self, shape: torch.Size) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias, for a gradient of one."""
        return None if self._of_hidden is None else self._of_hidden.view(shape), self._of_weight, self._of_bias


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """In one pass: these are the largest tensors of a step. In place where the dtype stays, as nobody else has them."""
    return torch.mul(gradient, by, out=gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype))


def _own_labels(labels: Tensor, valid: Tensor, shard: VocabShard | None, vocab: int) -> tuple[Tensor, Tensor]:
    """Labels as columns of this rank's logits, 0 where they are elsewhere; and where they are here."""
    if shard is None:
        return labels.masked_fill(~valid, 0), valid
    own = labels - shard.offset
    here = valid & (own >= 0) & (own < vocab)
    return own.masked_fill(~here, 0), here


def _over_ranks(local: Tensor, at_label: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-sum-exp over all ranks' logits, and the logarithm of the label's probability; the same bits on each."""
    mine = torch.stack([local, at_label])
    every = mine.new_empty((2 * group.size(), mine.shape[1]))
    dist.all_gather_into_tensor(every, mine, group=group)
    total = every[0::2].logsumexp(0)
    return total, every[1::2].sum(0) - total


def _add_product(into: Tensor, of_logits: Tensor, hidden: Tensor, *, first: bool) -> None:
    """``into += of_logits^T @ hidden``, in the dtype of ``into``; the first product is not added to what was there."""
    left = of_logits.t()
    if of_logits.dtype == into.dtype:
        into.addmm_(left, hidden, beta=0 if first else 1)
    elif not into.is_cuda:
        product = torch.mm(left, hidden)
        if first:
            into.copy_(product)
        else:
            into.add_(product)
    elif first or type(into) is not Tensor:  # a fake one: torch 2.11 cannot fake what follows, and this keeps as much
        torch.mm(left, hidden, out_dtype=into.dtype, out=into)
    else:  # added inside the product: into is read and written once, and no product of its size is kept
        torch.addmm(into, left, hidden, out_dtype=into.dtype, out=into)
