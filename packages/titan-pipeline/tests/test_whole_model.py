"""A whole model, cut by `split` with its forward unchanged, has the values and every gradient of the whole."""

import copy

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline import build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, GlooTransport, ThreadHub, split  # noqa: E402
from titan_testing import run_ranks  # noqa: E402
from torch import nn  # noqa: E402

# float64: a parameter's gradient is a sum of at most 8 microbatches x 14 tokens x 64 entries of products below 10, in
# another order where the schedule's order or a tie says so: 7168 x 10 x 2^-53, relative to gradients of order 1
ORDER = 7168 * 10 * 2.0**-53


NUM_FAMILIES = 29
"""In `whole_models`, which only a run of the test imports."""


def whole(model, inputs, targets, loss):
    model = copy.deepcopy(model)
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        value = loss(model(**x) if isinstance(x, dict) else model(*x if isinstance(x, tuple) else (x,)), y)
        (value / len(inputs)).backward()
        total += value.item() / len(inputs)
    return total, {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def check(model, parts, inputs, targets, loss, **options):
    """One step through the stages, against the whole model."""
    wanted, grads = whole(model, inputs, targets, loss)
    m = parts.schedule.num_microbatches
    assert len(inputs) == m

    def work(transport):
        stages = parts.stages(transport.rank, loss=loss, **options)
        return Executor(parts.schedule, stages, transport, tied=parts.tied).step(inputs, targets).loss

    for got in ThreadHub(parts.schedule.num_ranks).run(work):
        assert got == pytest.approx(wanted, rel=1e-13)
    compare(parts, grads)


def compare(parts, grads):
    seen = set()
    for module in parts.modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            seen.add(name)
            expected = grads[name]
            if expected is None:
                assert parameter.grad is None or not parameter.grad.any(), name
            else:
                torch.testing.assert_close(
                    parameter.grad, expected, rtol=ORDER, atol=ORDER, msg=lambda t, n=name: f"{n}: {t}"
                )
    assert set(grads) <= seen


def families():
    pytest.importorskip("transformers")
    import whole_models

    return whole_models


def check_family(name, schedule, num_ranks):
    models = families()
    model, inputs, targets = models.build(name)
    parts = split(model, schedule, num_ranks, num_microbatches=8, example=inputs[0])
    assert set().union(*(m.state_dict() for m in parts.modules)) == set(model.state_dict())
    check(model, parts, inputs, targets, models.loss)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "t5", "bart", "vit"])
def test_a_model_of_transformers_trains_like_the_whole_on_two_ranks(name):
    check_family(name, "zbv", 2)


@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "zb_h1"), ("t5", "1f1b"), ("vit", "gpipe")])
def test_a_model_of_transformers_trains_like_the_whole_on_four_ranks(name, schedule):
    check_family(name, schedule, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "num_ranks"), [("zbv", 2), ("1f1b", 2), ("zb_h1", 4), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("number", range(NUM_FAMILIES))
def test_every_family_trains_like_the_whole_on_every_schedule(number, schedule, num_ranks):
    names = list(families().FAMILIES)
    assert len(names) == NUM_FAMILIES
    check_family(names[number], schedule, num_ranks)


def test_processes_train_a_tied_decoder_like_the_whole():
    pytest.importorskip("transformers")
    run_ranks(_tied_decoder, 2)


def _tied_decoder():
    import whole_models

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, inputs, targets = whole_models.build("gpt2")
    wanted, grads = whole(model, inputs, targets, whole_models.loss)
    parts = split(model, "1f1b", size, num_microbatches=8)  # the example comes from the model's configuration
    stages = parts.stages(rank, loss=whole_models.loss)
    executor = Executor(parts.schedule, stages, GlooTransport(), tied=parts.tied)
    mine = inputs if rank == 0 else None
    assert executor.step(mine, targets).loss == pytest.approx(wanted, rel=1e-13)
    assert executor.evaluate(mine, targets).loss == pytest.approx(wanted, rel=1e-13)
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=ORDER, atol=ORDER)


