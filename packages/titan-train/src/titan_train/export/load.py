"""Load an exported folder by what lies in it, with the library that its users load it with."""

from pathlib import Path

from titan_train.export.gate import Exported
from titan_train.export.tokenizer_json import folder_ids, folder_text

TARGETS = ("hf", "gguf", "onnx", "aoti", "dcp")


def target_of(folder: Path) -> str | None:
    """Which target a folder was exported to; None if it is no exported folder."""
    if (folder / "model.onnx").is_file():
        return "onnx"
    if (folder / "model.pt2").is_file():
        return "aoti"
    if (folder / "model.gguf").is_file():
        return "gguf"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "hf"
    return None


def load_exported(folder: Path) -> Exported:
    """Load an exported folder; DCP holds weights only, which need the run's model.

    Raises:
        ValueError: It is no exported folder, or the library that reads it is not installed.
    """
    target = target_of(folder)
    if target == "hf":
        from titan_train.export.hf_model import HfModel

        return HfModel(folder)
    if target == "onnx":
        from titan_train.export.onnx_folder import OnnxModel

        return OnnxModel(folder)
    if target == "aoti":
        from titan_train.export.aoti_folder import AotiModel

        return AotiModel(folder)
    if target == "gguf":
        from titan_train.export.gguf.model import GgufModel

        return GgufModel(folder)
    raise ValueError(f"{folder} holds no exported model. Name a folder that `titan-train export` wrote.")


def continue_text(exported: Exported, folder: Path, prompt: str, max_new_tokens: int) -> str:
    """The greedy continuation of a text by an exported model, up to the end-of-text token.

    Args:
        exported: The loaded folder.
        folder: Where it lies; its ``tokenizer.json`` turns ids into text.
        prompt: Text to continue, at least one character.
        max_new_tokens: The most tokens to add.

    Raises:
        ValueError: The folder has no ``tokenizer.json``, or the tokenizers library is missing.
    """
    ids = folder_ids(folder)(prompt)
    if not ids:
        raise ValueError(
            f"{folder} has no tokenizer.json that turns the prompt into ids, or the tokenizers library is not installed: "
            "install titan-train[hf]."
        )
    found = exported.greedy(ids, max_new_tokens)
    return folder_text(folder, found)
