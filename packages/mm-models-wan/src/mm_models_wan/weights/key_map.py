"""Key map between diffusers' ``WanTransformer3DModel`` and the names of the original release, which are ours."""

from __future__ import annotations

from mm_checkpoint import KeyMap

_ATTENTION = [
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "o"),
    ("norm_q", "norm_q"),
    ("norm_k", "norm_k"),
]
_IMAGE_ATTENTION = [("add_k_proj", "k_img"), ("add_v_proj", "v_img"), ("norm_added_k", "norm_k_img")]  # Wan2.1-I2V
_EMBEDDINGS = [
    ("text_embedder.linear_1", "text_embedding.0"),
    ("text_embedder.linear_2", "text_embedding.2"),
    ("time_embedder.linear_1", "time_embedding.0"),
    ("time_embedder.linear_2", "time_embedding.2"),
    ("time_proj", "time_projection.1"),
    ("image_embedder.norm1", "img_emb.proj.0"),
    ("image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("image_embedder.ff.net.2", "img_emb.proj.3"),
    ("image_embedder.norm2", "img_emb.proj.4"),
]

WAN2_2 = KeyMap(
    "wan2_2",
    exact={
        "scale_shift_table": "head.modulation",
        "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    },
    rules=[
        ("patch_embedding.{p}", "patch_embedding.{p}"),
        *((f"condition_embedder.{theirs}.{{p}}", f"{ours}.{{p}}") for theirs, ours in _EMBEDDINGS),
        ("proj_out.{p}", "head.head.{p}"),
        ("blocks.{n}.scale_shift_table", "blocks.{n}.modulation"),
        *((f"blocks.{{n}}.attn1.{t}.{{p}}", f"blocks.{{n}}.self_attn.{o}.{{p}}") for t, o in _ATTENTION),
        *(
            (f"blocks.{{n}}.attn2.{t}.{{p}}", f"blocks.{{n}}.cross_attn.{o}.{{p}}")
            for t, o in (*_ATTENTION, *_IMAGE_ATTENTION)
        ),
        ("blocks.{n}.ffn.net.0.proj.{p}", "blocks.{n}.ffn.0.{p}"),
        ("blocks.{n}.ffn.net.2.{p}", "blocks.{n}.ffn.2.{p}"),
        # The two layouts number the norms differently: diffusers by position, the original release by kind.
        ("blocks.{n}.norm2.{p}", "blocks.{n}.norm3.{p}"),
    ],
    # diffusers' own model ignores the first; the second is no weight.
    dropped=["blocks.{n}.attn2.norm_added_q.{p}", "{k*}._extra_state", "_extra_state"],
)
