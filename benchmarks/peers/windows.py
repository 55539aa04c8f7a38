"""Tokenized windows to training batches: shards of ours, Arrow of Hugging Face datasets, and a memory map.

Method: the same tokens (uint16) are stored three ways. Each turn makes ``--batches`` batches of 8 x 2048 int64 inputs and
labels as tensors on one thread, in shuffled order. Ours also give positions that restart at each document, document
boundaries and labels masked where documents meet. ``Arrow`` and ``memmap`` give inputs and labels alone, and so does
``titan-train, plain``, but for positions; ``memmap, by hand`` makes from the tokens what ours do. The sum of all inputs of
one pass must be the same.

Limits: warm page cache, one thread, no prefetch.

    python benchmarks/peers/windows.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import turns

SEQ_LEN, ROWS, EOS = 2048, 8, 0
FINGERPRINT = "00" * 16


def main() -> None:
    """Measure and print."""
    turns.with_peers("datasets")
    made = turns.parser(__doc__ or "", rounds=12)
    made.add_argument("--batches", type=int, default=300)
    options = made.parse_args()
    turns.wait_until_idle(options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


def measure(folder: Path, options) -> None:
    """Build the three stores, compare one pass, take turns."""
    import datasets
    from titan_train.data import DataLoader
    from titan_train.data.loader.packed import PackedDataset
    from titan_train.data.shards.format import ShardWriter
    from titan_train.data.shards.token_source import ShardedTokens

    datasets.disable_progress_bars()
    windows = ROWS * options.batches
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 32000, windows * SEQ_LEN + 1).astype(np.uint16)
    ends = np.cumsum(rng.integers(50, 3000, windows * 2))
    ends = np.append(ends[ends < tokens.size], tokens.size)
    tokens[ends[:-1] - 1] = EOS
    tokens.tofile(folder / "tokens.bin")
    stored = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
    writer = ShardWriter(folder, "shard", vocab_size=32000, tokenizer_fingerprint=FINGERPRINT)
    for document in np.split(tokens, ends[:-1]):
        writer.append([document])
    sharded = ShardedTokens(
        [folder], [writer.close()], tokenizer_fingerprint=FINGERPRINT, fingerprint=FINGERPRINT, verify="header"
    )
    ours = PackedDataset({"a": sharded}, seq_len=SEQ_LEN, seed=0)
    plain = PackedDataset({"a": sharded}, seq_len=SEQ_LEN, seed=0, document_mask=False, mask_boundary_labels=False)
    rows = np.stack([tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(windows)])
    features = datasets.Features({"ids": datasets.List(datasets.Value("uint16"), length=SEQ_LEN + 1)})
    datasets.Dataset.from_dict({"ids": rows}, features=features).save_to_disk(folder / "arrow")
    arrow = datasets.load_from_disk(folder / "arrow").with_format("numpy")
    order = rng.permutation(windows).reshape(-1, ROWS)

    def titan(dataset):
        return DataLoader(dataset, global_batch=ROWS, microbatch=ROWS, prefetch=0, steps=options.batches)

    def batches(kind):
        for chosen in order:
            if kind == "arrow":
                whole = torch.from_numpy(arrow[chosen]["ids"].astype(np.int64))
            else:
                whole = torch.from_numpy(
                    np.stack([stored[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in chosen]).astype(np.int64)
                )
            inputs, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
            if kind == "by hand":
                yield inputs, labels, *by_hand(inputs, labels)
            else:
                yield inputs, labels

    def by_hand(inputs, labels):
        ended = inputs == EOS
        place = torch.arange(SEQ_LEN).expand_as(inputs)
        starts = torch.where(ended, place + 1, 0)
        starts = torch.cummax(torch.nn.functional.pad(starts, (1, 0))[:, :-1], dim=1).values
        bounds = [torch.nonzero(row).flatten() + 1 for row in ended]
        labels[ended] = -100
        return place - starts, torch.nn.utils.rnn.pad_sequence(bounds, batch_first=True, padding_value=SEQ_LEN)

    sums = {kind: sum(int(b[0].sum()) for b in batches(kind)) for kind in ("arrow", "memmap", "by hand")}
    sums |= {name: sum(int(b.tokens.sum()) for b in titan(d)) for name, d in (("titan", ours), ("plain", plain))}
    if len(set(sums.values())) > 1:
        raise SystemExit(f"the windows differ, so there is nothing to compare: {sums}")
    contestants = {
        name: turns.timed(lambda dataset=dataset: sum(int(b.tokens[0, 0]) for b in titan(dataset)))
        for name, dataset in (("titan-train", ours), ("titan-train, plain", plain))
    } | {
        name: turns.timed(lambda kind=kind: sum(int(b[0][0, 0]) for b in batches(kind)))
        for name, kind in (("datasets, Arrow", "arrow"), ("memmap", "memmap"), ("memmap, by hand", "by hand"))
    }
    turns.compare("peers_windows", contestants, options, {"tokens": windows * SEQ_LEN})


if __name__ == "__main__":
    main()
