"""Named tensors of clients: selecting, storing, checkpointing."""
