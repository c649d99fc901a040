"""The characters that byte-level vocabularies write bytes with: printable Latin-1 as it is, the rest from 256 on
(Radford et al. 2019, encoder.py of GPT-2)."""


def _alphabet() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


CHARACTERS = _alphabet()
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}
