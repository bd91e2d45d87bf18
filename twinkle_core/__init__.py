"""The kernel of Twinkle and one CPU-capable reference implementation of every kind of component.

Plugins import `twinkle_core`; scripts import `twinkle`.
"""

__version__ = "0.1.0"
