"""Bytes as printable characters, as GPT-2 writes them in its vocabulary: itself where it is printable, else from U+0100 on."""


def _byte_characters() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


CHARACTER_OF_BYTE = _byte_characters()
"""The character of each byte."""
BYTE_OF_CHARACTER = {character: bytes([byte]) for byte, character in enumerate(CHARACTER_OF_BYTE)}
"""The byte of each such character."""
