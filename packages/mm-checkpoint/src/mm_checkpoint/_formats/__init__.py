"""The file formats: safetensors, torch files, DCP, and folders of them."""
