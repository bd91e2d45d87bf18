def new(name: str) -> None:
    """x"""