def test_a_loss_of_the_model_itself_labels_and_recomputation_work():
    models = families()
    model, inputs, targets = models.build("bart")
    inputs = [{**x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    model.activation_checkpointing_enable()
    parts = split(model.train(), "zbv", 2, num_microbatches=8, example=inputs[0])
    check(model, parts, inputs, targets, models.loss)


def test_router_logits_of_all_layers_reach_the_last_stage():
    models = families()
    model, inputs, targets = models.build("mixtral")
    model.config.output_router_logits = True
    inputs = [{**x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    check(model, split(model, "zbv", 2, num_microbatches=8, example=inputs[0]), inputs, targets, models.loss)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x, skip=None, scale=None):
        y = x + torch.tanh(self.inner(x))
        return (y if skip is None else y + skip) * (1 if scale is None else scale)


class Odd(nn.Module):
    """Parameters of its own, a head that uses the embedding, a skip over all stages, a mask and operations in between."""

    def __init__(self, blocks=6, width=12):
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.randn(40, 1))

    def forward(self, ids, mask=None):
        x = self.tokens(ids)
        x = torch.cat([self.first.expand(len(ids), -1, -1), x], 1)
        x += self.table[: x.shape[1]]
        skips = [x]
        if mask is not None and not mask.all():
            x = x * mask[..., None]
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
            skips.append(x.sin())
        for block in self.blocks[half:]:
            x = block(x, skip=skips.pop(), scale=self.scale)
        return x @ self.tokens.weight.t()


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output[:, 1:].flatten(0, 1), target.flatten())


def all_tokens(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def odd_data(m):
    torch.manual_seed(1)
    ids = [torch.randint(32, (2, 5)) for _ in range(m)]
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    return [(i, mask) for i in ids], ids


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zbv", 2), ("interleaved_zb", 2), ("1f1b", 4), ("zb_h1", 3)])
def test_a_plain_module_with_skips_and_a_functional_head_trains_like_the_whole(schedule, num_ranks):
    torch.manual_seed(0)
    model = Odd().double()
    inputs, ids = odd_data(8)
    parts = split(model, schedule, num_ranks, num_microbatches=8, example=inputs[0])
    assert len(parts.tied) >= 1
    check(model, parts, inputs, ids, cross_entropy)


def test_shapes_may_differ_from_the_examples():
    torch.manual_seed(0)
    model = Odd().double()
    ids = [torch.randint(32, (n, t)) for n, t in ((1, 3), (2, 9), (4, 1), (2, 5))]
    parts = split(model, "zbv", 2, num_microbatches=4, example=ids[0])
    check(model, parts, ids, ids, cross_entropy)


def test_a_chain_and_a_model_without_a_list_are_cut():
    torch.manual_seed(0)
    chain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 4)
    )

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc, self.out = nn.Conv2d(3, 4, 3), nn.Linear(144, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(torch.relu(self.fc(torch.relu(self.conv(x)).flatten(1))))

    images = [torch.randn(2, 3, 8, 8, dtype=torch.float64) for _ in range(8)]
    labels = [torch.randint(4, (2,)) for _ in range(8)]
    for model, schedule in ((chain.double(), "zbv"), (Net().double(), "1f1b")):
        before = {n: b.clone() for n, b in model.named_buffers()}
        parts = split(model, schedule, 2, num_microbatches=8, example=images[0])
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name  # the trials leave running statistics as they were
        check(model, parts, images, labels, nn.functional.cross_entropy)


def test_the_cut_can_be_told():
    model = Odd()
    x = odd_data(1)[0][0]
    assert split(model, "1f1b", 2, example=x, starts=["blocks.5"]).layers == ("blocks.5",)
    named = split(model, "1f1b", 2, example=x, layers=["blocks.1", "blocks.4"], costs=[1, 9])
    assert named.layers == ("blocks.4",)
    assert len(named.modules[0].state_dict()) > len(named.modules[1].state_dict())
    assert split(model, "zbv", 2, example=x, layers=["blocks"]).schedule.num_stages == 4
    schedule = build_schedule("zb_h1", 3, 5)
    assert split(model, schedule, example=x).schedule is schedule
    text = str(split(model, "1f1b", 2, example=x))
    assert "stage 1 on rank 1: from blocks." in text
    assert "tied: " in text


def test_a_stage_can_be_copied_moved_and_loaded():
    torch.manual_seed(0)
    model = Odd()
    inputs, _ = odd_data(1)
    parts = split(model, "1f1b", 2, example=inputs[0])
    stages = [copy.deepcopy(m).double() for m in parts.modules]
    for m in stages:
        m.load_state_dict({k: v for k, v in model.double().state_dict().items() if k in m.state_dict()})
    out = inputs[0]
    for stage in stages:
        out = stage(*out) if isinstance(out, tuple) else stage(out)
    assert torch.equal(out, model(*inputs[0]))


class Typed(Odd):
    """Makes tensors of the data type that its first module returns."""

    def forward(self, ids):
        x = self.tokens(ids)
        one = torch.ones((), dtype=x.dtype).expand(x.shape[-1])
        for block in self.blocks:
            x = block(x, skip=one)
        return x


def test_a_stage_that_has_run_can_be_moved_to_another_data_type():
    model, ids = Typed(), odd_data(1)[1][0]
    parts = split(model, "1f1b", 3, example=ids)
    out = ids
    for stage in parts.modules:
        out = stage.bfloat16()(out)
    assert torch.equal(out, model.bfloat16()(ids))


def test_a_recurrent_layer_of_another_stage_can_be_asked_for_its_memory():
    """As ``to`` does, on a GPU."""

    class Recurrent(Odd):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(12, 12)

        def forward(self, ids):
            x = self.lstm(self.tokens(ids))[0]
            for block in self.blocks:
                x = block(x)
            return x

    model, ids = Recurrent(), odd_data(1)[1][0]
    first, last = split(model, "1f1b", 2, example=ids).modules
    assert last.lstm.weight_ih_l0.data_ptr() == 0
    assert torch.equal(last(first(ids)), model(ids))


class Trimmed(Odd):
    """Its first module says where the padding begins, and leaves padding out."""

    def __init__(self, how):
        super().__init__()
        self.embed = Untokened(how)

    def forward(self, ids):
        x, length = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x[:, :length].sum(1)


class Untokened(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.tokens, self.how = nn.Embedding(32, 12), how

    def forward(self, ids):
        used = (ids != 0).any(0)
        if self.how == "a number":
            return self.tokens(ids), int(used.sum())
        if self.how == "a mask":
            return self.tokens(ids[:, used]), None
        return self.tokens(ids)[:, : used.tolist().index(False)], None


@pytest.mark.parametrize("how", ["a number", "a mask", "a list"])
def test_what_a_module_of_another_stage_makes_of_the_numbers_is_that_of_each_microbatch(how):
    model = Trimmed(how)
    short, long = torch.tensor([[1, 2, 3, 0, 0]]), torch.tensor([[1, 2, 3, 4, 0]])
    parts = split(model, "1f1b", 3, example=short)
    for ids in (short, long, short, long + 1 - (long == 0).long()):
        out = ids
        for stage in parts.modules:
            out = stage(out)
        assert torch.equal(out, model(ids))
    known = parts.modules[2].__dict__["_pipeline_site"][0]._shapes
    assert {call: len(found) for (call, _), found in known.items()}["embed", 0] == 2, "one for each that was read"


class Dropped(Odd):
    """Skips a layer now and then while training."""

    def forward(self, ids):
        x = self.tokens(ids)
        for i, block in enumerate(self.blocks):
            if not (self.training and i == self.skipped):
                x = block(x)
        return x


class Noisy(Odd):
    """Later stages use what was drawn before."""

    def forward(self, ids):
        x = self.tokens(ids)
        noise = nn.functional.dropout(x, 0.5, self.training)
        for block in self.blocks:
            x = block(x) + noise
        return x


class Again(Odd):
    def forward(self, ids):
        x = self.tokens(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


def test_what_cannot_be_cut_is_refused_with_the_reason():
    ids = odd_data(1)[1][0]
    with pytest.raises(ValueError, match=r"their own random numbers. Move the cut"):
        split(Noisy(), "1f1b", 2, example=ids)
    with pytest.raises(ValueError, match="13 stages need as many layers"):
        split(Again(), "1f1b", 13, example=ids)
    with pytest.raises(ValueError, match="calls it 2 times, not once"):
        split(Again(), "1f1b", 2, example=ids, starts=["blocks.1"])
    with pytest.raises(ValueError, match="brings no example of its input"):
        split(Odd(), "1f1b", 2)
    with pytest.raises(ValueError, match="needs num_ranks"):
        split(Odd(), "1f1b", example=ids)
    with pytest.raises(ValueError, match="not in the order"):
        split(Odd(), "1f1b", 3, example=ids, starts=["blocks.4", "blocks.1"])
    with pytest.raises(ValueError, match="make 2 stages"):
        split(Odd(), "1f1b", 3, example=ids, starts=["blocks.4"])
    with pytest.raises(ValueError, match="not modules of the model"):
        split(Odd(), "1f1b", 3, example=ids, layers=["layers"])
    with pytest.raises(ValueError, match="one per layer"):
        split(Odd(), "1f1b", 3, example=ids, costs=[1])


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zbv", 2), ("zb_h1", 4)])
def test_layers_that_are_used_again_share_their_weights(schedule, num_ranks):
    torch.manual_seed(0)
    model = Again().double()
    parts = split(model, schedule, num_ranks, num_microbatches=8, example=odd_data(1)[1][0])
    ids = odd_data(8)[1]
    check(model, parts, ids, ids, lambda out, y: all_tokens(out, y % 12))
    assert any("call" in name for name in parts.layers)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zbv", 2), ("zb_h1", 4)])
def test_albert_is_cut_between_the_calls_of_its_only_layer(schedule, num_ranks):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=32, embedding_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.AlbertForMaskedLM(config).double()
    parts = split(model, schedule, num_ranks, num_microbatches=4)
    inputs = [{"input_ids": torch.randint(32, (2, 8))} for _ in range(4)]
    targets = [x["input_ids"] for x in inputs]
    check(model, parts, inputs, targets, lambda out, y: all_tokens(out.logits, y))


def test_a_model_on_the_meta_device_is_cut_and_filled_per_rank():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).double()
    parts = split(empty, "zbv", 2, num_microbatches=4)
    assert all(p.is_meta for stage in parts.modules for p in stage.parameters())
    assert [t.names for t in parts.tied] == [t.names for t in split(model, "zbv", 2).tied]
    known = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for stage in parts.modules:
        stage.to_empty(device="cpu")
        for name, tensor in [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()]:
            tensor.data.copy_(known[name])
    inputs = [{"input_ids": torch.randint(32, (2, 8))} for _ in range(4)]
    targets = [x["input_ids"] for x in inputs]
    check(model, parts, inputs, targets, lambda out, y: all_tokens(out.logits, y))


def test_a_layer_that_is_skipped_at_run_time_is_named():
    model = Dropped()
    model.skipped = 3
    ids = odd_data(1)[1][0]
    parts = split(model, "1f1b", 2, example=ids, starts=["blocks.3"])
    for module in parts.modules:
        module.train()
    with pytest.raises(RuntimeError, match=r"stage 0 uses 'blocks.4.inner.weight', which another stage holds"):
        parts.modules[0](ids)
    boundary = parts.modules[0].eval()(ids)
    with pytest.raises(RuntimeError, match=r"stage 1: the forward ended without calling layer 'blocks.3'"):
        parts.modules[1].train()(boundary)


def test_an_argument_that_the_example_lacked_is_named():
    parts = split(Odd(), "1f1b", 2, example=odd_data(1)[1][0])
    with pytest.raises(ValueError, match="takes what stage 0 returns"):
        parts.modules[1](odd_data(1)[1][0])
