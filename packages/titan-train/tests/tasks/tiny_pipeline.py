"""A FluxPipeline of diffusers with random weights of a few kilobytes: real classes, made here, nothing fetched."""

import json

import torch

TEXT_DIM, POOLED_DIM, TEXT_TOKENS = 16, 12, 6
SIDE = 32
"""Pixels: latents are 4 x 16 x 16 with this autoencoder, 8 x 8 packed tokens of 16 values."""
GRID, CHANNELS = 8, 16
WORDS = ("a", "red", "green", "blue", "disc", "square", "at", "the", "top", "left")


def write_pipeline(folder):
    """Write text_encoder, text_encoder_2, tokenizer, tokenizer_2 and vae."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    clip = CLIPTextConfig(
        vocab_size=64, hidden_size=POOLED_DIM, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=64, d_model=TEXT_DIM, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4, norm_num_groups=4, layers_per_block=1, scaling_factor=0.3611, shift_factor=0.1159,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
    vae.save_pretrained(folder / "vae")
    _clip_tokenizer(folder / "tokenizer")
    _t5_tokenizer(folder / "tokenizer_2")
    return folder


def _clip_tokenizer(folder):
    """CLIP's own class on letters and a few words."""
    from transformers import CLIPTokenizer

    letters = sorted({letter for word in WORDS for letter in word})
    pieces = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1} | {piece: 2 + n for n, piece in enumerate(pieces)}
    assert len(vocab) <= 64
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77).save_pretrained(folder)


def _t5_tokenizer(folder):
    """T5's own class on the words."""
    from transformers import T5Tokenizer

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((f"▁{word}", -2.0) for word in WORDS)]
    T5Tokenizer(vocab=vocab, extra_ids=0).save_pretrained(folder)


def write_images(folder, count, *, side=SIDE, start=0):
    """PNG files and a JSONL file of them; the caption of image n names a colour and a shape."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(start, start + count):
        colour = torch.randint(0, 255, (3,), generator=torch.Generator().manual_seed(number)).tolist()
        image = Image.new("RGB", (side + number % 5, side), (40, 40, 40))
        image.paste(tuple(colour), (4, 4, 20, 20))
        image.save(folder / f"{number:03}.png")
        caption = f"a {WORDS[1 + number % 3]} {WORDS[4 + number % 2]} at the top left {number}"
        lines.append(json.dumps({"image": f"{number:03}.png", "text": caption}))
    (folder / "images.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "images.jsonl"
