"""The command `twinkle acme`."""


def acme(words: list[str]) -> None:
    """Say words backwards."""
    print(*reversed(words))
