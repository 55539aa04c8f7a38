"""What is drawn for a sample, the data of shapes, and sampling from noise."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from titan_train import cli
from titan_train.config import parse_config
from titan_train.config.diffusion import DiffusionConfig
from titan_train.models.flux.rope import time_features
from titan_train.observe.log import read_metrics
from titan_train.task import load_task
from titan_train.tasks.diffusion import shapes
from titan_train.tasks.diffusion.batches import Features, FlowBatches, FlowTarget
from titan_train.tasks.diffusion.flow import draw_noise, draw_time, drops, schedule, shift_of, shifted
from titan_train.tasks.diffusion.sampling import image_grid, sample_latents, write_png
from titan_train.tasks.diffusion.task import loss_by_time

CONFIG = DiffusionConfig(grid=4, text_tokens=4, text_dropout=0.3)


def items():
    return shapes.ShapeFeatures(grid=4, text_tokens=4, text_dim=16, pooled_dim=8)


def batches(part="train", seed=1, config=CONFIG):
    return FlowBatches(items(), config, seed=seed, part=part, guided=True)


def build(source, numbers):
    return source.build_batch(np.array(numbers), ignore_index=-100, samples_consumed=0)


def test_a_batch_is_a_function_of_the_seed_and_the_samples_numbers():
    together = build(batches(), range(8))
    for rank in range(2):  # however the samples are divided, each has its own time, noise and texts
        part = build(batches(), range(4 * rank, 4 * rank + 4))
        for a, b in zip(part.inputs, together.inputs, strict=True):
            assert torch.equal(a, b[4 * rank : 4 * rank + 4])
        assert torch.equal(part.target.velocity, together.target.velocity[4 * rank : 4 * rank + 4])
        assert torch.equal(part.keywords["time"], together.keywords["time"][4 * rank : 4 * rank + 4])
    assert not torch.equal(build(batches(seed=2), range(8)).inputs[0], together.inputs[0])


def test_samples_of_other_ranks_have_other_noise():
    noise = [draw_noise(0, sample, (64, 48)).ravel() for sample in range(6)]
    for a in range(6):
        for b in range(a):
            assert abs(np.corrcoef(noise[a], noise[b])[0, 1]) < 0.1  # 3072 values: 5 sigma are 0.09
    assert np.array_equal(noise[3], draw_noise(0, 3, (64, 48)).ravel())


def test_the_noisy_latent_lies_between_image_and_noise():
    source = batches("validation")
    batch = build(source, [0, 5])
    for row, sample in enumerate([0, 5]):
        time = source.time_of(sample)
        latent = items().read(source.item_of(sample), seed=1, sample=sample).latent
        noise = draw_noise(1, sample, latent.shape)
        # one float32 product and sum of values below 8
        np.testing.assert_allclose(batch.inputs[0][row], (1 - time) * latent + time * noise, atol=4e-6)
        np.testing.assert_array_equal(batch.target.velocity[row], noise - latent)
        assert torch.equal(batch.keywords["time"][row], time_features(torch.tensor([time]))[0])


def test_validation_has_eight_fixed_times_and_drops_no_text():
    source = batches("validation")
    assert [source.time_of(n) for n in range(9)] == [(n % 8 + 0.5) / 8 for n in range(9)]
    assert all(source.features_of(n).text.any() and source.features_of(n).pooled.any() for n in range(200))


def test_the_loss_by_time_adds_up_to_the_loss():
    batch = build(batches("validation"), range(20))
    velocity = torch.randn_like(batch.target.velocity)
    parts = loss_by_time(velocity, batch.target)
    errors = (velocity - batch.target.velocity).square().sum((1, 2))
    for part in range(8):  # 20 samples, their times round robin
        torch.testing.assert_close(parts[part, 0], errors[part::8].sum())
        assert parts[part, 1] == len(errors[part::8]) * velocity[0].numel()
    ends = FlowTarget(batch.target.velocity[:2], torch.tensor([0.0, 1.0]))
    assert loss_by_time(velocity[:2], ends)[:, 1].nonzero().flatten().tolist() == [0, 7]


def test_text_and_pooled_features_are_dropped_independently():
    share, count = 0.447, 20_000
    text = np.array([drops(0, n, "drop_text", share) for n in range(count)])
    pooled = np.array([drops(0, n, "drop_pooled", share) for n in range(count)])
    assert abs(text.mean() - share) < 0.018  # 5 sigma
    assert abs(pooled.mean() - share) < 0.018
    assert abs((text & pooled).mean() - share**2) < 0.015  # a fifth of the samples has neither
    found = [batches().features_of(n) for n in range(60)]
    assert {(bool(f.text.any()), bool(f.pooled.any())) for f in found} == {(a, b) for a in (0, 1) for b in (0, 1)}


def test_times_are_uniform_or_logit_normal_and_move_towards_noise_with_the_shift():
    draws = lambda **kw: np.array([draw_time(0, n, **kw) for n in range(4000)])  # noqa: E731
    uniform, logit = draws(times="uniform"), draws(times="logit_normal", mean=0.5, std=0.7)
    assert abs(uniform.mean() - 0.5) < 0.025
    assert abs(uniform.var() - 1 / 12) < 0.006
    values = np.log(logit / (1 - logit))
    assert abs(values.mean() - 0.5) < 0.06
    assert abs(values.std() - 0.7) < 0.04
    assert (draws(times="uniform", mu=1.0) > uniform).all()
    assert 0 < uniform.min() < uniform.max() < 1


def test_the_shift_counts_packed_tokens():
    assert shift_of(256) == 0.5
    assert shift_of(4096) == pytest.approx(1.15)
    assert shift_of(1024) == pytest.approx(0.63)  # what unpacked pixels of a 256-pixel image would give
    assert shifted(0.5, shift_of(256)) == pytest.approx(0.6225, abs=1e-4)
    assert shifted(0.5, shift_of(1024)) == pytest.approx(0.6525, abs=1e-4)
    assert schedule(4, 0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert schedule(4, 0.5)[0] == 1.0
    assert schedule(4, 0.5)[-1] == 0.0


def test_shift_and_schedule_are_those_of_the_pipeline_of_diffusers():
    """Its scheduler computes in float32, ours in float64."""
    pytest.importorskip("diffusers")
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    for tokens in (64, 256, 1024, 4096, 9216):
        assert shift_of(tokens) == pytest.approx(calculate_shift(tokens, 256, 4096, 0.5, 1.15), rel=1e-12)
    for steps, tokens in ((4, 256), (28, 4096)):
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift_of(tokens))
        assert schedule(steps, shift_of(tokens)) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)
    still = FlowMatchEulerDiscreteScheduler(shift=1.0)  # schnell
    still.set_timesteps(sigmas=np.linspace(1.0, 1 / 4, 4))
    assert schedule(4, 0.0) == pytest.approx(still.sigmas.tolist(), abs=1e-6)


def test_a_shifted_time_is_that_of_the_paper_and_a_logit_normal_one_with_another_mean():
    """Esser et al., equation 23: t' = s t / (1 + (s - 1) t), s = e^mu; so logit t' = logit t + mu."""
    mu = shift_of(1024)
    s = np.exp(mu)
    for t in (0.01, 0.3, 0.5, 0.97):
        assert shifted(t, mu) == pytest.approx(s * t / (1 + (s - 1) * t), rel=1e-12)
    for sample in range(20):
        drawn = draw_time(3, sample, times="logit_normal", mean=0.2, std=0.8, mu=mu)
        plain = draw_time(3, sample, times="logit_normal", mean=0.2 + mu, std=0.8)
        assert drawn == pytest.approx(plain, rel=1e-12)


def test_a_run_shifts_by_its_packed_tokens():
    times = {shift: batches(config=DiffusionConfig(grid=4, text_tokens=4, shift=shift)) for shift in (True, False)}
    mu = 0.5 + 0.65 * (16 - 256) / 3840  # grid 4: 16 packed tokens, not 64 latent places
    for sample in range(8):
        plain = times[False].time_of(sample)
        assert times[True].time_of(sample) == pytest.approx(1 / (1 + np.exp(-mu) * (1 / plain - 1)), rel=1e-12)


def test_euler_steps_are_those_of_the_scheduler_of_diffusers():
    pytest.importorskip("diffusers")
    from diffusers import FlowMatchEulerDiscreteScheduler

    mu, steps, scale = shift_of(256), 6, 2.5
    text = Features(np.zeros((0, 48), np.float32), np.ones((4, 16), np.float32), np.ones(8, np.float32))
    none = Features(text.latent, 0 * text.text, 0 * text.pooled)
    calls = []

    def model(x, text, *, time, pooled, positions, guidance):
        calls.append((time, guidance))
        return torch.sin(x) + text.mean((1, 2))[:, None, None] * x.roll(1, 1)

    found = sample_latents(
        model, [text], none, grid=3, channels=48, steps=steps, scale=scale, mu=mu, seed=5, guidance=3.5
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    x = torch.from_numpy(draw_noise(5, 0, (9, 48)))[None]
    for number, t in enumerate(scheduler.timesteps):
        with_text, without = torch.sin(x) + x.roll(1, 1), torch.sin(x)
        x = scheduler.step(without + scale * (with_text - without), t, x, return_dict=False)[0]
        # diffusers' pipeline gives its model t / 1000; the angle is a float32 product of up to 1000
        assert (calls[number][0] - time_features(t[None] / 1000)).abs().max() < 2e-3
        torch.testing.assert_close(calls[number][1], time_features(torch.tensor([3.5, 3.5])))
    torch.testing.assert_close(found, x, atol=2e-5, rtol=0)


def test_without_guidance_towards_the_caption_one_prediction_is_made():
    rows = []

    def model(x, text, *, time, pooled, positions):
        rows.append(len(x))
        return x

    text = Features(np.zeros((0, 48), np.float32), np.ones((4, 16), np.float32), np.ones(8, np.float32))
    for scale in (1.0, 2.0):
        sample_latents(model, [text] * 3, text, grid=3, channels=48, steps=1, scale=scale, mu=0.0, seed=0)
    assert rows == [3, 6]


def test_texts_are_always_or_never_dropped_at_the_ends_of_the_share():
    for share in (0.0, 1.0):
        source = batches(config=DiffusionConfig(grid=4, text_tokens=4, text_dropout=share))
        found = [source.features_of(n) for n in range(300)]
        assert {bool(f.text.any()) for f in found} == {share == 0.0}
        assert {bool(f.pooled.any()) for f in found} == {share == 0.0}


def test_patches_are_an_exact_orthogonal_transform():
    image = np.random.default_rng(0).standard_normal((16, 16, 3)).astype(np.float32)
    tokens = shapes.to_tokens(image)
    assert tokens.shape == (16, 48)
    np.testing.assert_allclose(shapes.to_image(tokens), image, atol=1e-6)
    assert np.square(tokens).sum() == pytest.approx(4 * np.square(image).sum(), rel=1e-6)  # scaled by 2


def test_every_caption_is_read_off_its_image_and_off_no_other_place_or_colour():
    assert len(shapes.CAPTIONS) == 200
    for item, (colour, _, place) in enumerate(shapes.CAPTIONS):
        for shift in ((0, 0), (1, -1), (-1, 1)):
            assert shapes.read_image(shapes.draw_image(item, 16, shift)) == (colour, place), shapes.caption_text(item)
    assert shapes.caption_text(0) == "a red disc at the top left"
    wrong = [shapes.score(0, shapes.draw_image(item, 16)) for item in range(200)]
    assert sum(wrong) == len(shapes.SHAPES)  # chance is 1 in 40


def test_captions_differ_in_their_features_and_images():
    data = items()
    texts = {data.text_of(item)[0].tobytes() + data.text_of(item)[1].tobytes() for item in range(200)}
    images = {shapes.draw_image(item, 16).tobytes() for item in range(200)}
    assert len(texts) == len(images) == 200


class Exact(torch.nn.Module):
    """The velocity towards a known image: of the caption's where there is text, else of the empty one's."""

    def __init__(self, image, empty):
        super().__init__()
        self.image, self.empty = image, empty

    def forward(self, x, text, *, time, pooled, positions):
        towards = torch.where(pooled.any(-1)[:, None, None], self.image, self.empty)
        # along x_t = (1 - t) x0 + t e the velocity e - x0 is (x_t - x0) / t; time[:, 0] is cos(1000 t): t is found in a table
        t = next(t for t in schedule(5, 0.4) if torch.equal(time_features(torch.tensor([t]))[0], time[0]))
        return (x - towards) / t


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_euler_steps_along_the_exact_velocity_end_at_the_guided_image(scale):
    image, empty = torch.randn(1, 9, 48), torch.randn(1, 9, 48)
    text = Features(np.zeros((0, 48), np.float32), np.ones((4, 16), np.float32), np.ones(8, np.float32))
    none = Features(text.latent, 0 * text.text, 0 * text.pooled)
    found = sample_latents(
        Exact(image, empty), [text, text], none, grid=3, channels=48, steps=5, scale=scale, mu=0.4, seed=0
    )
    # the guided velocity is that of the image extrapolated from the empty one; straight lines, so Euler is exact
    torch.testing.assert_close(found, (empty + scale * (image - empty)).expand(2, -1, -1), atol=2e-5, rtol=0)


def test_a_png_holds_the_pixels(tmp_path):
    page = image_grid([shapes.draw_image(n, 16) for n in range(3)], columns=2, zoom=2, gap=1)
    assert page.shape == (67, 67, 3)
    write_png(tmp_path / "a.png", page)
    assert np.array_equal(pixels(tmp_path / "a.png"), page)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps."""
    tmp_path = tmp_path_factory.mktemp("trained")
    args = {"dim": 32, "num_heads": 2, "in_channels": 48, "rope_index_dim": 4, "rope_row_dim": 6, "rope_column_dim": 6}
    config = parse_config(
        {
            "model": {"name": "flux_tiny", "seq_len": 20, "args": args},
            "diffusion": {"grid": 4, "text_tokens": 4, "sample_images": 10, "sample_steps": 2},
            "train": {"steps": 2, "global_batch": 2},
            "schedule": {"warmup_steps": 1},
            "validation": {"every": 2, "steps": 1},
            "run": {"dir": str(tmp_path), "name": "r"},
            "metrics": {"progress": "off", "report": False},
            "launch": {"device": "cpu"},
        }
    )
    from titan_train import Trainer

    with Trainer(config) as trainer:
        trainer.fit()
    return tmp_path / "r"


