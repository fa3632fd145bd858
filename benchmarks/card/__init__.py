"""What a machine with a Hopper GPU is asked, in calls of a few minutes; see `__main__`."""
