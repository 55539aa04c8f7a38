"""Decoders of transformers (``model.name = "hf:DIR"``) under every layout: one process's losses, gradients and weights."""

import hf_runs
import pytest
from composition_check import failures
from titan_testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

PP = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
FLOAT8 = {"float8": {"recipe": "rowwise", "min_speedup": 0.0}}  # scales of rows: the same on any number of ranks
LAYOUTS = {
    "fsdp": (2, {}),
    "hsdp": (4, {"parallel": {"dp_replicate": 2}}),
    "ddp, selective": (2, {"parallel": {"mode": "ddp"}, "activations": {"checkpoint": "selective"}}),
    "tp": (2, {"parallel": {"tp": 2}}),
    "tp without sp": (2, {"parallel": {"tp": 2, "sequence_parallel": False}}),
    "tp beyond kv heads": (4, {"parallel": {"tp": 4, "replicate_kv": True}}),
    "cp": (2, {"parallel": {"cp": 2}}),
    "pp": (2, PP),
    "pp zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "tp pp": (4, {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "compiled tp": (2, {"parallel": {"tp": 2}, "compile": {"enabled": True, "backend": "aot_eager"}}),
    "float8 fsdp": (2, FLOAT8),
    "ep": (2, {"parallel": {"ep": 2}}),
    "ep tp": (4, {"parallel": {"ep": 2, "tp": 2}}),
}
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3", "gpt_neox")
WINDOWED = ("mistral", "qwen2", "gemma3_text", "phi3")
WINDOWED_LAYOUTS = {
    f"cp {method} {layout}": (2, {"parallel": {"cp": 2}, "context": {"method": method, "layout": layout}})
    for method in ("ring", "allgather", "ulysses")
    for layout in ("contiguous", "zigzag")
} | {
    "cp whole rows": (2, {"parallel": {"cp": 2}, "data": {"document_mask": False}}),
    "cp tp": (4, {"parallel": {"cp": 2, "tp": 2}}),
    "cp pp": (4, {"parallel": {"cp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}),
}
UNPLANNED = ("opt", "gpt2", "bloom")
DEFAULT = [("phi3", "tp pp"), ("deepseek_v3", "ep tp"), ("gemma3_text", "cp"), ("gpt2", "fsdp")]
WEIGHTS = (
    2e-6  # four steps of SGD at 0.1, clipped to a norm of 0.5, from gradients that differ by 4e-6 of their largest
)


def works(kind, layout):
    if kind in UNPLANNED:
        return layout in ("fsdp", "hsdp", "ddp, selective", "float8 fsdp")
    if kind in ("gpt_neox", "deepseek_v3") and "kv" in layout:
        return False  # as many key-value heads as query heads: nothing to replicate
    return "ep" not in layout or kind in ROUTED


KINDS = {layout: [kind for kind in (*DENSE, *ROUTED, *UNPLANNED) if works(kind, layout)] for layout in LAYOUTS}
CASES = [pytest.param(layout, [kind], id=f"{kind}, {layout}") for kind, layout in DEFAULT]
CASES += hf_runs.in_thirds(KINDS | dict.fromkeys(WINDOWED_LAYOUTS, WINDOWED), "decoder")


@pytest.fixture(scope="module")
def single(folder):
    results_of = hf_runs.references(folder)

    def references(kinds, *, float8, settings=None):
        trees = {}
        for kind in kinds:
            masked = "data" not in settings_of(kind, settings or {})
            one = ({} if masked else UNMASKED) | (FLOAT8 if float8 else {})
            trees[kind, float8, masked] = hf_runs.sections(hf_runs.publish(folder, kind), one)
        return results_of(trees)

    return references


UNMASKED = {"data": {"document_mask": False}}


def settings_of(kind, settings):
    """The settings of a layout for one family: BLOOM's forward takes no positions."""
    return settings | UNMASKED if kind == "bloom" else settings


@pytest.mark.parametrize(("layout", "kinds"), CASES)
def test_a_decoder_of_transformers_trains_as_in_one_process(folder, single, layout, kinds):
    ranks, settings = (LAYOUTS | WINDOWED_LAYOUTS)[layout]
    trees = [hf_runs.sections(hf_runs.publish(folder, kind), settings_of(kind, settings)) for kind in kinds]
    results = run_ranks(hf_runs.run_each, ranks, folder, "layout", trees, timeout_s=60 + 60 * len(trees))
    wrong, references = {}, single(kinds, float8="float8" in layout, settings=settings)
    for number, (kind, reference) in enumerate(zip(kinds, references, strict=True)):
        errors, weights = hf_runs.errors(reference, [of_rank[number] for of_rank in results])
        if failures(errors, float8=False) or weights > WEIGHTS:
            wrong[kind] = errors, weights
    assert not wrong


@pytest.mark.parametrize(
    ("kinds", "ranks", "layout"),
    [
        (("deepseek_v32", "qwen3"), 2, {}),  # an indexer without gradient; a tied head
        (("llama", "qwen3"), 4, {"pp": 2}),
    ],
)
def test_gradients_are_compressed_where_some_parameters_have_none(folder, single, kinds, ranks, layout):
    compressed = {"parallel": {"mode": "ddp", "compress": "bf16"} | layout, "pipeline": {"schedule": "1f1b"}}
    trees = [hf_runs.sections(hf_runs.publish(folder, kind), compressed) for kind in kinds]
    found = run_ranks(hf_runs.run_each, ranks, folder, "compressed", trees, timeout_s=240)
    for reference, results in zip(single(kinds, float8=False), zip(*found, strict=True), strict=True):
        errors, weights = hf_runs.errors(reference, list(results))
        assert errors.ranks_agree
        assert errors.gradient <= 2**-7  # bf16 keeps 8 bits, and two ranks' are added
        assert weights <= 1e-3


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("gpt2", {"tp": 2}, "has no plan, so it trains under fsdp, hsdp and ddp only"),
        ("llama", {"ep": 2}, "has none"),
        ("llama", {"tp": 4}, "does not divide|more than num_kv_heads=2"),
        ("mistral", {"cp": 2}, "context.layout='documents' places tokens by the work of one mask"),
    ],
)
def test_what_a_plan_does_not_say_is_refused(folder, kind, layout, words):
    import composition
    from titan_train.config import parse_config
    from titan_train.launch.validate import validate

    context = {"context": {"layout": "documents"}} if "cp" in layout else {}
    tree = hf_runs.sections(hf_runs.publish(folder, kind), {"parallel": layout} | context)
    with pytest.raises(ValueError, match=words):
        validate(parse_config(composition.tree(folder, "refused", tree)), 4)
