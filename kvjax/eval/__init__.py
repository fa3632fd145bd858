"""Methods compared on the same prompts: tasks, one prefill for all, scores, tables, pictures.

Here: what a comparison computes and how its results read. Not here: options and progress, which
are the command's; nor anything that serving needs.
"""
