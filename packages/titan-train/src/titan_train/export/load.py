"""Load an exported folder by what lies in it, with the library that its users load it with."""

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path

from titan_train.export.gate import Exported
from titan_train.export.tokenizer_json import folder_ids, folder_text
from titan_train.files import refuse_link_out
from titan_train.models.hf.folder import stop_ids_of
from titan_train.terminal import first_line
from titan_train.tokenizers.huggingface import ids_before_text
from titan_train.trust import admit_machine_code
from titan_train.trust.owner import raised_in

TARGETS = ("hf", "gguf", "onnx", "aoti", "dcp")


def target_of(folder: Path) -> str | None:
    """Which target a folder was exported to; None if it is not an exported folder."""
    if (folder / "model.onnx").is_file():
        return "onnx"
    if (folder / "model.pt2").is_file():
        return "aoti"
    if (folder / "model.gguf").is_file():
        return "gguf"
    if (folder / "config.json").is_file() and not (folder / "config.toml").exists():
        return "hf"
    return None


def refuse_options_of_runs(folder: Path, options: Mapping[str, object]) -> None:
    """Refuse what only a run's folder takes, of ``options`` by name those that are given.

    Raises:
        ValueError: One is given for an exported folder.
    """
    for option, given in options.items():
        if given:
            raise ValueError(f"{option} is for a run's folder, and {folder} is an exported one. Leave it out.")


def load_exported(folder: Path, *, trust_code: bool = False) -> Exported:
    """Load an exported folder; DCP holds weights only, which need the run's model.

    Args:
        folder: The folder.
        trust_code: Load an AOTInductor package, which is machine code, though this account has not exported it.

    Raises:
        ValueError: It is not an exported folder, or a damaged one; a file is a link out of it; the library that reads it is not
            installed; or it holds machine code that is not trusted.
    """
    if target_of(folder) == "aoti":
        admit_machine_code(folder, folder / "model.pt2", trust=trust_code)
    for file in folder.iterdir():
        refuse_link_out(file)
    with using(folder):
        return read_exported(folder)


@contextlib.contextmanager
def using(folder: Path) -> Generator[None]:
    """Report what a library raises on a folder's files as an error of the folder.

    Raises:
        ValueError: The body raised anything.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as err:
        if isinstance(err, ValueError) and raised_in(err)[0] == "titan":
            raise
        raise ValueError(
            f"{folder} cannot be used ({type(err).__name__}: {first_line(err)[:300]}): a file of it is damaged, missing or not "
            "of this export. Export the run again."
        ) from err


def read_exported(folder: Path) -> Exported:
    """Load an exported folder that this process has written itself.

    Raises:
        ValueError: It is not an exported folder, or the library that reads it is not installed.
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
    """The greedy continuation of a text by an exported model, up to a token that ends it, behind what its tokenizer begins with.

    Args:
        exported: The loaded folder.
        folder: Where it lies; its ``tokenizer.json`` turns ids into text.
        prompt: Text to continue, at least one character.
        max_new_tokens: The most tokens to add.

    Raises:
        ValueError: The folder has no ``tokenizer.json``, or a damaged one, or the tokenizers library is missing.
    """
    with using(folder):
        ids = folder_ids(folder)(prompt)
        if not ids:
            raise ValueError(
                f"{folder} has no tokenizer.json that turns the prompt into ids, or the tokenizers library is not "
                "installed: install titan-train[hf]."
            )
        found = exported.greedy([*ids_before_text(folder), *ids], max_new_tokens)
        return folder_text(folder, found, stop_ids_of(folder))
