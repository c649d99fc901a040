"""The compiler: turns one checkpoint, one target and one precision into one engine file."""
