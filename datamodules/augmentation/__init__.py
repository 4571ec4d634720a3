"""Random augmentation of whole batches of images."""
