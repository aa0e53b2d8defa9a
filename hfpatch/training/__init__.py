"""What scripts/train.py is made of: arguments, rows of data, chat masks, packing, the optimizer's schedule."""
