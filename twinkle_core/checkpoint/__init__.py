"""Checkpoints on disk: folders of safetensors and JSON, written whole or not at all.

`naming` says what a checkpoint may be called, `folder` writes, lists and deletes them, `manifest` says what one holds and whether
it is complete, `codec` keeps Python and torch state without pickle, `random_state` the random number generators. Nothing here
knows a model; what goes into a checkpoint is decided in `twinkle_core.model.saving`.
"""
