"""Read, convert, shard, save and resume model weights in Hugging Face, diffusers and DCP form."""
