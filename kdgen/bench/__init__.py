"""Timing of a spec's kernels on a GPU: graph replays, medians, and shares of ceilings measured in the same run."""
