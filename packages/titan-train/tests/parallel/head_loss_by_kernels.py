"""The head's loss by its Triton kernels, in their interpreter, beside plain torch; prints the largest errors of both.

A subprocess of the tests, with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_train.parallel import head_loss

CASES = [  # tokens, vocabulary, width, z-loss, some without a label, a vocabulary over ranks
    (70, 300, 32, 0.0, True, False),
    (64, 4100, 16, 1e-3, True, False),
    (3, 5, 8, 0.0, False, False),
    (40, 260, 16, 1e-3, True, True),
]


def error(got, want):
    return float((got.detach().double() - want).norm() / want.norm())


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    for tokens, vocab, width, z_loss, ignored, cut in CASES:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
        weight = (torch.randn(vocab, width) * width**-0.5).bfloat16().requires_grad_()
        labels = torch.randint(vocab, (tokens,))
        labels[:: 5 if ignored else tokens] = -100
        shard = head_loss.VocabShard(dist.group.WORLD, 0) if cut else None
        logits = hidden.double() @ weight.double().t()
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        pulled = loss + z_loss * (logits.logsumexp(-1)[labels != -100] ** 2).sum()
        want = (loss.detach(), *torch.autograd.grad(pulled, (hidden, weight)))
        errors = []
        for kernels in (True, False):
            head_loss._Sums._by_kernels = lambda _, __, kernels=kernels: kernels
            got = head_loss.linear_cross_entropy_sum(
                hidden, weight, labels, z_loss=z_loss, shard=shard, chunk_tokens=32
            )
            errors.append([*map(error, (got, *torch.autograd.grad(got, (hidden, weight))), (x.double() for x in want))])
        found.append(errors)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
