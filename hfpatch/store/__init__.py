"""Tensors that wait on the device, on the host or on a disk."""
