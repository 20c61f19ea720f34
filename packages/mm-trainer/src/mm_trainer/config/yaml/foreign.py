"""What other tools call our keys, and what to answer to a key that isn't one."""

from __future__ import annotations

from collections.abc import Collection

from mm_trainer.config.sections.fields import EACH
from mm_trainer.errors import nearest

FOREIGN_KEYS: dict[str, str] = {
    "accumulate_grad_batches": "training.gradient_accumulation_steps",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "activation_checkpointing": "features.recompute",
    "activation_offload": "features.enable_activation_offload",
    "adam_beta1": "training.beta1",
    "adam_beta2": "training.beta2",
    "adam_epsilon": "training.adam_eps",
    "base_lr": "training.lr",
    "batch_size": "training.micro_batch_size",
    "betas": "training.beta1 and training.beta2",
    "checkpoint_dir": "training.save",
    "checkpointing_steps": "training.save_interval",
    "clip_grad_norm": "training.clip_grad",
    "compile": "features.compile_plan.apply_modules",
    "context_parallel_size": "parallel.ulysses_parallel_size or parallel.ring_attention_size",
    "cp_size": "parallel.ulysses_parallel_size or parallel.ring_attention_size",
    "dataloader_num_workers": "data.dataloader_param.num_workers",
    "dataset": "data.dataset_param",
    "dp_size": "parallel.data_parallel_size",
    "ema_decay": "training.ema.decay",
    "epochs": "training.train_epochs",
    "eps": "training.adam_eps",
    "eval_interval": "training.val_interval",
    "eval_steps": "training.val_interval",
    "freeze_modules": "model.models.<name>.freeze",
    "fsdp": "parallel.fsdp_plan",
    "grad_accum_steps": "training.gradient_accumulation_steps",
    "grad_clip": "training.clip_grad",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "gradient_checkpointing": "features.recompute",
    "gradient_clipping": "training.clip_grad",
    "gradient_clip_val": "training.clip_grad",
    "learning_rate": "training.lr",
    "log_every": "training.log_interval",
    "logging_steps": "training.log_interval",
    "lr_scheduler": "training.lr_decay_style",
    "lr_scheduler_type": "training.lr_decay_style",
    "max_epochs": "training.train_epochs",
    "max_grad_norm": "training.clip_grad",
    "max_lr": "training.lr",
    "max_steps": "training.train_iters",
    "max_train_steps": "training.train_iters",
    "min_lr": "training.lr_min",
    "mixed_precision": "parallel.fsdp_plan.param_dtype",
    "model_name_or_path": "from_pretrained of a sub-model",
    "model_path": "from_pretrained of a sub-model",
    "num_epochs": "training.train_epochs",
    "num_iters": "training.train_iters",
    "num_steps": "training.train_iters",
    "num_train_epochs": "training.train_epochs",
    "num_train_steps": "training.train_iters",
    "num_warmup_steps": "training.lr_warmup_iters",
    "num_workers": "data.dataloader_param.num_workers",
    "optim": "training.optimizer",
    "optimizer_type": "training.optimizer",
    "output_dir": "training.save",
    "per_device_train_batch_size": "training.micro_batch_size",
    "precision": "parallel.fsdp_plan.param_dtype",
    "pretrained_model_name_or_path": "from_pretrained of a sub-model",
    "report_to": "tools.logging",
    "resume": "training.load",
    "resume_from": "training.load",
    "resume_from_checkpoint": "training.load",
    "ring_size": "parallel.ring_attention_size",
    "save_dir": "training.save",
    "save_every": "training.save_interval",
    "save_steps": "training.save_interval",
    "save_total_limit": "training.keep_last",
    "sequence_parallel_size": "parallel.ulysses_parallel_size or parallel.ring_attention_size",
    "shard_size": "parallel.fully_shard_parallel_size",
    "sp_size": "parallel.ulysses_parallel_size or parallel.ring_attention_size",
    "tp_size": "parallel.tensor_parallel_size",
    "train_batch_size": "training.micro_batch_size",
    "train_steps": "training.train_iters",
    "ulysses_size": "parallel.ulysses_parallel_size",
    "use_8bit_adam": "training.optimizer",
    "validation_steps": "training.val_interval",
    "warmup_iters": "training.lr_warmup_iters",
    "warmup_ratio": "training.lr_warmup_ratio",
    "warmup_steps": "training.lr_warmup_iters",
    "wd": "training.weight_decay",
    "workers": "data.dataloader_param.num_workers",
}
"""Key of other trainers → ours."""


def unknown_key(name: str, siblings: Collection[str], everywhere: Collection[str]) -> str:
    """What to say about a key that isn't known at its place.

    Args:
        name: the key.
        siblings: keys allowed at that place.
        everywhere: all dotted keys of the configuration.
    """
    siblings = [sibling for sibling in siblings if sibling != EACH]
    if name in FOREIGN_KEYS:
        return f"unknown key; here it is called {FOREIGN_KEYS[name]}"
    elsewhere = [key.replace(EACH, "<name>") for key in everywhere if key.rsplit(".", 1)[-1] == name]
    if 0 < len(elsewhere) <= 3 and nearest(name, siblings, cutoff=0.85) is None:
        sections = ", ".join(sorted({key.split(".", 1)[0] for key in elsewhere}))
        return f"unknown key here; it belongs in section {sections}: {' or '.join(elsewhere)}"
    close = nearest(name, siblings)
    if close is not None:
        return f"unknown key; did you mean {close}? (allowed here: {', '.join(siblings)})"
    foreign = nearest(name, FOREIGN_KEYS, cutoff=0.8)
    if foreign is not None:
        return f"unknown key; for {foreign} write {FOREIGN_KEYS[foreign]}"
    far = nearest(name, {key.rsplit(".", 1)[-1] for key in everywhere}, cutoff=0.8)
    if far is not None:
        meant = [key.replace(EACH, "<name>") for key in everywhere if key.rsplit(".", 1)[-1] == far]
        return f"unknown key; did you mean {' or '.join(meant[:3])}?"
    return f"unknown key (allowed here: {', '.join(siblings) or 'none'})"
