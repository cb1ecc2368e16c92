"""Codecs that are written with the authoring kit, on the GPU: the kit's operators on torch tensors."""
