"""What `hfpatch train` is made of: arguments, rows of data, chat masks, packing, the optimizer's schedule."""
