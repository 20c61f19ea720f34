"""Names in published weight files ↔ names in `ToyPredictor`."""

from mm_checkpoint import KeyMap

TOY = KeyMap(
    "toy",
    exact={"final.weight": "head.weight", "final.bias": "head.bias"},
    rules=[  # the first that fits counts, in either direction
        ("embed.{kind}", "{kind}_embedding.weight"),
        ("layers.{n}.feed_forward.{p*}", "blocks.{n}.ffn.{p*}"),
        ("layers.{n}.attention.{p*}", "blocks.{n}.{p*}"),
    ],
)