def test_validation_samples_into_the_runs_folder(trained):
    from titan_train import load_run

    (validation,) = read_metrics(trained).validations
    assert validation.parts.keys() == {"t_0.0625", "t_0.1875"}  # two samples
    # the mean of two parts of one size, in another order of float32 sums
    assert sum(validation.parts.values()) / 2 == pytest.approx(validation.loss, rel=1e-6)
    found = json.loads((trained / "samples" / "step_00000002.json").read_text())
    assert found["images"] == 10
    assert len(set(found["captions"])) == 10
    assert (trained / "samples" / "step_00000002.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="trained flux_tiny on 'diffusion', not on text"):
        load_run(trained, device="cpu")


def pixels(path):
    """Of a PNG file as `write_png` writes it."""
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    start = content.index(b"IDAT") + 4
    size = struct.unpack(">I", content[start - 8 : start - 4])[0]
    lines = np.frombuffer(zlib.decompress(content[start : start + size]), np.uint8).reshape(height, 1 + 3 * width)
    return lines[:, 1:].reshape(height, width, 3)


def test_generate_writes_images_of_captions(trained, tmp_path, capsys):
    out = tmp_path / "new" / "a.png"
    words = ["generate", str(trained), "--out", str(out), "--seed", "0"]
    found = json.loads((trained / "samples" / "step_00000002.json").read_text())
    for caption in found["captions"]:
        words += ["--prompt", caption]
    assert cli.main(words) == 0
    # the run's own seed, steps and scale: what its validation sampled, from its checkpoint
    np.testing.assert_array_equal(pixels(out), pixels(trained / "samples" / "step_00000002.png"))
    assert f"10 images of {trained}, step 2" in capsys.readouterr().out
    some = ["generate", str(trained), "--prompt", "", "--samples", "2", "--sample-steps", "3", "--sample-scale", "1"]
    assert cli.main([*some, "--out", str(tmp_path / "none.png")]) == 0
    first, second = (pixels(tmp_path / "none.png")[4:68, 4 + 68 * n : 68 + 68 * n] for n in range(2))
    assert not np.array_equal(first, second)  # each has noise of its own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a mauve disc", "--out", "a.png"], "'a mauve disc' is not a caption of the shapes"),
        (["--prompt", "x", "--out", "a.jpg"], "Name a file that ends with .png"),
        (["--prompt", "x", "--chat", "--out", "a.png"], "--chat is for text"),
        (["--prompt", "x", "--sample-steps", "3"], "are for images: add --out FILE"),
        (["--prompt", "x"], "--out images.png"),
    ],
)
def test_generate_refuses_what_is_no_image(words, message, trained, capsys):
    assert cli.main(["generate", str(trained), *words]) != 0
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_data_that_does_not_fit_the_model_is_refused():
    small = {"diffusion": {"grid": 4, "text_tokens": 4}}
    config = parse_config(small | {"model": {"name": "flux_tiny", "seq_len": 20}})
    with pytest.raises(
        ValueError, match=r"tokens of 48 values, but the model takes 64\. Set model\.args\.in_channels=48"
    ):
        load_task(config).open(config)
    other = parse_config({"model": {"name": "llama3_debug", "task": "diffusion"}})
    with pytest.raises(ValueError, match="is not of the family flux"):
        load_task(other).open(other)
    with pytest.raises(ValueError, match="text_tokens and grid of at least 3"):
        shapes.ShapeFeatures(grid=2, text_tokens=4, text_dim=8, pooled_dim=8)
    with pytest.raises(ValueError, match=r"text_dropout=1\.5 must be at least 0"):
        DiffusionConfig(text_dropout=1.5)
