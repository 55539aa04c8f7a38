"""What tensor parallelism refuses, before any process group exists, and how it says so."""

import pytest
import torch
import torch.distributed as dist
from titan_train.models import GPT, GPTArgs, Llama, LlamaArgs
from titan_train.models.llama.args import LLAMA_CONFIGS
from titan_train.parallel.tensor.checks import check_tensor_parallel
from titan_train.parallel.tensor.styles import merge_tables, table_for
from torch import nn

SHAPE = {"dim": 48, "num_layers": 1, "num_heads": 12, "num_kv_heads": 6, "ffn_dim": 96, "vocab_size": 96}


def llama(**changes: int) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaArgs(**{**SHAPE, **changes}))  # type: ignore[arg-type]


def check(model: nn.Module, tp: int, **changes) -> None:
    options = {"table": table_for(model), "seq_len_local": 96, "sequence_parallel": True, **changes}
    check_tensor_parallel(model, tp, **options)
    assert not dist.is_initialized()


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_degrees_that_fit_pass(tp):
    check(llama(), tp)
    check(llama(), tp, async_tp=True)


def test_query_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"tp=8 does not divide num_heads=12 of layers\.0\.attention\.wq.*\[1, 2, 3, 4, 6, 12\]"
    ):
        check(llama(), 8)


def test_part_of_a_kv_head_is_refused_until_replication_is_asked_for():
    with pytest.raises(ValueError, match=r"tp=12 is more than num_kv_heads=6 .*replicate_kv=true.* to 2 ranks"):
        check(llama(), 12)
    check(llama(), 12, replicate_kv=True)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused():
    with pytest.raises(ValueError, match=r"tp=4 does not divide num_kv_heads=6"):
        check(llama(), 4, replicate_kv=True)


def test_a_feed_forward_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"tp=6 does not divide the 100 outputs of layers\.0\.feed_forward\.w1"):
        check(llama(ffn_dim=100), 6)


def test_a_vocabulary_smaller_than_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"tp=6 ranks cannot share the 5 rows of tok_embeddings"):
        check(llama(vocab_size=5), 6)


def test_a_sequence_that_does_not_divide_is_refused_under_sequence_parallelism_only():
    with pytest.raises(ValueError, match=r"tp=6 .* does not divide the 100 tokens .* 102 tokens"):
        check(llama(), 6, seq_len_local=100)
    check(llama(), 6, seq_len_local=100, sequence_parallel=False)


def test_asynchronous_without_sequence_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"nothing to overlap"):
        check(llama(), 6, sequence_parallel=False, async_tp=True)


def test_a_parameter_that_the_table_forgot_is_refused():
    model = llama()
    table = {pattern: style for pattern, style in table_for(model).items() if pattern != "layers.*.ffn_norm"}
    with pytest.raises(ValueError, match=r"does not cover layers\.0\.ffn_norm\.weight"):
        check(model, 2, table=table)


def test_a_region_that_does_not_compute_a_part_is_refused():
    model = llama()
    table = merge_tables(model, table_for(model), {"layers.*.feed_forward.w2": "replicated"})
    with pytest.raises(ValueError, match=r"region layers\.0\.feed_forward needs .* rowwise inside"):
        check(model, 2, table=table)


def test_a_region_inside_a_region_is_refused():
    model = llama()
    with pytest.raises(ValueError, match=r"layers\.0\.attention \(region\) inside the region layers\.0"):
        check(model, 2, table=merge_tables(model, table_for(model), {"layers.*": "region"}))


def test_cutting_what_is_no_matrix_is_refused():
    model = llama()
    with pytest.raises(ValueError, match=r"colwise for norm, a RMSNorm: only a module with a two-dimensional weight"):
        check(model, 2, table=merge_tables(model, table_for(model), {"norm": "colwise"}))


def test_heads_that_nobody_counts_are_refused():
    model = llama()
    with pytest.raises(ValueError, match=r"heads for layers\.0\.feed_forward\.w1, but the number of heads is none"):
        check(model, 2, table=merge_tables(model, table_for(model), {"layers.*.feed_forward.w1": "heads"}))


def test_an_unknown_style_names_the_nearest():
    model = llama()
    with pytest.raises(ValueError, match=r"'colwize' is an unknown style. Did you mean 'colwise'"):
        merge_tables(model, table_for(model), {"layers.*.feed_forward.w1": "colwize"})


def test_a_pattern_that_matches_nothing_names_the_nearest():
    model = llama()
    with pytest.raises(ValueError, match=r"'layers\.\*\.attention\.wz' matches no module of Llama"):
        merge_tables(model, {}, {"layers.*.attention.wz": "colwise"})


def test_a_plan_of_the_user_goes_before_the_familys():
    model = llama()
    merged = merge_tables(model, table_for(model), {"layers.*.attention.w[qkvo]": "replicated"})
    assert next(iter(merged)) == "layers.*.attention.w[qkvo]"
    assert merged["lm_head"] == "head"


@pytest.mark.parametrize("name", list(LLAMA_CONFIGS))
def test_every_llama_can_be_cut_into_8_or_its_key_value_heads(name):
    with torch.device("meta"):
        model = Llama(LLAMA_CONFIGS[name])
    check(model, min(8, LLAMA_CONFIGS[name].num_kv_heads), seq_len_local=8192)


def test_gpt3_can_be_cut_into_8():
    with torch.device("meta"):
        model = GPT(GPTArgs(dim=12288, num_layers=2, num_heads=96))
    check(model, 8, seq_len_local=2048)
