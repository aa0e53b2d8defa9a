"""The parts of `hfpatch train`: flags and checks, data into rows, Trainer, checkpoints, engines."""
