"""What a machine with a Hopper GPU is asked, in three calls of a few minutes; see `__main__`."""
