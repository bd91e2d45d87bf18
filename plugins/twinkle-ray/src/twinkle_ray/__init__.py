"""Mode `ray`: one script controls components that live on groups of Ray actors."""

__version__ = "0.1.0"
