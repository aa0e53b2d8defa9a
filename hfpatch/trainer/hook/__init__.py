"""The folder that `hfpatch run` puts on PYTHONPATH, where Python finds `sitecustomize`."""
