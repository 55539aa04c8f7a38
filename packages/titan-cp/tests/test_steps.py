"""A step over all ranks of data and context parallelism: a degree for each document, balanced, and against the static layout."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from titan_cp import attention_mask, plan_step
from titan_cp.cli import cut_rows, main
from titan_cp.planning.documents import deal_documents, document_degrees, work_of

LONG = 262_144
LLAMA_8B = 26_600  # token_pairs: 218 M parameters of a layer over 2 · 32 heads · 128 channels


def rows_of(draw, rows, seq_len, *, first=(), seed=0):
    """Document lengths of ``rows`` rows: ``first``, then drawn ones, cut where a row ends."""
    rng = np.random.default_rng(seed)
    ends = list(np.cumsum([0, *first]))
    while ends[-1] < rows * seq_len:
        ends.append(min(ends[-1] + max(1, int(draw(rng))), rows * seq_len))
    return [[b - a for a, b in pairwise(row)] for row in cut_rows([int(end) for end in ends], seq_len)]


DISTRIBUTIONS = {
    "alike": (lambda rng: rng.integers(500, 1500), ()),
    "log-normal": (lambda rng: rng.lognormal(np.log(2500), 1.2), ()),
    "256k tail": (lambda rng: rng.lognormal(np.log(2500), 1.0), (LONG,)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("dp", "cp", "microbatches"), [(8, 8, 1), (2, 8, 2), (4, 3, 1)])
def test_a_step_is_within_5_percent_of_the_bound_with_equal_tokens_on_every_rank(name, dp, cp, microbatches):
    draw, first = DISTRIBUTIONS[name]
    seq_len = LONG // 8 * cp
    first = tuple(min(n, seq_len) for n in first)
    for seed in range(3):
        rows = rows_of(draw, dp * microbatches, seq_len, first=first, seed=seed)
        step = plan_step(rows, dp=dp, cp=cp)
        assert len(step.microbatches) == microbatches
        assert step.makespan <= 1.05 * step.bound
        assert step.speedup >= 1 / 1.05
        for bounds in step.microbatches:
            ranges = deal_documents(bounds, dp * cp, True)
            assert {sum(b - a for a, b in held) for held in ranges} == {step.local_len}
            pieces = sorted(piece for held in ranges for piece in held)
            assert [a for a, _ in pieces] == [0, *(b for _, b in pieces[:-1])]
            assert pieces[-1][1] == bounds[-1]
    if name == "256k tail" and dp == 8:
        assert max(step.degrees) == dp * cp  # the long document is spread out, and most others stay whole
        assert step.degrees[1] > 0.8 * sum(step.degrees.values())


def test_a_256k_document_costs_the_static_layout_more_than_1_8_times_as_long():
    draw, first = DISTRIBUTIONS["256k tail"]
    for dp, token_pairs in ((8, LLAMA_8B), (8, 0), (4, LLAMA_8B)):
        step = plan_step(rows_of(draw, 8, LONG, first=first), dp=dp, cp=8, token_pairs=token_pairs)
        assert step.speedup >= 1.8
        assert step.makespan <= 1.05 * step.bound


@pytest.mark.parametrize("causal", [True, False])
def test_makespans_are_those_of_a_brute_force_count(causal):
    rows = [[40, 1, 7], [5, 43], [48], [16, 16, 16]]
    step = plan_step(rows, dp=2, cp=2, causal=causal, token_pairs=3)
    assert step.local_len == 24
    static = dynamic = total = 0.0
    work = [sum(n * (n + 1) // 2 if causal else n * n for n in row) for row in rows]
    for m, bounds in enumerate(step.microbatches):
        static += max(work[m], work[2 + m]) / 2 + 3 * 24  # rank 0 of dp computes rows 0 and 1, rank 1 rows 2 and 3
        mask = attention_mask(96, causal=causal, cu_seqlens=bounds)
        held = step.attention_plan(m, rank=0, num_heads=1).ring_ranges
        dynamic += max(sum(int(mask[a:b].sum()) for a, b in ranges) for ranges in held) + 3 * 24
        total += int(mask.sum()) / 4 + 3 * 24
    assert (step.static_makespan, step.makespan, step.bound) == (static, dynamic, total)


def test_a_document_lies_on_neighbouring_ranks_in_powers_of_two():
    """Where ranks have room: 8 long documents fill half of the tokens, short ones the rest."""
    bounds = np.cumsum([0, *[4096] * 8, *[64] * 512]).tolist()
    ranges = deal_documents(tuple(bounds), 32, True)
    assert document_degrees(ranges, bounds).tolist()[:8] == [8] * 8
    assert max(document_degrees(ranges, bounds)[8:]) == 1
    for document in range(8):
        owners = [
            r
            for r, held in enumerate(ranges)
            if any(a < bounds[document + 1] and b > bounds[document] for a, b in held)
        ]
        assert owners == list(range(owners[0], owners[0] + 8))
        assert owners[0] % 8 == 0


@pytest.mark.parametrize(
    ("lengths", "size"), [([1] * 12, 12), ([6, 6, 6, 6], 3), ([5] * 7 + [1], 4), ([96], 8), ([24] + [1] * 24, 6)]
)
def test_documents_that_are_few_short_or_too_large_for_a_rank_are_dealt_out_whole_or_in_parts(lengths, size):
    bounds = np.cumsum([0, *lengths]).tolist()
    for causal in (True, False):
        ranges = deal_documents(tuple(bounds), size, causal)
        assert {sum(b - a for a, b in held) for held in ranges} == {bounds[-1] // size}
        assert sorted(t for held in ranges for a, b in held for t in range(a, b)) == list(range(bounds[-1]))
        work = work_of(ranges, bounds, causal=causal, window=None)
        assert work.sum() == sum(n * (n + 1) // 2 if causal else n * n for n in lengths)


def test_layers_with_a_window_find_the_tokens_where_the_others_do():
    step = plan_step(rows_of(*DISTRIBUTIONS["log-normal"][:1], 4, 4096), dp=4, cp=1)
    whole = step.attention_plan(0, rank=1, num_heads=4)
    windowed = step.attention_plan(0, rank=1, num_heads=4, window=128)
    assert list(whole.shard_ranges) == list(windowed.shard_ranges)
    assert max(windowed.sent_rows) <= max(whole.sent_rows)


def test_the_plan_of_a_micro_batch_shards_all_of_its_rows():
    step = plan_step([[3, 5], [8], [1, 7], [4, 4]], dp=2, cp=2)
    tokens = torch.arange(16)[None]
    held = [step.attention_plan(1, rank=r, num_heads=2).shard(tokens) for r in range(4)]
    assert sorted(torch.cat(held, dim=1)[0].tolist()) == list(range(16))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[8]] * 3, {"dp": 2}, r"3 rows cannot be computed 2 at a time.*such as 4"),
        ([], {"dp": 2}, r"0 rows cannot be computed 2 at a time.*such as 2"),
        ([[8], [9]], {"dp": 2}, r"row 1 has 9 tokens, but row 0 has 8"),
        ([[9], [9]], {"dp": 2, "cp": 2}, r"cp=2 does not divide 9 tokens.*Nearest rows: 8 tokens"),
        ([[4, 0, 4]], {"dp": 1}, r"document 1 would have 0 tokens"),
        ([[8]], {"dp": 0}, "dp=0 is not a positive number"),
        ([[8]], {"dp": 1, "token_pairs": -1}, "token_pairs=-1 is negative"),
    ],
)
def test_steps_that_cannot_be_planned_are_refused_with_what_can(rows, options, message):
    with pytest.raises(ValueError, match=message):
        plan_step(rows, **{"cp": 1, **options})


def test_the_command_explains_a_step(tmp_path, capsys):
    lengths = tmp_path / "documents.txt"
    lengths.write_text("4096 " + "50 " * 240)
    options = ["explain", "--docs", str(lengths), "--seq-len", "4096", "--dp", "4", "--cp", "2"]
    assert main(options) == 2
    assert "--pad adds a document of" in capsys.readouterr().err
    assert main([*options, "--pad"]) == 0
    text = capsys.readouterr().out
    for part in ("4 rows of 4096 tokens", "longest 4096", "8 (dp 4 × cp 2)", "on ranks: 2", "of the bound", "static"):
        assert part in text
    assert main([*options, "--pad", "--window", "5"]) == 2
    assert "--window is for one sequence" in capsys.readouterr().err
    assert main(["explain", "--seq-len", "4096", "--dp", "4", "--cp", "2"]) == 2
    assert "--docs" in capsys.readouterr().err
    assert main(["explain", "--seq-len", "4096", "--cp", "2"]) == 2
    assert "--heads is missing" in capsys.readouterr().err


def test_rows_are_cut_from_documents_that_lie_end_to_end():
    assert cut_rows([0, 3, 10, 12], 4) == [[0, 3, 4], [0, 4], [0, 2, 4]]
