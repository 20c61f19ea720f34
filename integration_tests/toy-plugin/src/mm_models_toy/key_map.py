"""Names in published weight files ↔ names in `ToyPredictor`."""

from mm_checkpoint import KeyMap

TOY = KeyMap(
    name="toy",
    exact={"final.weight": "head.weight", "final.bias": "head.bias"},
    substitutions=[
        (r"layers\.(\d+)\.attention\.(.+)", r"blocks.\1.\2"),
        (r"layers\.(\d+)\.feed_forward\.(.+)", r"blocks.\1.ffn.\2"),
        (r"embed\.(.+)", r"\1_embedding.weight"),
    ],
)
