"""The Qwen families, as data: what is particular to each when it is loaded, sharded and prompted.

Class names are those of transformers 5.19. transformers brings the tensor plans itself.
"""

from twinkle_core.model.family import ModelFamily

QWEN2_5 = ModelFamily(template="Qwen2_5Template", block_classes=("Qwen2DecoderLayer",))
QWEN3 = ModelFamily(template="Qwen3Template", block_classes=("Qwen3DecoderLayer",))
QWEN3_MOE = ModelFamily(template="Qwen3Template", block_classes=("Qwen3MoeDecoderLayer",))
QWEN3_5 = ModelFamily(
    template="Qwen3_5Template", block_classes=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"), has_recurrent_layers=True)
QWEN3_5_MOE = ModelFamily(
    template="Qwen3_5Template", block_classes=("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"), has_recurrent_layers=True)
